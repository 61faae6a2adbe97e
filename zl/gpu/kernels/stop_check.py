"""Stop check: from draws to the step's results in mapped host memory, and to the rows' state for the next step.

State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from zl.gpu.kernels.context_loader import Context
from zl.gpu.kernels.launch import Settings, Variant, expect, power_of_two

EOS = 1
LENGTH = 2
NUMERIC = 4
SKIPPED = 8
IGNORE_EOS = 1


class Draws(NamedTuple):
    """What the sampler wrote, by segment: token int64, logprob float32, finite bool."""

    token: torch.Tensor
    logprob: torch.Tensor
    finite: torch.Tensor


class RowLimits(NamedTuple):
    """What ends a row, in mapped host memory: prompt_len and max_new int32 [R], row_flags uint8 [R]."""

    prompt_len: torch.Tensor
    max_new: torch.Tensor
    row_flags: torch.Tensor


class Results(NamedTuple):
    """The outputs of `zl.gpu.pinned.StepSlot`: out_token int32, out_logprob float32, out_flags uint8, all [n]."""

    out_token: torch.Tensor
    out_logprob: torch.Tensor
    out_flags: torch.Tensor


@triton.jit
def _stop_kernel(
    last_index, seg_row, seg_start, seg_tokens, seg_skipped, n_segs, token, logprob, finite,
    prompt_len, max_new, row_flags, eos, last_token, done, drawn, out_token, out_logprob, out_flags,
    N: tl.constexpr, BLOCK: tl.constexpr, N_EOS: tl.constexpr,
):  # fmt: skip
    s = tl.arange(0, BLOCK)
    place = s < N
    used = place & (s < tl.load(n_segs))
    draws = used & (tl.load(last_index + s, mask=place, other=-1) >= 0)
    row = tl.load(seg_row + s, mask=used, other=0)
    healthy = draws & (tl.load(finite + s, mask=place, other=0) != 0)
    t = tl.load(token + s, mask=place, other=-1).to(tl.int32)
    index = tl.load(seg_start + s, mask=place, other=0) + tl.load(seg_tokens + s, mask=place, other=0)
    index -= tl.load(prompt_len + row, mask=draws, other=0)
    ends = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(N_EOS):
        ends = ends | (t == tl.load(eos + j)).to(tl.int32)
    ignore = tl.load(row_flags + row, mask=draws, other=0).to(tl.int32) & 1
    too_long = index + 1 >= tl.load(max_new + row, mask=draws, other=0)
    flags = tl.where(healthy, (ends & (1 - ignore)) + tl.where(too_long, 2, 0), tl.where(draws, 4, 0))
    stopped = draws & (flags != 0)
    flags += tl.where(tl.load(seg_skipped + s, mask=used, other=0) != 0, 8, 0)
    tl.store(done + row, tl.full([BLOCK], 1, tl.uint8), mask=stopped)
    tl.store(last_token + row, t, mask=healthy)
    tl.store(drawn + s, tl.where(healthy, t, -1), mask=place)
    tl.store(out_token + s, tl.where(healthy, t, -1), mask=used)
    tl.store(out_logprob + s, tl.where(healthy, tl.load(logprob + s, mask=place, other=0.0), 0.0), mask=used)
    tl.store(out_flags + s, flags.to(tl.uint8), mask=used)


def settings(n: int, n_eos: int) -> Settings:
    """Return the launch settings for a number of segment places."""
    block = power_of_two(n)
    return Settings({"N": n, "BLOCK": block, "N_EOS": n_eos}, max(1, min(8, block // 32)), 1)


def _check(
    context: Context,
    draws: Draws,
    limits: RowLimits,
    eos: torch.Tensor,
    last_token: torch.Tensor,
    done: torch.Tensor,
    drawn: torch.Tensor,
    results: Results,
) -> int:
    n, capacity = context.seg_row.shape[0], done.shape[0]
    expect("token", draws.token, torch.int64, n)
    expect("logprob", draws.logprob, torch.float32, n)
    expect("finite", draws.finite, torch.bool, n)
    expect("prompt_len", limits.prompt_len, torch.int32, capacity)
    expect("max_new", limits.max_new, torch.int32, capacity)
    expect("row_flags", limits.row_flags, torch.uint8, capacity)
    expect("eos", eos, torch.int32, None)
    expect("last_token", last_token, torch.int32, capacity)
    expect("done", done, torch.uint8, capacity)
    expect("drawn", drawn, torch.int32, n)
    expect("out_token", results.out_token, torch.int32, n)
    expect("out_logprob", results.out_logprob, torch.float32, n)
    expect("out_flags", results.out_flags, torch.uint8, n)
    return n


def stop_check(
    context: Context,
    draws: Draws,
    limits: RowLimits,
    eos: torch.Tensor,
    last_token: torch.Tensor,
    done: torch.Tensor,
    drawn: torch.Tensor,
    results: Results,
) -> None:
    """Write each segment's result and its row's state.

    eos         int32 [n_eos], tokens that end an answer unless the row ignores them
    last_token  int32 [R], done uint8 [R]: written
    drawn       int32 [n], device: the token drawn or -1, written for every place
    results     written for the places in use
    Ready       after the current stream; safe to capture
    Raises      ShapeError
    """
    n = _check(context, draws, limits, eos, last_token, done, drawn, results)
    _stop_kernel[(1,)](
        context.last_index, context.seg_row, context.seg_start, context.seg_tokens, context.seg_skipped,
        context.n_segs, *draws, *limits, eos, last_token, done, drawn, *results,
        **settings(n, eos.shape[0]).keywords(),
    )  # fmt: skip


def stop_check_reference(
    context: Context,
    draws: Draws,
    limits: RowLimits,
    eos: torch.Tensor,
    last_token: torch.Tensor,
    done: torch.Tensor,
    drawn: torch.Tensor,
    results: Results,
) -> None:
    """Do what `stop_check` does, one segment at a time."""
    n = _check(context, draws, limits, eos, last_token, done, drawn, results)
    drawn.fill_(-1)
    for s in range(min(n, int(context.n_segs))):
        row = int(context.seg_row[s])
        token, logprob, flags = -1, 0.0, SKIPPED if int(context.seg_skipped[s]) else 0
        if int(context.last_index[s]) >= 0:
            if bool(draws.finite[s]):
                token, logprob = int(draws.token[s]), float(draws.logprob[s])
                index = int(context.seg_start[s]) + int(context.seg_tokens[s]) - int(limits.prompt_len[row])
                if token in eos.tolist() and not int(limits.row_flags[row]) & IGNORE_EOS:
                    flags |= EOS
                if index + 1 >= int(limits.max_new[row]):
                    flags |= LENGTH
                last_token[row], drawn[s] = token, token
            else:
                flags |= NUMERIC
            if flags:
                done[row] = 1
        results.out_token[s], results.out_logprob[s], results.out_flags[s] = token, logprob, flags


def variants(n_rows: int, n_eos: int) -> list[Variant]:
    """List what a build compiles of this file."""
    bytes_of = ("seg_skipped", "row_flags", "done", "out_flags")
    types = {name: "*u8" if name in bytes_of else "*i32" for name in _stop_kernel.arg_names if not name.isupper()}
    types |= {"token": "*i64", "logprob": "*fp32", "out_logprob": "*fp32", "finite": "*i1"}
    return [Variant(f"stop_check R={n_rows}", _stop_kernel, types, settings(n_rows, n_eos))]
