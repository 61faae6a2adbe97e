"""Sampling columns: what the sampler reads, gathered from the rows' columns into segment order.

A row's filter becomes a bitmap of the vocabulary here, of whatever kind it is: the sampler knows no other.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from zl.gpu.kernels.context_loader import Context
from zl.gpu.kernels.filter_update import bloom_bitmap
from zl.gpu.kernels.launch import Settings, Variant, expect
from zl.sampling.filter import Filter


class RowSampling(NamedTuple):
    """What a row samples with, in mapped host memory: float32 [R] three times; seed int64 [R], 64-bit patterns."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    penalty: torch.Tensor
    seed: torch.Tensor


class SegmentSampling(NamedTuple):
    """The same by segment, on the device, with the token's place in the answer (int64) and the row's bitmap (int32)."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    penalty: torch.Tensor
    seed: torch.Tensor
    place: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def allocate(cls, n: int, vocab: int, device: str | torch.device = "cpu") -> SegmentSampling:
        """Allocate for `n` segment places."""
        floats = [torch.zeros(n, device=device) for _ in range(3)]
        wide = [torch.zeros(n, dtype=torch.int64, device=device) for _ in range(2)]
        words = torch.zeros(n, -(-vocab // 32), dtype=torch.int32, device=device)
        return cls._make([*floats, *wide, words])


@triton.jit
def _gather_kernel(
    last_index, seg_row, seg_start, seg_tokens, prompt_len, temperature, top_p, penalty, seed, seen,
    out_temperature, out_top_p, out_penalty, out_seed, out_index, out_seen,
    WORDS: tl.constexpr, ROW_WORDS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOOM: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    if tl.load(last_index + s) < 0:
        # Nothing to draw: greedy is the sampler's shortest way through a row that nobody reads.
        tl.store(out_temperature + s, 0.0)
        return
    row = tl.load(seg_row + s).to(tl.int64)
    tl.store(out_temperature + s, tl.load(temperature + row))
    tl.store(out_top_p + s, tl.load(top_p + row))
    tl.store(out_penalty + s, tl.load(penalty + row))
    tl.store(out_seed + s, tl.load(seed + row))
    end = tl.load(seg_start + s) + tl.load(seg_tokens + s)
    tl.store(out_index + s, (end - tl.load(prompt_len + row)).to(tl.int64))
    lane = tl.arange(0, BLOCK)
    for w in range(0, WORDS, BLOCK):
        if BLOOM:
            word = bloom_bitmap(seen + row * ROW_WORDS, w + lane, w + lane < WORDS, VOCAB)
        else:
            word = tl.load(seen + row * ROW_WORDS + w + lane, mask=w + lane < WORDS, other=0)
        tl.store(out_seen + s.to(tl.int64) * WORDS + w + lane, word, mask=w + lane < WORDS)


def settings(form: Filter) -> Settings:
    """Return the launch settings for a filter."""
    words = {"WORDS": form.bitmap_words, "ROW_WORDS": form.words}
    return Settings({**words, "VOCAB": form.vocab, "BLOCK": 512, "BLOOM": form.bloom}, 4, 1)


def _check(
    context: Context, prompt_len: torch.Tensor, rows: RowSampling, seen: torch.Tensor, out: SegmentSampling,
    form: Filter,
) -> int:  # fmt: skip
    n, capacity = context.seg_row.shape[0], prompt_len.shape[0]
    expect("prompt_len", prompt_len, torch.int32, capacity)
    for name, column in rows._asdict().items():
        expect(name, column, torch.int64 if name == "seed" else torch.float32, capacity)
    expect("seen", seen, (torch.int32, torch.uint32), capacity, form.words)
    for name in ("temperature", "top_p", "penalty"):
        expect(f"out.{name}", getattr(out, name), torch.float32, n)
    for name in ("seed", "place"):
        expect(f"out.{name}", getattr(out, name), torch.int64, n)
    expect("out.seen", out.seen, torch.int32, n, form.bitmap_words)
    return n


def gather_sampling(
    context: Context,
    prompt_len: torch.Tensor,
    rows: RowSampling,
    seen: torch.Tensor,
    out: SegmentSampling,
    form: Filter,
) -> None:
    """Gather what each drawing segment samples with; the others get temperature 0, the rest of theirs stays.

    prompt_len  int32 [R]
    seen        int32 or uint32 [R, form.words]
    Ready       after the current stream; safe to capture
    Raises      ShapeError
    """
    n = _check(context, prompt_len, rows, seen, out, form)
    _gather_kernel[(n,)](
        context.last_index, context.seg_row, context.seg_start, context.seg_tokens, prompt_len, *rows,
        seen.view(torch.int32), *out, **settings(form).keywords(),
    )  # fmt: skip


def gather_sampling_reference(
    context: Context,
    prompt_len: torch.Tensor,
    rows: RowSampling,
    seen: torch.Tensor,
    out: SegmentSampling,
    form: Filter,
) -> None:
    """Do what `gather_sampling` does, one segment at a time."""
    for s in range(_check(context, prompt_len, rows, seen, out, form)):
        if int(context.last_index[s]) < 0:
            out.temperature[s] = 0
            continue
        row = int(context.seg_row[s])
        for source, target in zip(rows, out[:4], strict=True):
            target[s] = source[row]
        out.place[s] = int(context.seg_start[s]) + int(context.seg_tokens[s]) - int(prompt_len[row])
        words = seen[row : row + 1].cpu().view(torch.int32).numpy().view(np.uint32)
        out.seen[s] = torch.from_numpy(form.bitmaps(words).view(np.int32))[0]


def variants(form: Filter) -> list[Variant]:
    """List what a build compiles of this file."""
    types = {}
    for name in _gather_kernel.arg_names:
        if not name.isupper():
            kind = name.removeprefix("out_")
            floats = kind in ("temperature", "top_p", "penalty")
            types[name] = "*fp32" if floats else "*i64" if kind in ("seed", "index") else "*i32"
    return [Variant(f"sampling_columns {form.kind} V={form.vocab}", _gather_kernel, types, settings(form))]
