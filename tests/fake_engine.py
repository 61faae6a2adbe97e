"""A device double with real page semantics: its "model" hashes what it reads back from the pages.

A page that is freed, reused or rewritten while a step that reads it is in flight changes the hash, so a wrong schedule
shows up as a wrong token. Steps are executed as late as the contract allows: when they are waited for.

The double also keeps the stream's order: at launch it notes every page and column that the step will read, `reading()`
tells which pages steps in flight use, and a column or plan that changed before its step ended fails that step.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from zl.gpu.pinned import EOS, FIRST, IGNORE_EOS, LENGTH, NUMERIC, SAMPLE, SKIPPED, RowColumns, StepSlot
from zl.shapes import PAGE, pages_for

EOS_ID = 7
VOCAB = 97
POISON = -(10**6)


def next_token(tokens: list[int], seed: int) -> int:
    """The oracle: a token decided by the tokens so far and the seed, nothing else."""
    return zlib.crc32(np.array([*tokens, seed % 2**31], np.int64).tobytes()) % VOCAB


def expected_answer(prompt: list[int], seed: int, max_new: int, ignore_eos: bool) -> list[int]:
    tokens = list(prompt)
    answer: list[int] = []
    while len(answer) < max_new:
        token = next_token(tokens, seed)
        if token == EOS_ID and not ignore_eos:
            break
        tokens.append(token)
        answer.append(token)
    return answer


@dataclass
class FakeEngine:
    """launch, wait and close over numpy pages; `log` records the order of the stream."""

    columns: RowColumns
    slots: list[StepSlot]
    n_pages: int
    fallback: bool = False
    log: list[tuple[str, int]] = field(default_factory=list)
    fail_at: int = -1
    nan_rows: set[int] = field(default_factory=set)
    max_tokens_seen: int = 0

    def __post_init__(self) -> None:
        n_rows = len(self.columns.prompt_len)
        self.kv = np.full((self.n_pages, PAGE), POISON, np.int64)
        self.last = np.zeros(n_rows, np.int64)
        self.done = np.zeros(n_rows, bool)
        self.prompts = np.full(self.columns.own_ids.shape, POISON, np.int32)
        self.queue: list[tuple[int, int, tuple]] = []
        self.pages: dict[int, frozenset[int]] = {}
        self.columns_read: dict[int, dict[int, tuple]] = {}
        self.seq = 0

    def launch(self, slot: int) -> int:
        assert all(busy != slot for _, busy, _ in self.queue), "a slot is rewritten while its step is in flight"
        s = self.slots[slot]
        n = int(s.n_segs[0])
        assert len(set(s.seg_row[:n].tolist())) == n, "a row has two segments in one step"
        plan = tuple(a[:n].copy() for a in (s.seg_row, s.seg_start, s.seg_len, s.seg_flags))
        self.max_tokens_seen = max(self.max_tokens_seen, int(plan[2].sum()))
        self.seq += 1
        touched = (
            self.columns.page_table[row, : pages_for(start + n)].tolist()
            for row, start, n in zip(*(a.tolist() for a in plan[:3]), strict=True)
        )
        self.pages[self.seq] = frozenset(page for pages in touched for page in pages)
        self.columns_read[self.seq] = {
            row: self._columns_of(row, bool(flags & FIRST))
            for row, flags in zip(plan[0].tolist(), plan[3].tolist(), strict=True)
        }
        self.queue.append((self.seq, slot, plan))
        self.log.append(("launch", self.seq))
        return self.seq

    def wait(self, seq: int) -> None:
        while self.queue and self.queue[0][0] <= seq:
            number, slot, plan = self.queue[0]
            if number == self.fail_at:
                raise RuntimeError("the device fell off the bus")
            s = self.slots[slot]
            for a, b in zip((s.seg_row, s.seg_start, s.seg_len, s.seg_flags), plan, strict=True):
                assert (a[: len(b)] == b).all(), "the plan was rewritten in flight"
            for row, seen in self.columns_read.pop(number).items():
                begins = len(seen) > len(self._columns_of(row, False))
                assert self._columns_of(row, begins) == seen, f"a column of row {row} was rewritten in flight"
            self._execute(s, *plan)
            del self.pages[number]
            self.queue.pop(0)
            self.log.append(("ended", number))

    def close(self) -> None:
        self.queue.clear()

    def reading(self) -> frozenset[int]:
        """Give the pages that steps in flight read or write."""
        return frozenset().union(*list(self.pages.values()))

    def begins(self, row: int) -> bool:
        """Tell whether a row's first step is in flight."""
        return any(
            r == row and flag & FIRST
            for _, _, plan in list(self.queue)
            for r, flag in zip(plan[0].tolist(), plan[3].tolist(), strict=True)
        )

    def _columns_of(self, row: int, begins: bool) -> tuple:
        c = self.columns
        scalars = (c.prompt_len, c.max_new, c.temperature, c.top_p, c.penalty, c.seed, c.row_flags)
        read = (c.page_table[row].tobytes(), *(a[row].item() for a in scalars))
        return (*read, self._prompt_of(row).tobytes()) if begins else read

    def _prompt_of(self, row: int) -> np.ndarray:
        """Gather a prompt from where it lies: own ids, and berths that must not have changed hands."""
        ids = np.full(self.columns.own_ids.shape[1], POISON, np.int32)
        self.columns.gather(row, ids)
        return ids

    def _execute(self, s: StepSlot, rows, starts, lens, flags) -> None:
        c = self.columns
        for i, (row, start, n, flag) in enumerate(zip(rows, starts, lens, flags, strict=True)):
            if flag & FIRST:
                self.done[row] = False
                self.prompts[row] = self._prompt_of(row)
            elif self.done[row]:
                s.out_flags[i] = SKIPPED
                continue
            table, length = c.page_table[row], int(c.prompt_len[row])
            for pos in range(start, start + n):
                page = table[pos // PAGE]
                assert page >= 0, f"row {row} writes position {pos} without a page"
                if pos % PAGE == 0:
                    self.kv[page] = POISON
                self.kv[page, pos % PAGE] = self.prompts[row, pos] if pos < length else self.last[row]
            s.out_flags[i] = 0
            if flag & SAMPLE:
                end = start + n
                tokens = [int(self.kv[table[p // PAGE], p % PAGE]) for p in range(end)]
                s.out_flags[i] = self._draw(s, i, int(row), tokens, end - length)

    def _draw(self, s: StepSlot, i: int, row: int, tokens: list[int], index: int) -> int:
        c = self.columns
        if row in self.nan_rows:
            self.done[row] = True
            return NUMERIC
        token = next_token(tokens, int(c.seed[row]))
        s.out_token[i] = self.last[row] = token
        s.out_logprob[i] = -token / 10
        flag = EOS if token == EOS_ID and not c.row_flags[row] & IGNORE_EOS else 0
        if index + 1 >= c.max_new[row]:
            flag |= LENGTH
        self.done[row] = bool(flag)
        return flag
