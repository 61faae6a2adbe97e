"""The heartbeat: a canary row replayed against golden bits, and a patrol over the packed weights.

The canary runs the whole program, sampler included, on a row and a page that no request ever gets; it sees what a step
computes, but of the embedding only its own tokens. The patrol sums every byte of the weights, a slice at a time, so a
flipped bit is found wherever it is. State: golden readings and sums, where the patrol is.
Refuses rows, dispatch, net and asyncio.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple, Protocol

import numpy as np

from zl.errors import DeviceError
from zl.gpu.pinned import FIRST, IGNORE_EOS, LOGPROBS, SAMPLE, RowColumns, StepSlot
from zl.shapes import PAGE, ModelShape, Shapes

PROMPT_TOKENS = 16
DECODE_STEPS = 2
N_STEPS = 1 + DECODE_STEPS
SLICE_BYTES = 2 << 20
"""Of the packed weights, summed between two steps: about 0.2 ms."""

SHORTEST_PAUSE_S = 0.05


class Reading(NamedTuple):
    """What one step of the canary gave, to the last bit."""

    token: int
    logprob: bytes
    flags: int
    logits_crc: int


def with_canary(shapes: Shapes) -> Shapes:
    """Widen a build's shapes by the canary's row and page: for columns, slots and engine, not for the books."""
    fields = {name: getattr(shapes, name) for name in Shapes.__dataclass_fields__}
    return Shapes(**fields | {"max_rows": shapes.max_rows + 1, "n_pages": shapes.n_pages + 1})


class Program(Protocol):
    """What a canary needs of a program, beside the slot that it plans in."""

    @property
    def shape(self) -> ModelShape:
        """Give the model's sizes."""

    def launch(self, slot: int) -> int:
        """Start the step planned in a slot."""

    def wait(self, seq: int) -> None:
        """Wait for it."""

    def first_logits(self, out: np.ndarray) -> bool:
        """Copy the raw logits of the last step's first draw to `out`, f32 [vocab]; False where it drew nothing."""


class Canary:
    """One fixed row: a short prompt, two tokens after it, sampled with penalty, temperature and top-p.

    shapes   as `with_canary` gave them: the last row and the last page are the canary's
    slot     index of a step slot that nobody else plans in
    """

    def __init__(self, program: Program, columns: RowColumns, slots: list[StepSlot], slot: int, shapes: Shapes):
        self._program, self._columns = program, columns
        self._slot, self._index = slots[slot], slot
        self._row, self._page = shapes.max_rows - 1, shapes.n_pages - 1
        self.n_prompt = n = min(PROMPT_TOKENS, shapes.step_tokens, PAGE - DECODE_STEPS)
        self._ids = [(17 + 7_919 * i) % program.shape.vocab for i in range(n)]
        self._logits = np.zeros(program.shape.vocab, np.float32)

    def step(self, i: int) -> Reading:
        """Run the canary's step `i`, 0 to N_STEPS - 1 in order; no other step in flight. # sync"""
        if i == 0:
            self._seat()
        slot = self._slot
        slot.n_segs[0] = 1
        slot.seg_row[0] = self._row
        slot.seg_start[0], slot.seg_len[0] = (0, self.n_prompt) if i == 0 else (self.n_prompt + i - 1, 1)
        slot.seg_flags[0] = FIRST | SAMPLE if i == 0 else SAMPLE
        self._program.wait(self._program.launch(self._index))
        self._program.first_logits(self._logits)
        return Reading(
            int(slot.out_token[0]),
            slot.out_logprob[0].tobytes(),
            int(slot.out_flags[0]),
            zlib.crc32(self._logits.view(np.uint8).data),
        )

    def _seat(self) -> None:
        """Write the row's columns: before each beat, since damage to them would let no program ever pass again."""
        columns, row = self._columns, self._row
        columns.put_ids(row, self._ids)
        columns.max_new[row] = PAGE
        columns.page_table[row, 0] = self._page
        columns.temperature[row], columns.top_p[row], columns.penalty[row] = 0.8, 0.95, 1.1
        columns.seed[row] = 20_240_229
        columns.row_flags[row] = IGNORE_EOS | LOGPROBS

    def run(self) -> list[Reading]:
        """Run all steps."""
        return [self.step(i) for i in range(N_STEPS)]


class Sums(Protocol):
    """What the heartbeat needs of a patrol."""

    pause_s: float

    def visit(self) -> bool:
        """Look at the next slice; False where it changed."""

    def sweep(self) -> bool:
        """Look at every slice; False where one changed."""


class Patrol:
    """Sums over slices of a memory area that nobody writes.

    memory    uint8 [n], n a multiple of 8
    period_s  time in which every slice is to be visited once
    """

    def __init__(self, memory: np.ndarray, period_s: float):
        words = memory.view(np.uint64)
        most = max(1, int(period_s / SHORTEST_PAUSE_S)) if period_s else 1
        count = min(most, -(-memory.size // SLICE_BYTES))
        size = -(-words.size // count)
        self._slices = [words[i : i + size] for i in range(0, words.size, size)]
        self._golden = [self._sum(part) for part in self._slices]
        self._next = 0
        self.pause_s = period_s / len(self._slices)

    @staticmethod
    def _sum(part: np.ndarray) -> int:
        return int(part.sum(dtype=np.uint64))

    def visit(self) -> bool:
        """Sum the next slice; False where it changed."""
        i, self._next = self._next, (self._next + 1) % len(self._slices)
        return self._sum(self._slices[i]) == self._golden[i]

    def sweep(self) -> bool:
        """Sum every slice; False where one changed."""
        return all(self._sum(part) == golden for part, golden in zip(self._slices, self._golden, strict=True))


class Heartbeat:
    """Say what is due and whether the program still is what it was at start.

    period_s  time between two beats, and of one patrol; 0: nothing is ever due, `verify` still works
    Golden readings are taken here, before READY, twice: a program that does not repeat itself is refused.
    Raises    DeviceError
    """

    def __init__(self, canary: Canary, patrol: Sums, period_s: float, now: float):
        self._canary = canary
        self._patrol = patrol
        self._period_s = period_s
        self.golden = canary.run()
        if canary.run() != self.golden:
            raise DeviceError("the program does not repeat itself: two runs of a canary differ", call="step")
        self.beaten_at = now
        self._visit_at = now
        self._stage = 0

    def tend(self, now: float) -> str | None:
        """Do what is due, at most one step and one slice.

        Returns  what is wrong, in words; "" after the last step of a good beat; None otherwise
        """
        if not self._period_s:
            return None
        if now >= self._visit_at:
            self._visit_at = max(self._visit_at + self._patrol.pause_s, now - self._period_s)
            if not self._patrol.visit():
                return "the weights have changed"
        if not self._stage and now < self.beaten_at + self._period_s:
            return None
        stage, self._stage = self._stage, (self._stage + 1) % N_STEPS
        reading = self._canary.step(stage)
        if reading != self.golden[stage]:
            self._stage = 0
            return self._differs(stage, reading)
        if self._stage:
            return None
        self.beaten_at = now
        return ""

    def pause(self, now: float) -> float | None:
        """Tell how many seconds an idle loop may sleep; None: for ever."""
        if not self._period_s:
            return None
        if self._stage:
            return 0.0
        return max(0.0, min(self._visit_at, self.beaten_at + self._period_s) - now)

    def verify(self, now: float, *, sweep: bool = True) -> str:
        """Run a whole beat, and sweep, at once. Returns what is wrong, or ""."""
        self._stage = 0
        for stage, golden in enumerate(self.golden):
            reading = self._canary.step(stage)
            if reading != golden:
                return self._differs(stage, reading)
        if sweep and not self._patrol.sweep():
            return "the weights have changed"
        self.beaten_at = self._visit_at = now
        return ""

    def _differs(self, stage: int, reading: Reading) -> str:
        golden = self.golden[stage]
        what = next(n for n, a, b in zip(Reading._fields, reading, golden, strict=True) if a != b)
        return f"the canary's {what} at token {stage} is not what it was at start"
