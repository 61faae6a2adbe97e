"""zl/pages.py: pages are lent to one owner at a time, prefixes are shared, evicted only when idle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zl.errors import CapacityError, InvariantError
from zl.pages import PageBooks
from zl.shapes import PAGE


def tokens(seed: int, n_pages: int = 1) -> np.ndarray:
    return np.full(n_pages * PAGE, seed, np.int32)


def test_take_and_give_balance():
    books = PageBooks(8)
    a, b = books.take(3), books.take(5)
    assert not set(a.tolist()) & set(b.tolist())
    assert (books.n_free, books.in_use) == (0, 8)
    books.check([a, b])
    with pytest.raises(CapacityError, match="1 pages asked for, 0 of 8"):
        books.take(1)
    books.give(a)
    books.check([b])
    with pytest.raises(InvariantError, match="twice"):
        books.give(a)


def test_idle_prefix_is_evicted_oldest_first_and_only_when_needed():
    books = PageBooks(6)
    first = books.new_prefix(tokens(1, 2))
    second = books.new_prefix(tokens(2, 2))
    for prefix in (first, second):
        prefix.n_done = prefix.n_tokens
        books.unshare(prefix)
    assert (books.in_use, books.constant, books.available()) == (0, 4, 6)
    held = books.take(3)
    assert books.find_prefix(tokens(1, 2)) is None
    assert books.find_prefix(tokens(2, 2)) is second
    books.check([held])
    assert books.evictions == 1


def test_shared_prefix_is_never_evicted():
    books = PageBooks(4)
    prefix = books.new_prefix(tokens(1, 2))
    prefix.n_done = prefix.n_tokens
    books.take(2)
    with pytest.raises(CapacityError):
        books.take(1)
    assert books.find_prefix(tokens(1, 2)) is prefix


def test_unfinished_prefix_goes_with_its_last_reference():
    books = PageBooks(4)
    prefix = books.new_prefix(tokens(1, 2))
    books.share(prefix)
    prefix.n_done = PAGE
    books.unshare(prefix)
    assert books.find_prefix(prefix_tokens := tokens(1, 2)) is prefix
    books.unshare(prefix)
    assert books.find_prefix(prefix_tokens) is None
    books.check([])
    assert books.n_free == 4


def test_pinned_prefix_stays():
    books = PageBooks(2)
    prefix = books.new_prefix(tokens(1, 2))
    prefix.n_done = prefix.n_tokens
    books.pin(prefix)
    books.unshare(prefix)
    assert books.available() == 0
    with pytest.raises(CapacityError):
        books.take(1)
    books.check([])


def test_number_of_prefixes_is_bounded():
    books = PageBooks(8, max_prefixes=2)
    a, b = books.new_prefix(tokens(1)), books.new_prefix(tokens(2))
    assert books.new_prefix(tokens(3)) is None
    a.n_done = a.n_tokens
    books.unshare(a)
    assert books.new_prefix(tokens(3)) is not None
    assert books.find_prefix(tokens(1)) is None
    assert books.find_prefix(tokens(2)) is b


def test_prefix_of_half_a_page_is_our_own_mistake():
    with pytest.raises(InvariantError, match="whole pages"):
        PageBooks(4).new_prefix(np.zeros(PAGE + 1, np.int32))


def test_check_finds_a_page_with_two_owners():
    books = PageBooks(4)
    pages = books.take(2)
    with pytest.raises(InvariantError, match="owners"):
        books.check([pages, pages])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_books_balance_under_random_use(moves):
    books = PageBooks(12, max_prefixes=3)
    held: list[np.ndarray] = []
    shared = []
    for move, n in moves:
        if move == 0 and n <= books.available():
            held.append(books.take(n))
        elif move == 1 and held:
            books.give(held.pop(n % len(held)))
        elif move == 2:
            key = tokens(n, 1 + n % 3)
            prefix = books.find_prefix(key)
            if prefix is not None:
                books.share(prefix)
            elif len(key) // PAGE <= books.available():
                prefix = books.new_prefix(key)
            if prefix is not None:
                shared.append(prefix)
        elif move == 3 and shared:
            books.unshare(shared.pop(n % len(shared)))
        elif move == 4 and shared:
            shared[n % len(shared)].n_done = shared[n % len(shared)].n_tokens
        books.check(held)
    for prefix in shared:
        books.unshare(prefix)
    for pages in held:
        books.give(pages)
    assert books.in_use == 0
    books.check([])


def test_distrusted_prefixes_are_found_by_nobody_and_freed_with_their_last_row():
    books = PageBooks(8)
    held, idle, pinned = (books.new_prefix(tokens(i, 2)) for i in (1, 2, 3))
    for prefix in (held, idle, pinned):
        prefix.n_done = prefix.n_tokens
    books.pin(pinned)
    books.unshare(idle)
    books.unshare(pinned)
    books.distrust()
    for i in (1, 2, 3):
        assert books.find_prefix(tokens(i, 2)) is None
    assert books.n_free == 6
    assert books.in_use == 2
    books.check([])
    again = books.new_prefix(tokens(1, 2))
    assert not set(again.pages.tolist()) & set(held.pages.tolist())
    books.check([])
    books.unshare(held)
    books.unshare(again)
    books.check([])
    assert books.in_use == 0
