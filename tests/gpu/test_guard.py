"""zl/gpu/guard.py and zl/gpu/heartbeat.py around a native step: every kind of damage, the real loop, a tiny model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.gpu.native_kit import random_weights, tiny
from tests.tiny_model import write_tiny
from zl.dispatch import Dispatcher, Limits
from zl.gpu.guard import Guard
from zl.gpu.heartbeat import Patrol, with_canary
from zl.gpu.loop import GenerationLoop, StepResult
from zl.gpu.model import Weights
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import EOS, LENGTH, NUMERIC, RowColumns, StepSlot
from zl.gpu.programs import Tensors
from zl.gpu.renewal import FromPacked, FromSource
from zl.gpu.weights import open_model
from zl.ids import Ids
from zl.pages import PageBooks
from zl.rows import Job, Rows
from zl.sampling import profiles
from zl.sampling.filter import KINDS
from zl.shapes import PAGE, Shapes

SHAPE = tiny(tied=False)  # a tied random model says its last token for ever
SHAPES = Shapes(max_rows=8, max_model_len=256, max_tokens=128, default_tokens=16, step_tokens=48, n_pages=48)
WEIGHTS = random_weights(SHAPE, torch.float32)
BEAT_S = 0.3


class House:
    """Dispatcher, loop and a guarded native step; the test's thread is the event loop."""

    def __init__(self, *, beat_s: float = BEAT_S, dtype: torch.dtype = torch.float32, kv: str = "auto",
                 kind: str = "exact"):  # fmt: skip
        weights = WEIGHTS if dtype == torch.float32 else random_weights(SHAPE, dtype)
        wide = with_canary(SHAPES)
        self.columns = RowColumns(wide)
        slots = [StepSlot(wide), StepSlot(wide)]
        self.native = NativeStep(
            SHAPE, weights, self.columns, slots, wide.n_pages, SHAPES.step_tokens, 1, kv=kv, penalty_filter=kind
        )
        self.loads = 0
        self.weights = Weights(SHAPE, dtype, weights)
        self.guard = Guard(self.native, self.columns, slots, wide, self, beat_s=beat_s)
        self.rows, self.pages = Rows(SHAPES.max_rows), PageBooks(SHAPES.n_pages)
        self.guard.on_retire(self.pages.distrust)
        self.results: list[StepResult] = []
        self.failure: BaseException | None = None
        self.arrived = threading.Condition()
        self.loop = GenerationLoop(
            SHAPES, self.guard, slots[:1], self.rows.control, self.publish, self.failed, between=self.guard.between
        )
        self.dispatcher = Dispatcher(SHAPES, self.rows, self.pages, self.columns, self.loop.seat, Limits())
        self.answers: dict[int, list[int]] = {}
        self.flags: dict[int, int] = {}
        self.loop.start()

    def load(self, native: NativeStep, alive: Callable[[float], None]) -> Weights:
        self.loads += 1
        return self.weights

    def pack(self, native: NativeStep, weights: Weights) -> None:
        native.reload(weights.tensors)

    def close(self) -> None:
        """Nothing is held."""

    def publish(self, result: StepResult) -> None:
        with self.arrived:
            self.results.append(result)
            self.arrived.notify()

    def failed(self, failure: BaseException) -> None:
        with self.arrived:
            self.failure = failure
            self.arrived.notify()

    def submit(self, request_id: int, prompt: list[int], max_new: int = 12, prefix_len: int = 0) -> None:
        self.answers[request_id] = []
        self.dispatcher.admit(
            Job(
                conn=None, request_id=request_id, prompt=Ids.of(prompt), prefix_len=prefix_len,
                max_new=max_new, sampling=profiles.resolve(0, 0.0, None, None), seed=1, stream=None, arrived=0.0,
                ignore_eos=True,
            ),
            0.0,
        )  # fmt: skip

    def turn(self) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.results or self.failure, 30)
            if self.failure is not None:
                raise self.failure
            result = self.results.pop(0)
        for ticket, token, flag in zip(result.tickets, result.tokens, result.flags, strict=True):
            job = self.rows.live(ticket)
            if job is None:
                continue
            self.answers[job.request_id].append(token)
            if flag & (EOS | LENGTH | NUMERIC):
                self.flags[job.request_id] = flag
                self.dispatcher.end(job)
        for ticket in result.retired:
            self.dispatcher.retire(ticket, 0.0)
        self.dispatcher.pump(0.0)
        self.dispatcher.check()

    def settle(self) -> None:
        while self.rows.in_use or self.dispatcher.queued:
            self.turn()

    def ask(self, prompts: list[list[int]], first_id: int, max_new: int = 12, prefix_len: int = 0) -> list[list[int]]:
        for i, prompt in enumerate(prompts):
            self.submit(first_id + i, prompt, max_new, prefix_len)
        self.settle()
        assert all(self.flags[first_id + i] == LENGTH for i in range(len(prompts)))
        return [self.answers[first_id + i] for i in range(len(prompts))]

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> float:
        begun = time.monotonic()
        while not condition():
            assert self.failure is None
            assert time.monotonic() < begun + seconds, self.guard.counters
            time.sleep(0.005)
        return time.monotonic() - begun

    def stop(self) -> None:
        self.loop.stop()
        assert self.failure is None
        assert self.rows.in_use == 0
        assert self.pages.in_use == 0
        self.dispatcher.check()
        self.guard.close()


@pytest.fixture
def house():
    made: list[House] = []

    def make(**options) -> House:
        made.append(House(**options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def prompts(n: int, length: int = 40) -> list[list[int]]:
    return [[(i * 37 + k * 11) % 500 for k in range(length + i)] for i in range(n)]


class Crowd:
    """Keeps rows busy: a request for each that has ended, answers of 100 tokens."""

    def __init__(self, h: House, first_id: int):
        self.h, self.first, self.next = h, first_id, first_id

    def turns(self, n: int) -> None:
        for _ in range(n):
            while self.h.rows.in_use + self.h.dispatcher.queued < 6:
                self.h.submit(self.next, prompts(6)[self.next % 6], max_new=100)
                self.next += 1
            self.h.turn()

    def all_complete(self) -> bool:
        ids = range(self.first, self.next)
        return all(self.h.flags[i] == LENGTH and len(self.h.answers[i]) == 100 for i in ids)


def place_of(native: NativeStep, values: torch.Tensor) -> int:
    """Find a float32 vector in the packed weights: its offset in bytes."""
    at = native.packed().tobytes().find(values.numpy().tobytes())
    assert at >= 0
    return at


def test_quiet_program_beats_and_stays(house):
    h = house()
    before = h.ask(prompts(4), 0)
    h.until(lambda: h.guard.counters.beats >= 3)
    assert h.ask(prompts(4), 10) == before
    assert h.guard.counters.beats_failed == h.guard.counters.retired == h.loop.counters.fallback == 0
    assert h.loads == 0


def test_no_beat_is_due_when_turned_off(house):
    h = house(beat_s=0)
    h.ask(prompts(2), 0)
    assert h.guard.between() is None
    assert h.guard.counters.beats == 0


@pytest.mark.parametrize("where", ["middle", "first", "last"])
def test_a_flipped_bit_anywhere_is_caught_within_a_period_and_mended(house, where):
    h = house()
    before = h.ask(prompts(6), 0)
    packed = h.native.packed()
    whole = packed.copy()
    at = {"middle": packed.size // 2 + 3, "first": 0, "last": packed.size - 1}[where]
    packed[at] ^= 1
    took = h.until(lambda: h.guard.counters.retired)
    assert took < 2 * BEAT_S + 0.2
    h.until(lambda: h.guard.counters.recaptured)
    assert (packed == whole).all()
    assert h.ask(prompts(6), 10) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_damage_under_load_fails_no_request_and_greedy_answers_are_the_same_afterwards(house, dtype):
    h = house(dtype=dtype)
    before = h.ask(prompts(6), 0)
    crowd = Crowd(h, 100)
    crowd.turns(10)
    h.native.packed()[:: h.native.packed().size // 64] ^= 0x10
    while not h.guard.counters.retired:
        crowd.turns(1)
    crowd.turns(10)  # some of these begin while the fallback serves
    h.settle()
    assert crowd.all_complete()
    assert h.loop.counters.fallback > 0
    assert h.guard.counters.beats_failed == 1
    h.until(lambda: h.guard.counters.recaptured == 1)
    assert h.guard.serving == h.native.name
    assert h.ask(prompts(6), 30) == before


def test_rows_that_begin_in_the_fallback_answer_as_before(house):
    h = house()
    before = h.ask(prompts(6), 0)
    h.guard._pack = lambda: None  # the program never comes back
    h.native.packed()[5] ^= 4
    h.until(lambda: h.guard.counters.retired)
    assert h.ask(prompts(6), 10) == before
    assert h.loop.counters.fallback > 12
    assert h.guard.counters.recaptured == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_goes_on_in_the_fallback_and_back_as_if_nothing_had_happened(house, kind):
    """The program is retired without having computed anything wrong: answers are those of an undisturbed run."""
    h = house(beat_s=0, kind=kind)
    assert h.native.name.endswith("Bloom penalty filter") == (kind == "bloom")
    before = h.ask(prompts(6), 0, max_new=100)
    for i, prompt in enumerate(prompts(6)):
        h.submit(10 + i, prompt, max_new=100)
    for _ in range(20):
        h.turn()
    launch = h.native.launch
    h.native.launch = lambda slot: launch(slot) and 1 / 0  # raises after the step has begun
    while not h.guard.counters.retired:
        h.turn()
    h.native.launch = launch
    h.settle()
    assert [h.answers[10 + i] for i in range(6)] == before
    assert h.loop.counters.fallback > 0
    kept = {row.tobytes() for row in h.native.seen}
    for prompt, answer in zip(prompts(6), before, strict=True):
        row = np.zeros_like(h.native.seen[0])
        h.native.filter.add(row, np.array([*prompt, *answer]))
        assert row.tobytes() in kept
    h.until(lambda: h.guard.counters.recaptured)


@pytest.mark.parametrize("method", ["launch", "wait"])
def test_a_step_that_raises_is_computed_again(house, method, monkeypatch):
    monkeypatch.setattr("zl.gpu.guard.RETRY_S", 0.2)
    h = house(beat_s=0)
    before = h.ask(prompts(3), 0)
    whole = getattr(h.native, method)

    def broken(argument: int):
        if method == "wait":
            whole(argument)
        raise RuntimeError("no such device")

    setattr(h.native, method, broken)
    assert h.ask(prompts(3), 10) == before
    assert h.guard.counters.retired == 1
    h.until(lambda: h.guard.counters.recaptures_failed)  # packed well, but the canary cannot run
    assert h.guard.serving != h.native.name
    setattr(h.native, method, whole)
    h.until(lambda: h.guard.counters.recaptured)
    assert h.ask(prompts(3), 20) == before


def test_logits_that_are_not_finite_check_the_program_at_once_and_fail_no_request(house):
    """A NaN weight would end every row with NUMERIC long before the next beat, and sits in the KV of all of them."""
    h = house(beat_s=3600)
    before = h.ask(prompts(5), 0, max_new=40)
    for i, prompt in enumerate(prompts(5)):
        h.submit(10 + i, prompt, max_new=40)
    for _ in range(8):
        h.turn()
    at = place_of(h.native, WEIGHTS["layers.0.attn_norm"])
    h.native.packed()[at : at + 4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    h.settle()
    assert [h.answers[10 + i] for i in range(5)] == before
    assert h.guard.counters.retired == 1
    assert h.guard.counters.beats_failed == 1


def run_and_spoil(h: House, spoil: Callable[[], None]) -> None:
    """Run three prompts as answers 10 to 12; 30 turns on, let a step fail behind `spoil`; go on to the end."""
    for i, prompt in enumerate(prompts(3)):
        h.submit(10 + i, prompt, max_new=60)
    for _ in range(30):
        h.turn()
    launch = h.native.launch
    done = threading.Event()

    def fail(slot: int) -> int:
        h.native.launch = launch
        h.native.settle()
        spoil()
        done.set()
        raise RuntimeError("poison")

    h.native.launch = fail
    while not done.is_set():
        h.turn()
    h.settle()


def test_kv_that_is_not_finite_is_computed_again_from_the_tokens(house):
    h = house(beat_s=0)
    before = h.ask(prompts(3), 0, max_new=60)

    def spoil() -> None:
        h.native.pool()[0][:, h.columns.page_table[:3, :2].ravel()] = np.nan

    run_and_spoil(h, spoil)
    assert h.guard.counters.rebuilt_rows == 3
    assert [h.answers[10 + i] for i in range(3)] == before


def test_int8_keys_and_values_outlive_a_retirement(house):
    """Rows go on in the fallback over eight-bit pages; scales that are not finite have a row computed again."""
    h = house(beat_s=0, dtype=torch.bfloat16, kv="int8")
    assert h.native.name.endswith("int8 KV")
    before = h.ask(prompts(3), 0, max_new=60)

    def spoil() -> None:
        h.native.pool()[0][:, h.columns.page_table[0, 0]].view(np.uint16)[..., :5] = 0x7FC0

    run_and_spoil(h, spoil)
    assert h.guard.counters.rebuilt_rows == 1
    assert all(len(h.answers[10 + i]) == 60 and h.flags[10 + i] == LENGTH for i in range(3))
    h.until(lambda: h.guard.counters.recaptured)
    assert h.guard.serving == h.native.name
    assert h.ask(prompts(3), 20, max_new=60) == before


def test_constant_pages_of_a_damaged_program_reach_no_later_row(house):
    h = house(beat_s=0)
    texts = [[7] * 2 * PAGE + p for p in prompts(3, 20)]
    before = h.ask(texts, 0, prefix_len=2 * PAGE)
    assert h.pages.constant == 2
    h.native.pool()[0][:] += 1.0  # finite and wrong
    assert h.ask(texts, 10, prefix_len=2 * PAGE) != before
    h.native.packed()[9] ^= 2
    whole = h.native.wait

    def once(seq: int) -> None:
        h.native.wait = whole
        whole(seq)
        raise RuntimeError("late")

    h.native.wait = once
    h.ask(prompts(1), 20)
    h.until(lambda: h.guard.counters.recaptured)
    assert h.ask(texts, 30, prefix_len=2 * PAGE) == before


def test_a_recapture_that_does_not_help_is_tried_again(house, monkeypatch):
    monkeypatch.setattr("zl.gpu.guard.RETRY_S", 0.2)
    h = house()
    before = h.ask(prompts(2), 0)
    reload = h.native.reload
    failing = threading.Event()
    failing.set()

    def packed_badly(*arguments) -> None:
        reload(*arguments)
        if failing.is_set():
            h.native.packed()[100] ^= 1

    h.native.reload = packed_badly
    h.native.packed()[100] ^= 1
    h.until(lambda: h.guard.counters.recaptures_failed >= 2)
    assert h.ask(prompts(2), 10) == before
    failing.clear()
    h.until(lambda: h.guard.counters.recaptured)
    assert h.ask(prompts(2), 20) == before


def test_the_canary_takes_no_row_and_no_page_of_the_books(house):
    h = house()
    h.until(lambda: h.guard.counters.beats >= 2)
    assert h.rows.in_use == 0
    assert h.pages.in_use == 0
    assert h.pages.n_free == SHAPES.n_pages
    assert h.rows.n_free == SHAPES.max_rows


def test_a_broken_plan_is_the_loops_fault_and_ends_it(house):
    h = house(beat_s=0)
    h.submit(1, prompts(1)[0], max_new=50)
    h.turn()
    pages = h.columns.page_table[0].copy()
    launch = h.guard.launch

    def broken(slot):
        h.columns.page_table[0] = -1  # here no step is in flight that reads it
        return launch(slot)

    h.guard.launch = broken
    with pytest.raises(Exception, match="pages"):
        h.settle()
    h.columns.page_table[0] = pages
    assert h.failure is not None
    h.failure = None
    for job in h.rows.jobs():
        ticket = job.ticket
        h.dispatcher.end(job)
        h.dispatcher.retire(ticket, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [False, True])
def test_an_artifacts_file_gives_back_every_tensor_and_every_byte(tmp_path, dtype, biases):
    shape = tiny(tied=False, head_dim=48, attention_bias=biases, mlp_bias=biases)
    weights = random_weights(shape, dtype)
    columns = RowColumns(SHAPES)
    native = NativeStep(shape, weights, columns, [StepSlot(SHAPES), StepSlot(SHAPES)], 4, 48, 1)
    native.export(tmp_path / "packed")
    renewal = FromPacked(tmp_path / "packed")
    (tmp_path / "packed").unlink()
    whole = native.packed().copy()
    native.packed()[:] = 0xA5
    loaded = renewal.load(native, lambda _: None)
    assert (native.packed() == whole).all()
    assert loaded.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor), name
    native.packed()[77] ^= 1
    renewal.pack(native, loaded)
    assert (native.packed() == whole).all()
    renewal.close()
    native.close()


def test_patrol_finds_a_change_in_any_slice():
    memory = np.random.default_rng(3).integers(0, 256, 10 << 20, np.uint8)
    patrol = Patrol(memory, 60.0)
    assert patrol.sweep()
    assert all(patrol.visit() for _ in range(12))
    for at in (0, memory.size // 2, memory.size - 1):
        memory[at] ^= 128
        assert not patrol.sweep()
        assert sum(not patrol.visit() for _ in range(5)) == 1
        memory[at] ^= 128
    assert patrol.sweep()


def test_weights_read_again_from_the_model_are_packed_to_the_same_bytes(tmp_path):
    source = open_model(write_tiny(tmp_path, bias=True))
    tensors = Tensors(source, "bfloat16")
    columns, slots = RowColumns(SHAPES), [StepSlot(SHAPES), StepSlot(SHAPES)]
    native = NativeStep(source.shape, tensors, columns, slots, 4, 16, 1, blocks=tensors.blocks)
    try:
        packed = native.packed().copy()
        renewal = FromSource(source)
        renewal.pack(native, renewal.load(native, lambda _: None))
        assert np.array_equal(native.packed(), packed)
    finally:
        native.close()
