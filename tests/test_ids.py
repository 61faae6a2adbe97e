"""Ids: heads across pieces, and the end of a lease."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zl.errors import InvariantError
from zl.gpu.pinned import RowColumns
from zl.ids import Ids
from zl.shapes import MAX_PIECES, Shapes


class Lease:
    """Counts its ends."""

    def __init__(self):
        self.ends = 0

    @property
    def ended(self):
        return self.ends > 0

    def offset(self, part):
        raise AssertionError

    def end(self):
        self.ends += 1


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2**31 - 1), max_size=5)), max_size=6), st.data())
def test_heads_and_gathered_rows_are_the_ids_in_order(parts, data):
    own, pieces, arena = [], [], bytearray()
    for mine, ids in parts:
        if mine:
            pieces.append((~len(own), len(ids)))
            own += ids
        else:
            arena += b"?" * data.draw(st.integers(0, 3))
            pieces.append((len(arena), len(ids)))
            arena += np.array(ids, "<i4").tobytes()
    whole = [token for _, ids in parts for token in ids]
    memory = np.frombuffer(bytes(arena) or b"????", np.uint8)
    made = Ids(np.array(own, np.int32), pieces, Lease(), memory)
    n = data.draw(st.integers(0, len(whole)))
    assert len(made) == len(whole)
    assert made.head(n).tolist() == whole[:n]
    columns = RowColumns(Shapes(max_rows=2, max_model_len=64), arena=memory)
    columns.put_prompt(1, made.own, made.pieces)
    out = np.full(64, -1, np.int32)
    columns.gather(1, out)
    assert out[: len(whole)].tolist() == whole
    assert (out[len(whole) :] == -1).all()


def test_a_berth_is_given_back_once_and_its_ids_are_out_of_reach_then():
    lease = Lease()
    made = Ids(np.array([5], np.int32), [(~0, 1), (0, 1)], lease, np.zeros(4, np.uint8))
    made.give_back()
    made.give_back()
    assert lease.ends == 1
    assert made.head(1).tolist() == [5]
    with pytest.raises(InvariantError, match="given back"):
        made.head(2)
    assert len(made) == 2


def test_own_ids_need_no_berth():
    made = Ids.of(range(4))
    made.give_back()
    assert (made.head(3).tolist(), made.head(3).dtype, len(made)) == ([0, 1, 2], np.int32, 4)


def test_ids_notice_that_somebody_else_gave_the_berth_back():
    lease = Lease()
    made = Ids(np.array([5], np.int32), [(~0, 1), (0, 1)], lease, np.zeros(4, np.uint8))
    assert made.there
    lease.end()
    assert not made.there
    with pytest.raises(InvariantError, match="given back"):
        made.head(2)
    assert Ids.of(range(3)).there


@pytest.mark.parametrize(("own", "pieces"), [(3, [(0, 2)]), (0, [(0, 1)] * (MAX_PIECES + 1))])
def test_more_than_a_row_has_room_for_is_refused_before_it_is_seated(own, pieces):
    with pytest.raises(InvariantError, match="ids of its own"):
        Ids(np.zeros(own, np.int32), pieces, Lease(), np.zeros(4_000, np.uint8))
