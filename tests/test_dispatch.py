"""zl/dispatch.py: who is seated, who waits, who is turned away, with no engine at all."""

from __future__ import annotations

import numpy as np
import pytest

from zl.dispatch import MAX_PASSED, Dispatcher, Limits
from zl.errors import Code, InvariantError, RequestError
from zl.gpu.pinned import IGNORE_EOS, LOGPROBS, RowColumns
from zl.ids import Ids
from zl.pages import PageBooks
from zl.rows import Job, Rows
from zl.sampling import profiles
from zl.shapes import PAGE, Shapes

SHAPES = Shapes(max_rows=3, max_model_len=256, max_tokens=64, default_tokens=16)


def job(n_prompt=10, max_new=8, **more) -> Job:
    fields = {
        "conn": None, "request_id": 1, "prompt": Ids.of(range(n_prompt)), "prefix_len": 0,
        "max_new": max_new, "sampling": profiles.resolve(0, None, None, None), "seed": 5, "stream": None,
        "arrived": 0.0,
    }  # fmt: skip
    return Job(**(fields | more))


def make(n_pages=30, shapes=SHAPES, **limits):
    rows, pages, columns = Rows(shapes.max_rows), PageBooks(n_pages), RowColumns(shapes)
    seated = []
    dispatcher = Dispatcher(shapes, rows, pages, columns, lambda *seat: seated.append(seat), Limits(**limits))
    return dispatcher, seated, columns


def gathered(columns, row):
    out = np.full(columns.own_ids.shape[1], -1, np.int32)
    columns.gather(row, out)
    return out[: columns.prompt_len[row]].tolist()


def free(dispatcher, a_job):
    ticket = a_job.ticket
    dispatcher.end(a_job)
    dispatcher.retire(ticket, 1.0)


def test_columns_are_complete_before_the_engine_hears_of_the_row():
    dispatcher, _, columns = make()
    seen = {}

    def notify(ticket, prefix, prompt_len, program):
        row = ticket.row
        seen.update(
            ids=gathered(columns, row), table=columns.page_table[row].tolist(),
            seed=int(columns.seed[row]), max_new=int(columns.max_new[row]), flags=int(columns.row_flags[row]),
            temperature=float(columns.temperature[row]),
        )  # fmt: skip

    dispatcher._notify = notify
    sampling = profiles.resolve(0, 0.25, None, None)
    dispatcher.admit(job(40, 30, seed=2**64 - 1, ignore_eos=True, logprobs=True, sampling=sampling), 0.0)
    assert seen["ids"] == list(range(40))
    assert sum(page >= 0 for page in seen["table"]) == 3
    assert seen["seed"] == 2**64 - 1
    assert (seen["max_new"], seen["flags"], seen["temperature"]) == (30, IGNORE_EOS | LOGPROBS, 0.25)


def test_full_queue_answers_overloaded_with_a_hint():
    dispatcher, _, _ = make(max_queue=2)
    for _ in range(5):
        dispatcher.ensure_room(0.0)
        dispatcher.admit(job(), 0.0)
    assert dispatcher.queued == 2
    with pytest.raises(RequestError) as refusal:
        dispatcher.ensure_room(0.0)
    assert refusal.value.code == Code.OVERLOADED
    assert 50 <= refusal.value.retry_after_ms <= 10_000
    assert dispatcher.counters.overloaded == 1


def test_what_can_never_fit_is_refused_at_once():
    dispatcher, seated, _ = make(n_pages=4)
    with pytest.raises(RequestError, match="need 5 KV pages") as refusal:
        dispatcher.admit(job(100, 60), 0.0)
    assert refusal.value.code == Code.LIMIT_EXCEEDED
    assert not seated
    assert dispatcher.queued == 0


def test_answer_is_cut_to_the_model_length():
    dispatcher, _, _ = make()
    a = job(250, 64)
    dispatcher.admit(a, 0.0)
    assert a.max_new == 6


def test_prompt_budget_leaves_room_for_an_answer():
    dispatcher, _, _ = make()
    assert dispatcher.prompt_budget(0) == (256 - 16, 16)
    assert dispatcher.prompt_budget(4) == (252, 4)
    assert dispatcher.prompt_budget(10_000) == (256 - 32, 255)


def test_one_that_waits_too_long_gets_its_turn():
    dispatcher, _, _ = make(n_pages=10, max_queue=10_000)
    holder = job(3 * PAGE, 2)
    dispatcher.admit(holder, 0.0)
    big = job(200, 50)  # 8 pages, never free while small ones keep coming
    dispatcher.admit(big, 0.0)
    n = 0
    while big.passed < MAX_PASSED:
        small = job(4, 2)
        dispatcher.admit(small, 0.0)
        assert small.ticket is not None, "it fits, so it must not wait"
        free(dispatcher, small)
        n += 1
    late = job(4, 2)
    dispatcher.admit(late, 0.0)
    assert n == MAX_PASSED
    assert late.ticket is None
    free(dispatcher, holder)
    dispatcher.pump(0.0)
    assert big.ticket is not None
    dispatcher.check()


def test_deadlines_are_found_in_the_queue_and_on_rows():
    dispatcher, _, _ = make()
    jobs = [job(deadline=float(i)) for i in range(1, 6)]
    for each in jobs:
        dispatcher.admit(each, 0.0)
    assert dispatcher.queued == 2
    assert {j.deadline for j in dispatcher.expired(4.0)} == {1.0, 2.0, 3.0, 4.0}


def test_last_prompt_token_is_never_on_a_constant_page():
    dispatcher, _, _ = make()
    a = job(2 * PAGE, 4, prefix_len=2 * PAGE)
    dispatcher.admit(a, 0.0)
    assert a.prefix.n_tokens == PAGE


def test_page_tables_share_constant_pages_and_nothing_else():
    dispatcher, seated, columns = make()
    a, b = (job(3 * PAGE, 4, prefix_len=2 * PAGE) for _ in range(2))
    for each in (a, b):
        dispatcher.admit(each, 0.0)
    table_a, table_b = (columns.page_table[ticket.row].tolist() for ticket, *_ in seated)
    assert table_a[:2] == table_b[:2] == a.prefix.pages.tolist()
    assert not set(table_a[2:4]) & set(table_b[2:4])
    free(dispatcher, a)
    free(dispatcher, b)
    dispatcher.check()
    assert (columns.page_table == -1).all()


def test_a_fault_in_seating_one_job_loses_none_that_wait(monkeypatch):
    dispatcher, _, columns = make(n_pages=9)
    big, small = job(200, 50), job(40, 10)
    first = job(200, 10)
    dispatcher.admit(first, 0.0)
    dispatcher.admit(big, 0.0)
    monkeypatch.setattr(columns, "put_prompt", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dispatcher.admit(small, 0.0)
    assert list(dispatcher._queue) == [big]


def test_a_job_whose_berth_is_gone_is_not_seated():
    class Ended:
        ended = True

        def end(self):
            """Again."""

    dispatcher, seated, _ = make()
    gone = job(3, 5, prompt=Ids(np.empty(0, np.int32), [(0, 3)], Ended(), np.zeros(12, np.uint8)))
    with pytest.raises(InvariantError, match="given back before it was seated"):
        dispatcher.admit(gone, 0.0)
    assert not seated


def test_a_job_that_cannot_have_its_pages_is_not_asked_for_its_ids(monkeypatch):
    """A long queue is looked through at every retirement: reading the ids of each would take milliseconds."""
    dispatcher, _, _ = make(n_pages=10)
    dispatcher.admit(job(200, 50), 0.0)
    waiting = job(200, 50, prefix_len=150)
    monkeypatch.setattr(waiting.prompt.__class__, "head", lambda *_: 1 / 0)
    dispatcher.admit(waiting, 0.0)
    assert dispatcher.queued == 1
