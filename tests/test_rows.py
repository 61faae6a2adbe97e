"""zl/rows.py: the life table, epochs that expire, books that balance."""

import pytest

from zl.errors import InvariantError
from zl.ids import Ids
from zl.rows import TRANSITIONS, Event, Job, Life, Rows, Ticket


def make_job(request_id: int = 1) -> Job:
    return Job(
        conn=None, request_id=request_id, prompt=Ids.of(range(3)), prefix_len=0, max_new=4,
        sampling=None, seed=0, stream=None, arrived=0.0,
    )  # fmt: skip


def test_seat_end_retire_frees_the_row():
    rows = Rows(2)
    job = make_job()
    ticket = rows.seat(job)
    assert (rows.in_use, rows.n_free) == (1, 1)
    assert rows.live(ticket) is job
    rows.end(job)
    job.done = True
    assert rows.control[ticket.row] == 1
    assert rows.live(ticket) is None
    assert rows.job(ticket) is job
    assert rows.retire(ticket) is job
    assert (rows.in_use, rows.n_free) == (0, 2)
    rows.check()


def test_expired_ticket_finds_nothing():
    rows = Rows(1)
    first = make_job(1)
    old = rows.seat(first)
    rows.end(first)
    rows.retire(old)
    second = make_job(2)
    new = rows.seat(second)
    assert new.row == old.row
    assert rows.job(old) is None
    assert rows.job(new) is second
    assert rows.control[new.row] == 0


def test_every_transition_outside_the_table_raises():
    seen = set()
    for state in Life:
        for event in Event:
            rows = Rows(1)
            rows._life[0] = state
            if (state, event) in TRANSITIONS:
                rows._move(0, event)
                seen.add((state, event))
            else:
                with pytest.raises(InvariantError, match=event.name):
                    rows._move(0, event)
    assert seen == set(TRANSITIONS)


def test_retiring_twice_raises():
    rows = Rows(1)
    job = make_job()
    ticket = rows.seat(job)
    rows.end(job)
    rows.retire(ticket)
    with pytest.raises(InvariantError, match="expired"):
        rows.retire(ticket)


def test_lowest_free_row_is_taken_first():
    rows = Rows(4)
    jobs = [make_job(i) for i in range(4)]
    tickets = [rows.seat(job) for job in jobs]
    assert [t.row for t in tickets] == [0, 1, 2, 3]
    for i in (2, 0):
        rows.end(jobs[i])
        rows.retire(tickets[i])
    assert rows.seat(make_job(9)).row == 0
    with pytest.raises(InvariantError):
        rows.seat(make_job(10)), rows.seat(make_job(11))


def test_check_finds_a_lost_row():
    rows = Rows(2)
    rows._free.pop()
    with pytest.raises(InvariantError, match="free list"):
        rows.check()


def test_check_finds_a_wrong_ticket():
    rows = Rows(2)
    job = make_job()
    rows.seat(job)
    job.ticket = Ticket(0, 99)
    with pytest.raises(InvariantError, match="epoch"):
        rows.check()
