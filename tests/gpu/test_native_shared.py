"""Decoding rows that share their first pages attend to them together, and not a bit of any row shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.gpu.native_kit import Bench, Piece, random_weights, tiny
from zl.gpu.native.build import available_levels, have_compiler
from zl.gpu.pinned import SAMPLE
from zl.shapes import PAGE, ModelShape

pytestmark = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler or no AVX2: nothing native to test")

ROWS, WIDTH = 48, 18


def small(group: int, head_dim: int, kv_heads: int = 1) -> ModelShape:
    """One layer around attention."""
    heads = group * kv_heads
    return tiny(
        n_layers=1, hidden=64, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, ffn=64, vocab=96,
        max_position=WIDTH * PAGE,
    )  # fmt: skip


SHAPES = {
    "gqa1_head64": small(1, 64, 2), "gqa3_head64": small(3, 64, 2), "gqa4_head128": small(4, 128),
    "gqa8_head64": small(8, 64), "gqa3_head128": small(3, 128), "gqa2_head32": small(2, 32, 2),
    "gqa5_head96": small(5, 96),
}  # fmt: skip
KINDS = {"bf16": (torch.bfloat16, "auto"), "f32": (torch.float32, "auto"), "int8": (torch.bfloat16, "int8")}


class Case:
    """A pool of random keys and values, of which rows take pages of their own or share some."""

    def __init__(self, bench: Bench, seed: int):
        self.bench, self.rng = bench, np.random.default_rng(seed)
        self.pool = bench.step.pool()[0]
        if bench.step.kv == "int8":
            self.pool[:] = self.rng.integers(-127, 128, self.pool.shape, np.int8)
            scales = self.rng.uniform(0.002, 0.03, (*self.pool.shape[:3], 2 * PAGE)).astype(np.float32)
            self.pool.view(np.uint16)[..., : 2 * PAGE] = scales.view(np.uint32) >> 16
        else:
            numbers = self.rng.standard_normal(self.pool.shape, np.float32)
            self.pool[:] = numbers if bench.step.kv == "float32" else numbers.view(np.uint32) >> 16
        self.free: list[int] = []
        self.starts = np.zeros(ROWS, np.int64)
        self.shared = np.full((ROWS, WIDTH), -1, np.int32)
        self.copied = self.shared.copy()
        bench.step.prompt_ids[:] = self.rng.integers(0, bench.step.shape.vocab, bench.step.prompt_ids.shape)
        bench.columns.prompt_len.fill(WIDTH * PAGE)

    def begin(self) -> None:
        """Take back all pages."""
        self.free = self.rng.permutation(self.bench.step.n_pages).tolist()
        self.rows: list[int] = []
        self.places = self.rng.permutation(ROWS).tolist()

    def add(self, common: list[int], tokens: int) -> int:
        """Seat a row behind the common pages, with so many tokens of its own before the one that it decodes."""
        row, n = self.places[len(self.rows)], len(common)
        own = [self.free.pop() for _ in range(tokens // PAGE + 1)]
        copies = [self.free.pop() for _ in range(n)]
        self.pool[:, copies] = self.pool[:, common]
        self.shared[row], self.copied[row] = -1, -1
        self.shared[row, : n + len(own)], self.copied[row, : n + len(own)] = common + own, copies + own
        self.starts[row] = n * PAGE + tokens
        self.rows.append(row)
        return row

    def take(self, n: int) -> list[int]:
        """Pages that rows will share."""
        return [self.free.pop() for _ in range(n)]

    def decode(self, table: np.ndarray, rows: list[int]) -> dict[int, bytes]:
        """One token of each row: the logits."""
        self.bench.columns.page_table[:] = table
        for row in rows:
            if self.starts[row] % PAGE == 0:  # a page that nobody has written yet holds anything
                self.pool[:, table[row, self.starts[row] // PAGE]].view(np.uint8)[:] = 0xFF
        self.bench.run(*(Piece(row, int(self.starts[row]), 1, SAMPLE) for row in rows))
        return {rows[i]: logits.tobytes() for i, logits in self.bench.step.logits().items()}

    def check(self) -> list[tuple[int, int]]:
        """Compare every row with itself on copies of the shared pages, and some with themselves alone; the batches."""
        order = self.rng.permutation(self.rows).tolist()
        together = self.decode(self.shared, order)
        batches = self.bench.step.batches()
        assert sum(rows for rows, _ in batches) == len(order)
        assert self.decode(self.copied, self.rng.permutation(order).tolist()) == together
        assert all(pages == 0 for _, pages in self.bench.step.batches())
        for row in order[:2]:
            assert self.decode(self.shared, [row])[row] == together[row]
        assert len(set(together.values())) > 1 or len(order) == 1
        return batches


@contextmanager
def opened(shape: ModelShape, kind: str, level: str, threads: int = 2) -> Iterator[Bench]:
    """A step of 48 rows with pages for all of them to have copies."""
    dtype, kv = KINDS[kind]
    with Bench(
        shape, random_weights(shape, dtype), rows=ROWS, model_len=WIDTH * PAGE, n_pages=ROWS * WIDTH + 64,
        step_tokens=64, threads=threads, level=level, kv=kv,
    ) as bench:  # fmt: skip
        yield bench


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_has_the_same_bits_whoever_shares_its_pages(name: str, kind: str, level: str) -> None:
    shape = SHAPES[name]
    most = 16 // (shape.n_heads // shape.n_kv_heads)
    seen: set[int] = set()
    with opened(shape, kind, level, threads=1) as bench:
        case = Case(bench, seed=len(name))
        for trial in range(4):
            case.begin()
            while len(case.rows) < ROWS - 2:
                size = min(int(case.rng.integers(1, 41)) if case.rows or trial else 2 * most, ROWS - len(case.rows))
                common = case.take(int(case.rng.integers(1, 14)))
                for _ in range(size):
                    begins_page = case.rng.random() < 0.3
                    case.add(common, int(case.rng.integers(4) * PAGE if begins_page else case.rng.integers(100)))
            batches = case.check()
            assert all(rows <= most for rows, _ in batches), trial
            seen |= {rows for rows, pages in batches if pages}
    assert max(seen, default=1) == (1 if kind == "int8" and level == "amx" else most)


@pytest.mark.parametrize("level", available_levels())
def test_prefixes_of_prefixes_and_rows_without_company(level: str) -> None:
    with opened(SHAPES["gqa3_head64"], "bf16", level) as bench:
        case = Case(bench, seed=7)
        case.begin()
        long = case.take(9)
        for common, count in ((long, 9), (long[:4], 3), (long[:1], 1), ([], 8), (case.take(2), 6), (long[:4], 4)):
            for _ in range(count):
                case.add(common, int(case.rng.integers(1, 70)))
        batches = case.check()
        assert {pages for _, pages in batches} >= {0, 2, 4, 9}


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_few_rows_are_left_to_all_threads(threads: int) -> None:
    with opened(SHAPES["gqa3_head64"], "bf16", available_levels()[0], threads) as bench:
        case = Case(bench, seed=8)
        case.begin()
        common = case.take(5)
        for _ in range(40):
            case.add(common, 40)
        batches = case.check()
        # Five rows a tile at most; and four items (batch, key-value head) for each thread, if there are as many.
        assert len(batches) == {1: 8, 2: 8, 16: 40}[threads]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_with_its_row(kind: str) -> None:
    with opened(SHAPES["gqa3_head64"], kind, available_levels()[0]) as bench:
        case = Case(bench, seed=9)
        case.begin()
        common = case.take(5)
        rows = [case.add(common, 40) for _ in range(20)]
        clean = case.decode(case.shared, rows)
        page = case.shared[rows[3], 5]
        case.pool[:, page].view({"bf16": np.uint16, "f32": np.uint32, "int8": np.uint16}[kind])[:] = (
            0x7FC00000 if kind == "f32" else 0x7FC0
        )
        hurt = case.decode(case.shared, rows)
        assert {row for row in rows if clean[row] != hurt[row]} == {rows[3]}
        assert np.isnan(np.frombuffer(hurt[rows[3]], np.float32)).all()
