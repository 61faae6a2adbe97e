"""zl/gpu/chunks.py: nobody gets more than is there, the room is used up, order and prefixes are kept."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from zl.gpu.chunks import Seat, share_out


def seats(*lefts: int) -> list[Seat]:
    return [Seat(ticket=i, prompt_len=left, prefix=None) for i, left in enumerate(lefts)]  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 4_000), max_size=40), st.integers(0, 600), st.none() | st.integers(1, 300))
def test_shares_fit_and_use_what_there_is(lefts, room, each):
    waiting = seats(*lefts)
    shared = share_out(waiting, room, each)
    budget = room if each is None else min(room, each * len(lefts))
    assert sum(take for _, take in shared) == min(budget, sum(lefts))
    assert all(0 < take <= seat.prompt_len for seat, take in shared)
    order = [seat.ticket for seat, _ in shared]
    assert order == sorted(order)
    if shared:
        assert shared[0][0] is waiting[0], "the oldest always gets on"


def test_a_short_prompt_overtakes_a_long_one():
    assert [take for _, take in share_out(seats(4_000, 20), 100, None)] == [80, 20]


def test_rows_that_share_a_prefix_wait_for_the_oldest_to_compute_it():
    prefix = SimpleNamespace(n_tokens=64, n_done=0, ready=False)
    first, second = (Seat(ticket=i, prompt_len=100, prefix=prefix) for i in range(2))
    assert share_out([first, second], 512, None) == [(first, 64)]
    prefix.n_done, prefix.ready = 64, True
    assert share_out([first, second], 512, None) == [(first, 36), (second, 36)]
