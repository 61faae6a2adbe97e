"""Context loader: turn a step's segments into the token columns that the forward pass reads.

One launch starts the rows whose first segment this is, whatever the number of messages and rows: their prompts are
gathered from the berths that requests came in and from the host's own ids, their page table moves to the device, their
penalty filter is built. The next writes the token columns.
State: none. Refuses model, rows and the environment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from zl.errors import ShapeError
from zl.gpu.kernels.filter_update import add_reference, add_to_bloom
from zl.gpu.kernels.launch import Settings, Variant, expect, power_of_two
from zl.sampling.filter import Filter
from zl.shapes import MAX_PIECES, PAGE

SAMPLE = 1
FIRST = 2

_WORDS = (torch.int32, torch.uint32)


class Plan(NamedTuple):
    """A step's plan, in mapped host memory: the inputs of `zl.gpu.pinned.StepSlot` as tensors.

    n_segs int32 [1]; seg_row, seg_start, seg_len int32 [R]; seg_flags uint8 [R]: SAMPLE, FIRST
    """

    n_segs: torch.Tensor
    seg_row: torch.Tensor
    seg_start: torch.Tensor
    seg_len: torch.Tensor
    seg_flags: torch.Tensor


class Pieces(NamedTuple):
    """Where the prompts of rows that start lie, in mapped host memory: `zl.gpu.pinned.RowColumns` as tensors.

    own_ids int32 [R, max_len]; n_pieces int32 [R]; piece_at int32 [R, K]; piece_source int64 [R, K];
    arena int32 [n], the bytes of `RowColumns.arena` as aligned words
    """

    own_ids: torch.Tensor
    n_pieces: torch.Tensor
    piece_at: torch.Tensor
    piece_source: torch.Tensor
    arena: torch.Tensor


class Rows(NamedTuple):
    """What a row's steps read; W words of a filter.

    Mapped host memory: page_table int32 [R, P], -1 where unused; prompt_len int32 [R].
    Device: table int32 [R, P], the page table that attention walks, and prompt_ids int32 [R, max_len], both copied when
    a row starts; last_token int32 [R]; done uint8 [R]; seen int32 or uint32 [R, W]
    """

    page_table: torch.Tensor
    table: torch.Tensor
    prompt_ids: torch.Tensor
    prompt_len: torch.Tensor
    last_token: torch.Tensor
    done: torch.Tensor
    seen: torch.Tensor


class Context(NamedTuple):
    """The step as the kernels see it, on the device. T is the token bucket, R the fixed number of segment places.

    token_ids, positions, row_of_token   int32 [T]; 0, 0 and -1 in padding
    slot_of_token   int32 [T], page * PAGE + offset; -1 in padding
    tail_of_token   int32 [T], slots after this one that nothing has written since the page was handed out, to be zeroed
    seg_row, seg_start   int32 [R]
    seg_tokens      int32 [R], tokens computed: 0 for places unused and for rows already done
    seg_offset      int32 [R], the segment's first token in [0, T)
    last_index      int32 [R], the token that yields logits; -1 where none does
    seg_skipped     uint8 [R], 1 where the row was done before this step
    n_tokens        int32 [1], live tokens
    n_segs          int32 [1], segments
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_of_token: torch.Tensor
    slot_of_token: torch.Tensor
    tail_of_token: torch.Tensor
    seg_row: torch.Tensor
    seg_start: torch.Tensor
    seg_tokens: torch.Tensor
    seg_offset: torch.Tensor
    last_index: torch.Tensor
    seg_skipped: torch.Tensor
    n_tokens: torch.Tensor
    n_segs: torch.Tensor

    @classmethod
    def allocate(cls, n_tokens: int, n_rows: int, device: str | torch.device = "cpu") -> Context:
        """Allocate a zeroed context for a bucket of `n_tokens` tokens and `n_rows` segment places."""
        tokens = [torch.zeros(n_tokens, dtype=torch.int32, device=device) for _ in range(5)]
        segments = [torch.zeros(n_rows, dtype=torch.int32, device=device) for _ in range(5)]
        skipped = torch.zeros(n_rows, dtype=torch.uint8, device=device)
        counts = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
        return cls._make([*tokens, *segments, skipped, *counts])


# Not specialised: one binary serves all token buckets.
@triton.jit(do_not_specialize=["n_places"])
def _context_kernel(
    n_segs, seg_row, seg_start, seg_len, seg_flags,
    table, prompt_ids, prompt_len, last_token, done,
    token_ids, positions, row_of_token, slot_of_token, tail_of_token,
    out_row, out_start, out_tokens, out_offset, last_index, seg_skipped, n_tokens, out_n_segs, n_places,
    R: tl.constexpr, R_POW2: tl.constexpr, P: tl.constexpr, MAX_LEN: tl.constexpr,
    BLOCK: tl.constexpr, PAGE_TOKENS: tl.constexpr,
):  # fmt: skip
    # Every program reads all segments and packs them for itself: cheaper than a second launch, and no program waits.
    s = tl.arange(0, R_POW2)
    live = (s < tl.load(n_segs)) & (s < R)
    row = tl.load(seg_row + s, mask=live, other=0)
    start = tl.load(seg_start + s, mask=live, other=0)
    planned = tl.load(seg_len + s, mask=live, other=0)
    flags = tl.load(seg_flags + s, mask=live, other=0).to(tl.int32)
    first = live & ((flags & 2) != 0)
    # A row that starts ignores the old owner's `done`, so program 0 may clear it below while others run.
    skipped = tl.load(done + row, mask=live & ((flags & 2) == 0), other=0) != 0
    n = tl.where(skipped, 0, planned)
    end = tl.cumsum(n, 0)
    offset = end - n
    total = tl.minimum(tl.sum(n, 0), n_places)

    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hit = (offset[None, :] <= t[:, None]) & (t[:, None] < end[None, :])
    t_row = tl.sum(tl.where(hit, row[None, :], 0), 1)
    t_start = tl.sum(tl.where(hit, start[None, :], 0), 1)
    t_offset = tl.sum(tl.where(hit, offset[None, :], 0), 1)
    t_end = tl.sum(tl.where(hit, end[None, :], 0), 1)
    inside = t < n_places
    used = t < total
    pos = t_start + t - t_offset
    used = used & (pos >= 0) & (pos < MAX_LEN)
    from_prompt = pos < tl.load(prompt_len + t_row, mask=used, other=0)
    wide_row = t_row.to(tl.int64)
    given = tl.load(prompt_ids + wide_row * MAX_LEN + pos, mask=used & from_prompt, other=0)
    drawn = tl.load(last_token + t_row, mask=used & (pos >= 0), other=0)
    token = tl.where(from_prompt, given, drawn)
    page = tl.load(table + t_row * P + pos // PAGE_TOKENS, mask=used, other=-1)
    in_page = pos % PAGE_TOKENS
    slot = tl.where(page >= 0, page * PAGE_TOKENS + in_page, -1)
    # The segment's last token clears the rest of its page, if that page's first token is written in this step too:
    # one writer per slot, so no order between programs is needed.
    opens_page = pos - in_page >= t_start
    tail = tl.where((t == t_end - 1) & opens_page & (page >= 0), PAGE_TOKENS - 1 - in_page, 0)
    tl.store(token_ids + t, tl.where(used, token, 0), mask=inside)
    tl.store(positions + t, tl.where(used, pos, 0), mask=inside)
    tl.store(row_of_token + t, tl.where(used, t_row, -1), mask=inside)
    tl.store(slot_of_token + t, tl.where(used, slot, -1), mask=inside)
    tl.store(tail_of_token + t, tl.where(used, tail, 0), mask=inside)

    if tl.program_id(0) == 0:
        place = s < R
        tl.store(out_row + s, row, mask=place)
        tl.store(out_start + s, start, mask=place)
        tl.store(out_tokens + s, n, mask=place)
        tl.store(out_offset + s, tl.minimum(offset, n_places), mask=place)
        tl.store(last_index + s, tl.where(((flags & 1) != 0) & (n > 0), tl.minimum(end, n_places) - 1, -1), mask=place)
        tl.store(seg_skipped + s, skipped.to(tl.uint8), mask=place)
        tl.store(done + row, tl.zeros([R_POW2], tl.uint8), mask=first)
        tl.store(n_tokens, total)
        tl.store(out_n_segs, tl.minimum(tl.load(n_segs), R))


@triton.jit
def _start_kernel(
    n_segs, seg_row, seg_flags, own_ids, n_pieces, piece_at, piece_source, arena,
    page_table, table, prompt_ids, prompt_len, seen,
    K: tl.constexpr, P: tl.constexpr, MAX_LEN: tl.constexpr, WORDS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, BLOOM: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    if s >= tl.load(n_segs):
        return
    if (tl.load(seg_flags + s).to(tl.int32) & 2) == 0:
        return
    row = tl.load(seg_row + s).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    for p in range(0, P, BLOCK):
        page = tl.load(page_table + row * P + p + lane, mask=p + lane < P, other=-1)
        tl.store(table + row * P + p + lane, page, mask=p + lane < P)
    words = seen + row * WORDS
    for w in range(0, WORDS, BLOCK):
        tl.store(words + w + lane, tl.zeros([BLOCK], tl.int32), mask=w + lane < WORDS)
    # The zeros must be visible to the whole block before the first bit is set.
    tl.debug_barrier()
    n, count = tl.load(prompt_len + row), tl.load(n_pieces + row)
    ids = prompt_ids + row * MAX_LEN
    for k in range(count):
        at = tl.load(piece_at + row * K + k)
        end = tl.load(piece_at + row * K + tl.minimum(k + 1, count - 1))
        length = tl.where(k + 1 < count, end, n) - at
        source = tl.load(piece_source + row * K + k)
        # A berth's ids begin at any byte: each is put together from the two aligned words that hold it.
        mine, word, shift = row * MAX_LEN - 1 - source, source >> 2, ((source & 3) << 3).to(tl.int32)
        n_own = tl.where(source < 0, length, 0)
        n_low = length - n_own
        n_high = tl.where(shift > 0, n_low, 0)
        for i in range(0, length, BLOCK):
            used = i + lane < length
            given = tl.load(own_ids + mine + i + lane, mask=i + lane < n_own, other=0)
            low = tl.load(arena + word + i + lane, mask=i + lane < n_low, other=0)
            high = tl.load(arena + word + i + lane + 1, mask=i + lane < n_high, other=0)
            lent = (low.to(tl.uint32, bitcast=True) >> shift).to(tl.int32, bitcast=True) | (high << (31 - shift) << 1)
            token = tl.where(source < 0, given, lent)
            tl.store(ids + at + i + lane, token, mask=used)
            valid = used & (token >= 0) & (token < VOCAB)
            if BLOOM:
                add_to_bloom(words, token, valid)
            else:
                bit = tl.full([BLOCK], 1, tl.int32) << (token & 31)
                tl.atomic_or(words + (token >> 5), bit, mask=valid, sem="relaxed")


def settings(n_rows: int, pages_per_row: int, max_len: int) -> Settings:
    """Return the launch settings of the loader."""
    return Settings(
        {
            "R": n_rows,
            "R_POW2": power_of_two(n_rows),
            "P": pages_per_row,
            "MAX_LEN": max_len,
            "BLOCK": 64,
            "PAGE_TOKENS": PAGE,
        },
        num_warps=8,
        num_stages=1,
    )


def start_settings(max_pieces: int, pages_per_row: int, max_len: int, form: Filter) -> Settings:
    """Return the launch settings of the kernel that starts rows."""
    constants = {"K": max_pieces, "P": pages_per_row, "MAX_LEN": max_len, "BLOCK": 512}
    return Settings({**constants, "WORDS": form.words, "VOCAB": form.vocab, "BLOOM": form.bloom}, 4, 1)


def _check(plan: Plan, pieces: Pieces, rows: Rows, out: Context, form: Filter) -> tuple[int, int]:
    n_rows, n_tokens = out.seg_row.shape[0], out.token_ids.shape[0]
    expect("n_segs", plan.n_segs, torch.int32, 1)
    for name in ("seg_row", "seg_start", "seg_len"):
        expect(name, getattr(plan, name), torch.int32, n_rows)
    expect("seg_flags", plan.seg_flags, torch.uint8, n_rows)
    expect("page_table", rows.page_table, torch.int32, None, None)
    capacity = rows.page_table.shape[0]
    expect("table", rows.table, torch.int32, *rows.page_table.shape)
    expect("prompt_ids", rows.prompt_ids, torch.int32, capacity, None)
    expect("own_ids", pieces.own_ids, torch.int32, *rows.prompt_ids.shape)
    expect("n_pieces", pieces.n_pieces, torch.int32, capacity)
    expect("piece_at", pieces.piece_at, torch.int32, capacity, None)
    expect("piece_source", pieces.piece_source, torch.int64, *pieces.piece_at.shape)
    expect("arena", pieces.arena, torch.int32, None)
    expect("prompt_len", rows.prompt_len, torch.int32, capacity)
    expect("last_token", rows.last_token, torch.int32, capacity)
    expect("done", rows.done, torch.uint8, capacity)
    expect("seen", rows.seen, _WORDS, capacity, form.words)
    if rows.page_table.shape[1] * PAGE < rows.prompt_ids.shape[1]:
        raise ShapeError(
            "page_table", f"{rows.page_table.shape[1]} pages", f"pages for {rows.prompt_ids.shape[1]} tokens"
        )
    for name in ("token_ids", "positions", "row_of_token", "slot_of_token", "tail_of_token"):
        expect(name, getattr(out, name), torch.int32, n_tokens)
    for name in ("seg_row", "seg_start", "seg_tokens", "seg_offset", "last_index"):
        expect(f"out.{name}", getattr(out, name), torch.int32, n_rows)
    expect("seg_skipped", out.seg_skipped, torch.uint8, n_rows)
    expect("n_tokens", out.n_tokens, torch.int32, 1)
    expect("out.n_segs", out.n_segs, torch.int32, 1)
    return n_tokens, n_rows


def load_context(plan: Plan, pieces: Pieces, rows: Rows, out: Context, form: Filter) -> None:
    """Write the step's token columns and start the rows whose first segment this is.

    plan    the step's segments, at most one a row; more tokens than T are cut (the planner never sends them)
    pieces  read where a segment is FIRST, and not afterwards
    rows    row columns; `table`, `prompt_ids`, `done` and `seen` are written where a segment is FIRST
    out     written, every element of it
    form    of `rows.seen`
    Token   prompt_ids[row, pos] below prompt_len[row], last_token[row] from there on
    Ready   after the current stream; safe to capture
    Raises  ShapeError
    """
    n_tokens, n_rows = _check(plan, pieces, rows, out, form)
    max_len = rows.prompt_ids.shape[1]
    chosen = settings(n_rows, rows.page_table.shape[1], max_len)
    start = start_settings(pieces.piece_at.shape[1], rows.page_table.shape[1], max_len, form)
    _start_kernel[(n_rows,)](
        plan.n_segs, plan.seg_row, plan.seg_flags, *pieces, rows.page_table, rows.table, rows.prompt_ids,
        rows.prompt_len, rows.seen.view(torch.int32), **start.keywords(),
    )  # fmt: skip
    _context_kernel[(triton.cdiv(n_tokens, chosen.constexprs["BLOCK"]),)](
        *plan,
        rows.table, rows.prompt_ids, rows.prompt_len, rows.last_token, rows.done,
        out.token_ids, out.positions, out.row_of_token, out.slot_of_token, out.tail_of_token,
        out.seg_row, out.seg_start, out.seg_tokens, out.seg_offset, out.last_index, out.seg_skipped, out.n_tokens,
        out.n_segs, n_tokens, **chosen.keywords(),
    )  # fmt: skip


def gather_reference(pieces: Pieces, row: int, n: int) -> list[int]:
    """Read one prompt of `n` tokens as `load_context` does, piece by piece."""
    starts = pieces.piece_at[row, : int(pieces.n_pieces[row])].tolist()
    ids: list[int] = []
    packed = pieces.arena.cpu().numpy().tobytes()
    for source, at, end in zip(pieces.piece_source[row].tolist(), starts, [*starts[1:], n], strict=False):
        if source < 0:
            ids += pieces.own_ids[row, ~source : ~source + end - at].tolist()
        else:
            ids += struct.unpack_from(f"<{end - at}i", packed, source)
    return ids


def load_context_reference(plan: Plan, pieces: Pieces, rows: Rows, out: Context, form: Filter) -> None:
    """Do what `load_context` does, one token at a time."""
    n_tokens, n_rows = _check(plan, pieces, rows, out, form)
    for tensor in out:
        tensor.zero_()
    out.row_of_token.fill_(-1)
    out.slot_of_token.fill_(-1)
    out.last_index.fill_(-1)
    t = 0
    for s in range(n_rows):
        used = s < int(plan.n_segs)
        row, start, n, flags = (int(column[s]) if used else 0 for column in plan[1:])
        if flags & FIRST:
            rows.done[row] = 0
            rows.table[row] = rows.page_table[row]
            rows.seen[row] = 0
            ids = gather_reference(pieces, row, int(rows.prompt_len[row]))
            rows.prompt_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            add_reference(rows.seen[row], ids, form)
        elif used and rows.done[row]:
            out.seg_skipped[s] = 1
            n = 0
        out.seg_row[s], out.seg_start[s], out.seg_tokens[s], out.seg_offset[s] = row, start, n, t
        for pos in range(start, start + n):
            if t == n_tokens:
                break
            page = int(rows.table[row, pos // PAGE])
            known = pos < int(rows.prompt_len[row])
            out.token_ids[t] = rows.prompt_ids[row, pos] if known else rows.last_token[row]
            out.positions[t] = pos
            out.row_of_token[t] = row
            if page >= 0:
                out.slot_of_token[t] = page * PAGE + pos % PAGE
                if pos == start + n - 1 and pos - pos % PAGE >= start:
                    out.tail_of_token[t] = PAGE - 1 - pos % PAGE
            t += 1
        if flags & SAMPLE and n:
            out.last_index[s] = t - 1
    out.n_tokens[0] = t
    out.n_segs[0] = min(int(plan.n_segs), n_rows)


def variants(n_rows: int, pages_per_row: int, max_len: int, form: Filter) -> list[Variant]:
    """List what a build compiles of this file."""
    columns = {
        name: "*u8" if name in ("seg_flags", "done", "seg_skipped") else "*i32"
        for name in _context_kernel.arg_names
        if not name.isupper()
    }
    columns["n_places"] = "i32"
    types = {"seg_flags": "*u8", "piece_source": "*i64"}
    start = {name: types.get(name, "*i32") for name in _start_kernel.arg_names if not name.isupper()}
    starting = start_settings(MAX_PIECES, pages_per_row, max_len, form)
    return [
        Variant(f"context_loader R={n_rows}", _context_kernel, columns, settings(n_rows, pages_per_row, max_len)),
        Variant(f"context_start {form.kind} V={form.vocab}", _start_kernel, start, starting),
    ]
