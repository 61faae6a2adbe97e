"""zl/gpu/pacing.py: the chunk settles where a step with it takes twice a step without."""

from __future__ import annotations

import pytest

from zl.gpu.pacing import FASTER, LEAST, SLOWER, Pacer


def settle(pacer: Pacer, plain_ns: float, token_ns: float, n_steps: int = 200) -> float:
    """Let a prompt ride for `n_steps` on a machine with these costs; return the last step's time over a plain one."""
    pacer.landed(8, 0, 0, int(plain_ns))
    ratio = 0.0
    for _ in range(n_steps):
        elapsed = plain_ns + token_ns * pacer.chunk
        ratio = elapsed / plain_ns
        pacer.landed(8, pacer.chunk, 1, int(elapsed))
    return ratio


@pytest.mark.parametrize(("plain_ns", "token_ns"), [(10e6, 200e3), (10e6, 50e3), (80e6, 300e3), (20e6, 100e3)])
def test_chunk_settles_at_twice_a_plain_step(plain_ns, token_ns):
    assert 0.9 * FASTER <= settle(Pacer(64, 512), plain_ns, token_ns) <= 1.1 * SLOWER


def test_chunk_follows_a_prompt_that_grows_dearer():
    pacer = Pacer(64, 512)
    cheap = settle(pacer, 20e6, 60e3)
    first = pacer.chunk
    dear = settle(pacer, 20e6, 240e3)
    assert pacer.chunk < first / 2
    assert max(cheap, dear) <= 1.1 * SLOWER


def test_chunk_stays_within_its_bounds():
    pacer = Pacer(64, 512)
    settle(pacer, 10e6, 1)
    assert pacer.chunk == 512
    settle(pacer, 10e6, 10e6)
    assert pacer.chunk == LEAST


def test_bursts_and_prefill_alone_teach_nothing():
    pacer = Pacer(64, 512)
    pacer.landed(8, 0, 0, 10_000_000)
    for _ in range(50):
        pacer.landed(8, 512, 20, 500_000_000)
        pacer.landed(0, 512, 1, 500_000_000)
    assert pacer.chunk == 64


def test_one_stolen_core_does_not_become_normal():
    pacer = Pacer(64, 512)
    pacer.landed(8, 0, 0, 10_000_000)
    pacer.landed(8, 0, 0, 100_000_000)
    pacer.landed(8, 64, 1, 50_000_000)
    assert pacer.chunk < 64


def test_few_rows_say_nothing_of_many():
    pacer = Pacer(64, 512)
    pacer.landed(32, 0, 0, 30_000_000)
    for _ in range(20):
        pacer.landed(1, 0, 0, 8_000_000)  # the others have gone
    for _ in range(100):
        pacer.landed(32, pacer.chunk, 1, 30_000_000 + pacer.chunk * 200_000)
    assert 0.85 * FASTER <= (30e6 + pacer.chunk * 200e3) / 30e6 <= 1.1 * SLOWER


def test_a_number_of_rows_never_seen_alone_goes_by_the_next_smaller():
    pacer = Pacer(64, 512)
    pacer.landed(16, 0, 0, 20_000_000)
    pacer.landed(64, 64, 1, 60_000_000)
    assert pacer.chunk < 64
