"""The arena: berths, their books, their queue and their registration."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zl.errors import CapacityError, InvariantError
from zl.gpu.arena import Arena


@pytest.fixture
def arena():
    made = Arena(3, 5_000)
    yield made
    assert made.in_use == 0
    made.check()
    made.close()


def test_berths_are_page_aligned_disjoint_and_of_one_size(arena):
    berths = [arena.acquire() for _ in range(3)]
    for berth in berths:
        assert berth.address % mmap.PAGESIZE == 0
        assert len(berth.view) == 5_000
        berth.view[:] = bytes([berth.index + 1]) * 5_000
    assert [set(berth.view) for berth in berths] == [{berth.index + 1} for berth in berths]
    assert len({berth.address for berth in berths}) == 3
    for berth in berths:
        arena.release(berth)


def test_full_answers_none_and_counts(arena):
    berths = [arena.acquire() for _ in range(3)]
    assert arena.acquire() is None
    assert arena.in_use == 3
    arena.check()
    for berth in berths:
        arena.release(berth)


def test_waiters_are_served_first_come_first_served(arena):
    berths = [arena.acquire() for _ in range(3)]
    served = []
    for name in "abcd":
        arena.wait(name, lambda berth, name=name: served.append((name, berth)))
    arena.forget("b")
    arena.forget("nobody")
    assert arena.waiting == 3
    for berth in berths:
        arena.release(berth)
    assert [name for name, _ in served] == ["a", "c", "d"]
    assert [berth for _, berth in served] == berths
    assert arena.in_use == 3
    arena.check()
    for _, berth in served:
        arena.release(berth)


def test_a_berth_is_given_back_once_and_to_its_own_arena(arena):
    berth = arena.acquire()
    other = Arena(1, 10)
    with pytest.raises(InvariantError):
        other.release(berth)
    arena.release(berth)
    with pytest.raises(InvariantError):
        arena.release(berth)
    other.close()


def test_waiting_needs_a_reason(arena):
    with pytest.raises(InvariantError):
        arena.wait("a", print)
    berths = [arena.acquire() for _ in range(3)]
    arena.wait("a", print)
    with pytest.raises(InvariantError):
        arena.wait("a", print)
    arena.forget("a")
    for berth in berths:
        arena.release(berth)


def test_memory_is_registered_once_touched_and_unregistered_before_it_goes():
    calls = []
    arena = Arena(
        2, 100, register=lambda a, n: calls.append(("in", a, n)), unregister=lambda a: calls.append(("out", a))
    )
    assert calls == [("in", arena.address, arena.n_bytes)]
    assert arena.n_bytes == 2 * mmap.PAGESIZE
    arena.close()
    arena.close()
    assert calls[1:] == [("out", arena.address)]


def test_closing_with_a_berth_held_is_our_mistake():
    arena = Arena(1, 100)
    berth = arena.acquire()
    with pytest.raises(InvariantError):
        arena.close()
    arena.release(berth)
    arena.close()


def test_every_page_is_resident_from_the_start():
    arena = Arena(8, 262_144)
    with open("/proc/self/smaps") as smaps:
        lines = smaps.read().splitlines()
    starts = [i for i, line in enumerate(lines) if "-" in line.split(" ")[0]]
    resident = 0
    for i in starts:
        low, high = (int(edge, 16) for edge in lines[i].split(" ")[0].split("-"))
        if low <= arena.address < high:
            resident = int(next(line for line in lines[i:] if line.startswith("Rss:")).split()[1]) * 1024
    assert resident >= arena.n_bytes
    arena.close()


@pytest.mark.parametrize(("n_berths", "max_frame"), [(0, 100), (1, 0), (2**40, 2**40)])
def test_impossible_sizes_say_so(n_berths, max_frame):
    with pytest.raises(CapacityError, match="arena of"):
        Arena(n_berths, max_frame)


def test_check_finds_cooked_books(arena):
    berth = arena.acquire()
    arena._free.append(berth)
    with pytest.raises(InvariantError):
        arena.check()
    arena._free.pop()
    arena.release(berth)


@given(st.lists(st.integers(0, 4)))
def test_books_balance_after_any_order_of_calls(choices):
    arena, held = Arena(2, 100), []
    for choice in choices:
        if choice < 2:
            berth = arena.acquire()
            if berth is not None:
                held.append(berth)
            elif choice not in arena._waiters:
                arena.wait(choice, held.append)
        elif choice == 2:
            arena.forget(0)
        elif held:
            arena.release(held.pop(0))
        arena.check()
        assert arena.in_use == len(held)
    arena.forget(0)
    arena.forget(1)
    for berth in held:
        arena.release(berth)
    arena.close()


def test_refuses_torch_numpy_and_asyncio():
    text = "import sys, zl.gpu.arena; print([m for m in ('torch', 'numpy', 'asyncio') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_at_most_half_of_the_berths_outlive_their_frames():
    arena = Arena(5, 100)
    berths = [arena.acquire() for _ in range(5)]
    leases = [arena.lend(berth) for berth in berths]
    assert [lease is not None for lease in leases] == [True, True, False, False, False]
    assert arena.lent == 2
    arena.check()
    for berth in berths[2:]:
        arena.release(berth)
    leases[0].end()
    leases[0].end()
    assert (arena.lent, arena.in_use) == (1, 1)
    again = arena.acquire()
    lease = arena.lend(again)
    assert lease is not None
    for one in (lease, leases[1]):
        one.end()
    arena.check()
    assert arena.in_use == 0
    arena.close()


def test_an_arena_of_one_berth_lends_none():
    arena = Arena(1, 100)
    berth = arena.acquire()
    assert arena.lend(berth) is None
    arena.release(berth)
    arena.close()


def test_a_lent_berth_goes_to_the_one_who_waits():
    arena = Arena(2, 100)
    first, second = arena.acquire(), arena.acquire()
    lease = arena.lend(first)
    served = []
    arena.wait("a", served.append)
    lease.end()
    assert served == [first]
    arena.check()
    arena.release(first)
    arena.release(second)
    arena.close()


def test_a_lease_tells_where_a_view_of_its_berth_lies_and_refuses_others():
    arena = Arena(2, 5_000)
    one, other = arena.acquire(), arena.acquire()
    lease = arena.lend(other)
    assert lease.offset(other.view[7:19]) == other.address - arena.address + 7
    assert bytes(arena.memory[lease.offset(other.view[7:19]) :][:3]) == bytes(other.view[7:10])
    with pytest.raises(InvariantError, match="not of the leased berth"):
        lease.offset(one.view[7:19])
    assert not lease.ended
    lease.end()
    assert lease.ended
    with pytest.raises(InvariantError):
        lease.offset(other.view[7:19])
    arena.release(one)
    arena.close()


def test_closing_names_what_still_looks_into_it():
    arena = Arena(2, 100)
    look = arena.memory[:4]
    with pytest.raises(InvariantError, match="looks into it"):
        arena.close()
    look.release()
    arena.close()
