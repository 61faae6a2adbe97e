"""zl/gpu/mending.py behind the guard: damage to rows' pages and state beside a program that is sound or retired."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.gpu.test_guard import WEIGHTS, House, house, place_of, prompts  # noqa: F401 (house: a fixture)
from zl.gpu.mending import KVMemory
from zl.gpu.pinned import LENGTH, NUMERIC
from zl.shapes import PAGE

KINDS_OF_KV = [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8")]


def spoil_slots(h: House, layer: int, page: int, offsets: slice) -> None:
    """Write NaN where the keys and values of a page's tokens lie, or their scales."""
    pool, k_at, v_at = h.native.pool()
    here = pool[layer, page]
    if h.native.kv == "int8":
        scales = here.view(np.uint16)
        scales[:, : 2 * PAGE].reshape(-1, 2, PAGE)[:, :, offsets] = 0x7FC0
        return
    for at in (k_at, v_at):
        here[:, at[offsets].ravel()] = np.nan if here.dtype == np.float32 else 0x7FC0


def begin(h: House, first_id: int, n: int, turns: int, max_new: int = 60) -> None:
    for i, prompt in enumerate(prompts(n)):
        h.submit(first_id + i, prompt, max_new=max_new)
    for _ in range(turns):
        h.turn()


def between_steps(h: House, damage: Callable[[], None]) -> None:
    """Do damage on the engine thread before the next step, once."""
    launch = h.native.launch

    def once(slot: int) -> int:
        h.native.launch = launch
        damage()
        return launch(slot)

    h.native.launch = once


def answers(h: House, first_id: int, n: int) -> list[list[int]]:
    h.settle()
    assert all(h.flags[first_id + i] == LENGTH for i in range(n))
    return [h.answers[first_id + i] for i in range(n)]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("dtype", "kv"), KINDS_OF_KV)
def test_nan_in_a_running_rows_pages_fails_no_request(house, dtype, kv, layer):  # noqa: F811
    h = house(beat_s=0, dtype=dtype, kv=kv)
    before = h.ask(prompts(4), 0, max_new=60)
    begin(h, 10, 4, 10)
    between_steps(h, lambda: spoil_slots(h, layer, int(h.columns.page_table[1, 0]), slice(3, 5)))
    assert answers(h, 10, 4) == before
    assert (h.guard.counters.saved_rows, h.guard.counters.rebuilt_rows, h.guard.counters.retired) == (1, 1, 0)


@pytest.mark.parametrize(("dtype", "kv"), KINDS_OF_KV)
def test_nan_behind_a_rows_last_token_fails_no_request(house, dtype, kv):  # noqa: F811
    """Nobody has written there, and attention multiplies it by zero."""
    h = house(beat_s=0, dtype=dtype, kv=kv)
    before = h.ask(prompts(2), 0, max_new=60)
    begin(h, 10, 2, 4)  # prompts of 40 and 41 tokens: of the second page, 20 slots are free
    between_steps(h, lambda: spoil_slots(h, 0, int(h.columns.page_table[0, 1]), slice(28, 32)))
    assert answers(h, 10, 2) == before
    assert h.guard.counters.rebuilt_rows == 0


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_constant_pages_that_make_logits_not_finite_reach_no_later_row(house, value):  # noqa: F811
    """They were shared, and kept, for as long as somebody asked for them: every such request failed."""
    h = house(beat_s=0)
    texts = [[7] * 2 * PAGE + p for p in prompts(3, 20)]
    before = h.ask(texts, 0, prefix_len=2 * PAGE)
    (prefix,) = h.pages._prefixes.values()
    pool, k_at, v_at = h.native.pool()
    for at in (k_at, v_at):
        pool[0, prefix.pages[1]][:, at[9:11].ravel()] = value  # 3e38 is finite; its products are not
    assert h.ask(texts, 10, prefix_len=2 * PAGE) == before
    rebuilt = h.guard.counters.rebuilt_rows
    assert rebuilt >= 1
    assert h.ask(texts, 20, prefix_len=2 * PAGE) == before
    assert h.guard.counters.rebuilt_rows == rebuilt, "once is enough"
    assert h.guard.counters.retired == 0


def test_damaged_weights_soon_after_damaged_pages_fail_no_request(house):  # noqa: F811
    """A check for one bad row, in which the program was found sound, is no reason not to look at the next bad row."""
    h = house(beat_s=3600)
    before = h.ask(prompts(5), 0, max_new=60)
    begin(h, 10, 5, 8)
    between_steps(h, lambda: spoil_slots(h, 0, int(h.columns.page_table[2, 0]), slice(0, 1)))
    for _ in range(3):
        h.turn()
    at = place_of(h.native, WEIGHTS["layers.1.mlp_norm"])
    h.native.packed()[at : at + 4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    assert answers(h, 10, 5) == before
    assert h.guard.counters.retired == 1


def test_nan_in_pages_while_the_fallback_serves_fails_no_request(house):  # noqa: F811
    h = house(beat_s=0)
    before = h.ask(prompts(3), 0, max_new=60)
    h.guard._pack = lambda: None  # the program never comes back
    open_fallback = h.guard._open_fallback

    def opened():
        step = open_fallback()
        launch, n = step.launch, 0

        def spoiled(slot: int) -> int:
            nonlocal n
            n += 1
            if n == 5:
                spoil_slots(h, 0, int(h.columns.page_table[0, 0]), slice(0, 4))
            return launch(slot)

        step.launch = spoiled
        return step

    h.guard._open_fallback = opened
    between_steps(h, lambda: 1 / 0)
    begin(h, 10, 3, 0)
    assert answers(h, 10, 3) == before
    assert (h.guard.counters.rebuilt_rows, h.guard.counters.saved_rows) == (1, 1)


def test_kv_of_any_layer_that_is_not_finite_is_found_at_a_retirement(house):  # noqa: F811
    h = house(beat_s=0)
    before = h.ask(prompts(3), 0, max_new=60)
    begin(h, 10, 3, 10)
    launch = h.native.launch

    def fail(slot: int) -> int:
        h.native.launch = launch
        spoil_slots(h, 0, int(h.columns.page_table[1, 0]), slice(0, 1))
        raise RuntimeError("no such device")

    h.native.launch = fail
    assert answers(h, 10, 3) == before
    assert (h.guard.counters.retired, h.guard.counters.rebuilt_rows) == (1, 1)


def test_a_running_row_marked_as_ended_goes_on(house):  # noqa: F811
    """It gave no more tokens, its positions grew past its pages, and the engine ended."""
    h = house(beat_s=0)
    before = h.ask(prompts(3), 0, max_new=60)
    begin(h, 10, 3, 10)
    between_steps(h, lambda: h.native.done.fill(1))
    assert answers(h, 10, 3) == before
    assert h.guard.counters.saved_rows == 3


def test_row_state_is_made_from_the_tokens_at_a_retirement(house):  # noqa: F811
    """What the heartbeat finds between two steps may have struck last tokens, filters and marks as well."""
    h = house(beat_s=0)
    before = h.ask(prompts(3), 0, max_new=60)
    begin(h, 10, 3, 10)
    between = h.loop._between

    def strike() -> float | None:
        h.loop._between = between
        h.native.last_token.fill(3)
        h.native.seen.fill(0xFFFFFFFF)
        h.native.done.fill(1)
        h.guard._retire("the heartbeat says so")
        return between()

    h.loop._between = strike
    assert answers(h, 10, 3) == before


@pytest.mark.parametrize("column", ["own_ids", "temperature", "seed", "page_table", "n_pieces", "prompt_len"])
def test_a_program_comes_back_though_the_canarys_columns_were_damaged(house, column):  # noqa: F811
    h = house()
    before = h.ask(prompts(2), 0)
    getattr(h.columns, column)[-1] = 0 if column != "own_ids" else 5
    beats = h.guard.counters.beats
    h.until(lambda: h.guard.counters.beats + h.guard.counters.beats_failed >= beats + 2)
    h.until(lambda: h.guard.counters.recaptured == h.guard.counters.retired)
    assert h.ask(prompts(2), 10) == before
    assert not h.guard.fallback


def test_what_the_model_itself_drives_out_of_range_fails_alone_and_is_swept_for_once(house, monkeypatch):  # noqa: F811
    embed = WEIGHTS["embed"].clone()
    embed[499] = torch.inf  # a token of neither the canary nor the other prompts
    monkeypatch.setitem(WEIGHTS, "embed", embed)
    h = house(beat_s=3600)
    before = h.ask(prompts(3), 0, max_new=40)
    sweeps = []
    sweep = h.guard.heartbeat._patrol.sweep
    monkeypatch.setattr(h.guard.heartbeat._patrol, "sweep", lambda: sweeps.append(1) or sweep())
    begin(h, 10, 3, 3, max_new=40)
    for i in range(3):
        h.submit(20 + i, [5] * (10 + 30 * i) + [499] + [6] * 70, max_new=8)
    h.settle()
    assert [h.flags[20 + i] for i in range(3)] == [NUMERIC] * 3
    assert answers(h, 10, 3) == before
    assert len(sweeps) == 1
    assert (h.guard.counters.retired, h.guard.counters.saved_rows) == (0, 0)


@pytest.mark.parametrize(("dtype", "kv"), KINDS_OF_KV)
def test_a_page_is_finite_only_where_all_of_it_is(house, dtype, kv):  # noqa: F811
    h = house(beat_s=0, dtype=dtype, kv=kv)
    memory, pages = KVMemory(h.native), np.array([3, 5], np.int32)
    h.native.pool()[0][:] = 0
    assert memory.finite(pages)
    for layer, page in ((0, 5), (1, 3)):
        spoil_slots(h, layer, page, slice(30, 31))
        assert not memory.finite(pages)
        memory.clear(page, 31)
        assert not memory.finite(pages)
        memory.clear(page, 30)
        assert memory.finite(pages)
    spoil_slots(h, 0, 4, slice(0, PAGE))
    assert memory.finite(pages)
