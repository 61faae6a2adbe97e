"""zl/gpu/loop.py with zl/dispatch.py over a device double: schedules, run-ahead, sharing, failure.

The double's tokens hash what it reads from its pages, so every check of tokens is a check of page safety too.
"""

from __future__ import annotations

import queue
import random
import threading
import time

import numpy as np
import pytest

from tests.fake_engine import FakeEngine, expected_answer
from zl.dispatch import Dispatcher, Limits
from zl.gpu.arena import Arena
from zl.gpu.loop import SAMPLED_BY, GenerationLoop, StepResult
from zl.gpu.pinned import EOS, LENGTH, NUMERIC, RowColumns, StepSlot
from zl.ids import Ids
from zl.measures import Moment
from zl.pages import PageBooks
from zl.rows import Job, Rows
from zl.sampling import profiles
from zl.shapes import PAGE, Shapes

SHAPES = Shapes(max_rows=8, max_model_len=256, max_tokens=64, default_tokens=16, step_tokens=48)


class WatchedPages(PageBooks):
    """Page books that refuse to free what a step in flight uses."""

    def watch(self, engine: FakeEngine) -> None:
        self.engine = engine

    def give(self, pages) -> None:
        used = self.engine.reading() & set(pages.tolist())
        assert not used, f"pages {sorted(used)} are freed while a step in flight uses them"
        super().give(pages)


class ReusedArena(Arena):
    """Berths that the next frame arrives in as soon as they are free."""

    def release(self, berth) -> None:
        berth.view[:] = b"\x2a" * len(berth.view)
        super().release(berth)


class House:
    """Dispatcher, loop and double, driven from the test's thread like the event loop would.

    lockstep  the engine waits after each result until the test has taken it, so that a test can say what comes between
    """

    def __init__(self, *, n_pages=40, run_ahead=1, shapes=SHAPES, share=True, lockstep=True, **loop_options):
        self.lockstep = lockstep
        self.taken = threading.Semaphore(0)
        self.shapes = shapes
        self.rows = Rows(shapes.max_rows)
        self.pages = WatchedPages(n_pages, max_prefixes=4)
        self.arena = ReusedArena(8, 4 * shapes.max_model_len + 8)
        self.columns = RowColumns(shapes, arena=np.frombuffer(self.arena.memory, np.uint8))
        self.slots = [StepSlot(shapes) for _ in range(run_ahead + 1)]
        self.engine = FakeEngine(self.columns, self.slots, n_pages)
        self.pages.watch(self.engine)
        self.results: queue.Queue[StepResult | BaseException] = queue.Queue()
        self.loop = GenerationLoop(
            shapes, self.engine, self.slots, self.rows.control, self.publish, self.results.put,
            run_ahead=run_ahead, chunk_tokens=16, **loop_options,
        )  # fmt: skip
        self.dispatcher = Dispatcher(
            shapes, self.rows, self.pages, self.columns, self.loop.seat, Limits(share_prefixes=share)
        )
        self.answers: dict[int, list[int]] = {}
        self.flags: dict[int, int] = {}
        self.steps = 0
        self.moments: list[Moment] = []
        self.loop.start()

    def publish(self, result) -> None:
        self.results.put(result)
        if self.lockstep:
            self.taken.acquire(timeout=10)

    def stop(self) -> None:
        self.lockstep = False
        self.taken.release(2)
        self.loop.stop()

    def submit(
        self, request_id, prompt, *, seed=1, max_new=8, prefix_len=0, ignore_eos=False, type=0, temperature=None,
        in_berth=False,
    ) -> Job:  # fmt: skip
        job = Job(
            conn=None, request_id=request_id, prompt=self.ids(prompt, in_berth), prefix_len=prefix_len,
            max_new=max_new, sampling=profiles.resolve(type, temperature), seed=seed, stream=None, arrived=0.0,
            ignore_eos=ignore_eos,
        )  # fmt: skip
        self.answers[request_id] = []
        self.dispatcher.admit(job, 0.0)
        return job

    def ids(self, prompt, in_berth) -> Ids:
        """Lay all but a prompt's first and last token in a berth, where one is lent."""
        berth = self.arena.acquire() if in_berth else None
        lease = self.arena.lend(berth) if berth is not None else None
        if lease is None:
            if berth is not None:
                self.arena.release(berth)
            return Ids.of(prompt)
        middle = np.array(prompt[1:-1], "<i4").tobytes()
        at = len(prompt) % 7
        berth.view[at : at + len(middle)] = middle
        own = np.array([prompt[0], prompt[-1]] if len(prompt) > 1 else prompt, np.int32)
        pieces = [(~0, 1), (lease.offset(berth.view[at:]), max(0, len(prompt) - 2)), (~1, len(own) - 1)]
        return Ids(own, pieces, lease, self.columns.arena)

    def turn(self, timeout=10.0) -> None:
        result = self.results.get(timeout=timeout)
        if isinstance(result, BaseException):
            raise result
        self.steps += 1
        if result.tickets:
            self.moments.append(result.after)
        for ticket, token, flag in zip(result.tickets, result.tokens, result.flags, strict=True):
            job = self.rows.live(ticket)
            if job is None:
                continue
            if not flag & (EOS | NUMERIC):
                self.answers[job.request_id].append(token)
            if flag & (EOS | LENGTH | NUMERIC):
                self.flags[job.request_id] = flag
                self.dispatcher.end(job)
        for ticket, n in result.first:
            job = self.rows.job(ticket)
            if job is not None:
                job.constant_tokens = n
                job.prompt.give_back()
        for ticket in result.retired:
            self.dispatcher.retire(ticket, 0.0)
        self.dispatcher.pump(0.0)
        self.dispatcher.check()
        self.taken.release()

    def pause(self) -> None:
        """Wait until the engine has a result and waits for it to be taken."""
        deadline = time.monotonic() + 10
        while self.results.empty() and time.monotonic() < deadline:
            time.sleep(0.0005)

    def settle(self) -> None:
        while self.rows.in_use or self.dispatcher.queued:
            self.turn()

    def cancel(self, job: Job) -> None:
        self.dispatcher.end(job)
        self.loop.nudge()


@pytest.fixture
def house(request):
    made: list[House] = []

    def make(**options) -> House:
        made.append(House(**options))
        return made[-1]

    yield make
    for h in made:
        h.stop()
        assert h.rows.in_use == 0
        assert h.pages.in_use == 0
        assert h.arena.in_use == 0
        h.arena.check()
        h.dispatcher.check()


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_answers_equal_the_oracle(house, run_ahead):
    h = house(run_ahead=run_ahead)
    prompts = {i: [(i * 31 + k) % 90 for k in range(5 + 23 * i)] for i in range(6)}
    for i, prompt in prompts.items():
        h.submit(i, prompt, seed=i, max_new=12)
    h.settle()
    for i, prompt in prompts.items():
        assert h.answers[i] == expected_answer(prompt, i, 12, False)
    assert h.engine.max_tokens_seen <= SHAPES.step_tokens


def test_more_jobs_than_rows_all_finish(house):
    h = house(n_pages=12)
    for i in range(30):
        h.submit(i, [i, i + 1, i + 2], seed=i, max_new=5, ignore_eos=True)
    assert h.dispatcher.queued > 0
    h.settle()
    for i in range(30):
        assert h.answers[i] == expected_answer([i, i + 1, i + 2], i, 5, True)


def test_cancel_frees_row_within_one_step(house):
    h = house(run_ahead=0)
    job = h.submit(1, [1, 2, 3], max_new=60, ignore_eos=True)
    h.turn()
    h.turn()
    h.cancel(job)
    before = h.steps
    h.settle()
    # one step may have been launched before the cancel was seen, and the retirement is a result of its own
    assert h.steps - before <= 3
    assert h.engine.log[-1][0] == "ended"


def test_cancel_while_queued_needs_no_step(house):
    h = house(n_pages=8)
    runner = h.submit(1, list(range(100)), max_new=60, ignore_eos=True)
    waiting = h.submit(2, list(range(150)), max_new=60)
    assert waiting.ticket is None
    h.cancel(waiting)
    assert h.dispatcher.queued == 0
    h.cancel(runner)
    h.settle()


def test_long_prompt_is_chunked_and_others_go_on(house):
    h = house(run_ahead=0)
    h.submit(1, [5, 6], max_new=40, ignore_eos=True)
    h.turn()
    h.submit(2, [k % 90 for k in range(190)], max_new=3, ignore_eos=True)
    progress = []
    while not h.answers[2]:
        h.turn()
        progress.append(len(h.answers[1]))
    # every step that carried a chunk of the long prompt also moved the short answer on
    assert progress[-1] - progress[0] == len(progress) - 1
    assert len(progress) >= 190 // 16 - 2
    h.settle()


def test_short_prompt_overtakes_a_long_one(house):
    h = house(run_ahead=0)
    h.submit(1, [5, 6], max_new=60, ignore_eos=True)
    h.turn()
    h.submit(2, [k % 90 for k in range(190)], max_new=3, ignore_eos=True)
    h.turn()
    h.submit(3, [9, 9, 9], max_new=3, ignore_eos=True)
    while not h.answers[3]:
        h.turn()
    assert not h.answers[2]
    h.settle()


def test_shared_prefix_is_computed_once(house):
    h = house(run_ahead=1)
    system = [k % 50 for k in range(2 * PAGE + 5)]
    jobs = [h.submit(i, [*system, 60 + i], seed=i, prefix_len=len(system), max_new=4) for i in range(5)]
    constant = {}
    while h.rows.in_use:
        h.turn()
        constant |= {job.request_id: job.constant_tokens for job in jobs}
    assert constant == {0: 0, 1: 2 * PAGE, 2: 2 * PAGE, 3: 2 * PAGE, 4: 2 * PAGE}
    for i in range(5):
        assert h.answers[i] == expected_answer([*system, 60 + i], i, 4, False)
    assert h.pages.constant == 2
    late = h.submit(9, [*system, 77], seed=9, prefix_len=len(system), max_new=4)
    h.settle()
    assert late.constant_tokens == 2 * PAGE
    assert h.answers[9] == expected_answer([*system, 77], 9, 4, False)


def test_prefix_survives_the_death_of_its_leader(house):
    h = house(run_ahead=0)
    system = [k % 50 for k in range(5 * PAGE)]
    h.submit(0, [3], max_new=60, ignore_eos=True)
    h.turn()
    leader = h.submit(1, [*system, 61], seed=1, prefix_len=len(system), max_new=4)
    follower = h.submit(2, [*system, 62], seed=2, prefix_len=len(system), max_new=4)
    h.turn()
    h.turn()
    assert 0 < leader.prefix.n_done < len(system)
    h.cancel(leader)
    h.settle()
    assert h.answers[2] == expected_answer([*system, 62], 2, 4, False)
    assert follower.constant_tokens > 0


def test_one_that_does_not_fit_now_does_not_block_others(house):
    h = house(n_pages=10)
    h.submit(1, list(range(90)), max_new=60, ignore_eos=True)  # 5 pages
    big = h.submit(2, list(range(190)), max_new=60, ignore_eos=True)  # 8 pages
    small = h.submit(3, [1, 2, 3], max_new=5, ignore_eos=True)
    assert big.ticket is None
    assert small.ticket is not None
    h.settle()
    assert len(h.answers[2]) == 60


def test_numeric_row_ends_alone(house):
    h = house()
    h.submit(1, [1, 2], seed=1, max_new=10, ignore_eos=True)
    h.turn()
    h.engine.nan_rows = {1}
    h.submit(2, [3, 4], seed=2, max_new=10, ignore_eos=True)
    h.settle()
    assert h.flags[2] == NUMERIC
    assert h.answers[1] == expected_answer([1, 2], 1, 10, True)


def test_failed_step_is_reported_and_stops_the_loop():
    h = House()
    h.engine.fail_at = 3
    h.submit(1, [1, 2], max_new=30, ignore_eos=True)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        for _ in range(10):
            h.turn()
    h.stop()
    assert not h.loop.alive


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_change_no_token(house, seed):
    """Arrivals, cancels and finishes at random: every finished answer equals the oracle, nothing leaks."""
    rng = random.Random(seed)
    h = house(
        n_pages=rng.choice([14, 24, 60]), run_ahead=rng.choice([0, 1, 2]), share=rng.random() < 0.8,
        lockstep=rng.random() < 0.5,
    )  # fmt: skip
    systems = [[(s * 7 + k) % 80 for k in range(PAGE * s + 3 * s)] for s in range(3)]
    wanted: dict[int, list[int]] = {}
    jobs: dict[int, Job] = {}
    for request_id in range(60):
        system = rng.choice(systems)
        prompt = [*system, *(rng.randrange(90) for _ in range(rng.randrange(1, 60)))]
        max_new = rng.randrange(1, 20)
        ignore = rng.random() < 0.5
        jobs[request_id] = h.submit(
            request_id, prompt, seed=request_id, max_new=max_new, prefix_len=len(system), ignore_eos=ignore,
            in_berth=rng.random() < 0.6,
        )  # fmt: skip
        wanted[request_id] = expected_answer(prompt, request_id, max_new, ignore)
        while rng.random() < 0.6 and h.rows.in_use:
            h.turn()
        if rng.random() < 0.25:
            victim = rng.choice(list(jobs))
            if not jobs[victim].done:
                h.cancel(jobs[victim])
                wanted.pop(victim)
    h.settle()
    for request_id, answer in wanted.items():
        assert h.answers[request_id] == answer, request_id
    assert h.dispatcher.counters.seated == h.dispatcher.counters.retired


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_a_loop_that_runs_ahead_lets_its_steps_end_for_what_is_due(house, run_ahead):
    """The guard's checks need an empty stream, which a loop that always runs ahead never has by itself."""
    made: list[House] = []  # the loop asks before the house stands
    seen: list[frozenset[int]] = []
    again = [4]

    def between() -> None:
        for h in made:
            seen.extend([h.engine.reading()] if h.rows.in_use else [])
            again[0] = h.steps + 4

    h = house(run_ahead=run_ahead, due=lambda: any(h.steps >= again[0] for h in made), between=between)
    made.append(h)
    for i in range(4):
        h.submit(i, [i, i + 1], seed=i, max_new=30, ignore_eos=True)
    h.settle()
    assert len(seen) >= 5, "between was called while rows decoded"
    assert not any(seen), "a step was in flight"
    for i in range(4):
        assert h.answers[i] == expected_answer([i, i + 1], i, 30, True)


def test_a_loop_for_which_nothing_is_due_runs_ahead(house):
    made: list[House] = []
    seen: list[int] = []
    h = house(run_ahead=1, due=lambda: False, between=lambda: seen.extend(h.steps for h in made))
    made.append(h)
    h.submit(1, [1, 2], seed=1, max_new=30, ignore_eos=True)
    h.settle()
    assert not [step for step in seen if 2 < step < 28]


def test_planning_can_be_marked(house):
    names = []

    def mark(name, call):
        def marked(*args):
            names.append(name)
            return call(*args)

        return marked

    h = house(mark=mark)
    h.submit(1, [1, 2], seed=1, max_new=5, ignore_eos=True)
    h.settle()
    assert set(names) == {"plan"}
    assert len(names) >= 5


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_steps_are_counted_by_what_samples_them(house, run_ahead):
    h = house(run_ahead=run_ahead)
    alone = {}
    for name, options in (("CHAT", {}), ("CREATIVE", {"type": 2}), ("generic", {"temperature": 0.1})):
        before = list(h.loop.counters.by_program)
        h.submit(1, [1, 2, 3], max_new=6, ignore_eos=True, **options)
        h.settle()
        alone[name] = [now - then for now, then in zip(h.loop.counters.by_program, before, strict=True)]
    n = 6 + run_ahead  # the loop learns of an end when it has launched `run_ahead` steps more
    assert SAMPLED_BY == ("CHAT", "SUMMARIZE", "CREATIVE", "generic", "mixed", "none")
    assert alone == {"CHAT": [n, 0, 0, 0, 0, 0], "CREATIVE": [0, 0, n, 0, 0, 0], "generic": [0, 0, 0, n, 0, 0]}
    h.submit(1, [1, 2, 3], max_new=12, ignore_eos=True)
    h.turn()
    h.submit(2, [1, 2, 3], max_new=4, ignore_eos=True, type=1)
    h.settle()
    counters = h.loop.counters
    assert 4 <= counters.by_program[4] <= 4 + run_ahead
    assert sum(counters.by_program) == counters.steps
    assert counters.fallback == 0
    assert not any(h.loop._sampling), "every seat that came has gone"


def test_steps_are_counted_by_size_and_prompts_alone_are_sampled_by_nothing(house):
    h = house()
    h.submit(1, list(range(80)), max_new=3, ignore_eos=True)  # two chunks of 48 and 32 tokens, then single tokens
    h.settle()
    counters = h.loop.counters
    assert counters.buckets == (16, SHAPES.step_tokens)
    assert counters.hits[1] == [1, 0, 0, 0, 0, 1]
    assert counters.hits[0][0] == sum(counters.hits[0]) == counters.steps - 2


def test_the_engines_clock_gives_every_moment_between_two_results_to_a_part(house):
    h = house(run_ahead=0, lockstep=False)
    h.submit(1, list(range(80)), max_new=40, ignore_eos=True)
    h.settle()
    first, *_, last = h.moments
    parts = sum(last[1:]) - sum(first[1:])
    assert parts == last.at_ns - first.at_ns > 0
    assert h.loop.counters.times.graph_replay.count == h.loop.counters.steps
    assert h.loop.counters.times.schedule.count == h.loop.counters.steps


def test_steps_of_the_slow_twin_count_as_fallback(house):
    h = house()
    h.engine.fallback = True
    h.submit(1, list(range(80)), max_new=3, ignore_eos=True)
    h.settle()
    assert h.loop.counters.fallback == h.loop.counters.steps > h.loop.counters.by_program[0]


def retire_early(by):
    """Make the loop's retirement one that lets go of rows `by` steps before their last one has ended."""

    def retire(self):
        retired = [seat.ticket for seat in self._leaving if seat.last_step <= self._ended + by]
        self._leaving = [seat for seat in self._leaving if seat.last_step > self._ended + by]
        return retired

    return retire


def give_at_end(self, job):
    """Free a row's pages when its answer ends, as if nothing could be in flight then."""
    if job.ticket is not None and not job.done:
        self._pages.give(job.pages)
        job.pages = job.pages[:0]
    honest_end(self, job)


honest_end = Dispatcher.end


def berth_at_end(self, job):
    """Give a row's berth back when its answer ends, as if no step in flight could still gather from it."""
    job.prompt.give_back()
    honest_end(self, job)


def berth_at_seat(self, row, job, table):
    """Give a row's berth back when it is seated, as if its first step were over."""
    honest_write(self, row, job, table)
    job.prompt.give_back()


honest_write = Dispatcher._write_columns


def busy_schedule(h: House) -> None:
    """Cancel rows while their steps are in flight, with others waiting for their pages."""
    jobs = [h.submit(i, [i, i + 1, i + 2], seed=i, max_new=20, ignore_eos=True, in_berth=True) for i in range(20)]
    for i in range(20):
        if not jobs[i].done and jobs[i].ticket is not None:
            h.cancel(jobs[i])
        if h.rows.in_use:
            h.turn()
    h.settle()


def cancelled_as_they_begin(h: House) -> None:
    """Cancel each row while its first step is in flight, with its prompt in a berth."""
    h.submit(0, [1, 2], seed=1, max_new=100, ignore_eos=True)
    h.turn()
    h.pause()  # from here on two steps are in flight whenever the engine waits
    for i in range(1, 6):
        job = h.submit(i, [i, i + 1, i + 2, i + 3], seed=i, max_new=20, ignore_eos=True, in_berth=True)
        assert len(job.prompt.pieces) == 3, "no berth was free"
        while not h.engine.begins(job.ticket.row):
            h.turn()
            h.pause()
        h.cancel(job)
    last = h.submit(9, [7, 8, 9], seed=9, max_new=5, ignore_eos=True, in_berth=True)
    while not h.flags.get(9):
        h.turn()
    assert h.answers[9] == expected_answer([7, 8, 9], 9, 5, True), "other tokens"
    assert last.done
    h.settle()


@pytest.mark.parametrize(
    ("where", "name", "wrong", "schedule", "complaint"),
    [
        (GenerationLoop, "_retire", retire_early(1), busy_schedule, "freed while a step|rewritten in flight"),
        (GenerationLoop, "_retire", retire_early(99), busy_schedule, "freed while a step|rewritten in flight"),
        (Dispatcher, "end", give_at_end, busy_schedule, "freed while a step"),
        (Dispatcher, "end", berth_at_end, cancelled_as_they_begin, "rewritten in flight"),
        (Dispatcher, "_write_columns", berth_at_seat, cancelled_as_they_begin, "other tokens|rewritten in flight"),
    ],
    ids=["one_step_early", "at_once", "pages_at_end", "berth_at_end", "berth_at_seat"],
)
def test_the_double_notices_what_is_let_go_too_early(monkeypatch, where, name, wrong, schedule, complaint):
    monkeypatch.setattr(where, name, wrong)
    h = House(n_pages=12, run_ahead=2)
    try:
        with pytest.raises(AssertionError, match=complaint):
            schedule(h)
    finally:
        h.stop()


@pytest.mark.parametrize("schedule", [busy_schedule, cancelled_as_they_begin])
def test_the_schedules_that_the_mutants_fail_pass_unchanged(house, schedule):
    schedule(house(n_pages=12, run_ahead=2))


def test_the_double_notices_a_slot_and_a_column_rewritten_in_flight():
    shapes = Shapes(max_rows=2, max_model_len=64, step_tokens=8)
    columns, slots = RowColumns(shapes), [StepSlot(shapes) for _ in range(2)]
    engine = FakeEngine(columns, slots, 4)
    columns.put_ids(0, [1, 2, 3])
    columns.page_table[0, 0], columns.max_new[0] = 1, 5
    slots[0].n_segs[0], slots[0].seg_len[0], slots[0].seg_flags[0] = 1, 3, 3
    seq = engine.launch(0)
    assert engine.reading() == {1}
    with pytest.raises(AssertionError, match="slot is rewritten"):
        engine.launch(0)
    slots[0].seg_len[0] = 2
    with pytest.raises(AssertionError, match="plan was rewritten"):
        engine.wait(seq)
    slots[0].seg_len[0], columns.own_ids[0, 1] = 3, 9
    with pytest.raises(AssertionError, match="column of row 0"):
        engine.wait(seq)
