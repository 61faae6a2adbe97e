"""Context loader, filter update and embedding rows: integers and copies, so equal to their references exactly."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.kernel_kit import DEVICE, ints, normal
from tests.sampling import oracle
from zl.errors import ShapeError
from zl.gpu import pinned
from zl.gpu.kernels import context_loader
from zl.gpu.kernels.context_loader import Context, Pieces, Plan, Rows, load_context, load_context_reference
from zl.gpu.kernels.embed_rows import embed_rows, embed_rows_reference
from zl.gpu.kernels.filter_update import filter_update, filter_update_reference
from zl.sampling.filter import KINDS, Filter
from zl.shapes import PAGE, pages_for

VOCAB, MAX_LEN = 1_100, 96
EXACT, BLOOM = (Filter(kind, VOCAB) for kind in KINDS)
BOTH = pinned.SAMPLE | pinned.FIRST


def scattered(g: torch.Generator, prompt_len: list[int], n_pieces: int = 4) -> tuple[Pieces, list[list[int]]]:
    """Lay prompts of random ids out in pieces, in own ids and at any byte of an arena; also return the prompts."""

    def draw(low: int, high: int, n: int = 1) -> list[int]:
        return torch.randint(low, high, (n,), generator=g).tolist()

    capacity = len(prompt_len)
    own = np.full((capacity, MAX_LEN), 2**30, np.int32)
    at, source = np.full((capacity, n_pieces), 2**30, np.int32), np.full((capacity, n_pieces), 2**40, np.int64)
    counts, prompts, arena = [], [], bytearray(b"\xff" * 3)
    for row, length in enumerate(prompt_len):
        ids = draw(0, VOCAB, length)
        cuts = sorted(draw(0, length + 1, draw(0, n_pieces)[0]))  # pieces may be empty
        used = 0
        for k, (begin, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            at[row, k] = begin
            if draw(0, 2)[0]:
                own[row, used : used + end - begin] = ids[begin:end]
                source[row, k], used = ~used, used + end - begin
            else:
                arena += b"\xff" * draw(0, 4)[0]
                source[row, k] = len(arena)
                arena += struct.pack(f"<{end - begin}i", *ids[begin:end])
        counts.append(1 + len(cuts))
        prompts.append(ids)
    arena += b"\xff" * (-len(arena) % 4)  # and not a byte more: a word beyond the last id's must not be read
    tensors = (own, np.array(counts, np.int32), at, source, np.frombuffer(bytes(arena) or b"\xff" * 4, np.int32).copy())
    return Pieces(*(torch.from_numpy(array).to(DEVICE) for array in tensors)), prompts


def make_step(seed: int, segments, capacity: int, form: Filter = EXACT) -> tuple[Plan, Pieces, Rows]:
    """Make a plan of `segments` (start, tokens, flags) for distinct rows; places beyond them hold garbage."""
    g = torch.Generator().manual_seed(seed)

    def column(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g).to(dtype).to(DEVICE)

    n_segs = len(segments)
    rows_of = torch.randperm(capacity, generator=g)[:n_segs].tolist()
    garbage = capacity - n_segs
    plan = Plan(
        ints([n_segs]),
        ints([*rows_of, *[2**30] * garbage]),
        ints([*(s for s, _, _ in segments), *[-7] * garbage]),
        ints([*(n for _, n, _ in segments), *[999] * garbage]),
        ints([*(f for _, _, f in segments), *[255] * garbage], torch.uint8),
    )
    depth = pages_for(MAX_LEN)
    table, old_table = (column(0, 500, capacity, depth) for _ in range(2))
    table[:, depth - 1] = -1
    old_table[:, depth - 1] = -1
    prompt_len = column(0, MAX_LEN, capacity)
    pieces, _ = scattered(g, prompt_len.tolist())
    return plan, pieces, Rows(
        table,
        old_table,
        column(0, VOCAB, capacity, MAX_LEN),
        prompt_len,
        column(0, VOCAB, capacity),
        column(0, 2, capacity, dtype=torch.uint8),
        column(-(2**31), 2**31, capacity, form.words),
    )


def compare(plan: Plan, pieces: Pieces, rows: Rows, n_tokens: int, form: Filter = EXACT) -> Context:
    """Run loader and reference from the same state with poisoned outputs; return the loader's context."""
    n_places = plan.seg_row.shape[0]
    mine, theirs = (Context(*(t.fill_(77) for t in Context.allocate(n_tokens, n_places, DEVICE))) for _ in range(2))
    other = Rows(*(t.clone() for t in rows))
    load_context(plan, pieces, rows, mine, form)
    load_context_reference(plan, pieces, other, theirs, form)
    for name, found, expected in zip(Context._fields, mine, theirs, strict=True):
        assert torch.equal(found, expected), name
    for name, found, expected in zip(Rows._fields, rows, other, strict=True):
        assert torch.equal(found, expected), name
    return mine


SEGMENT = st.tuples(st.integers(0, 60), st.sampled_from([0, 1, 1, 3, 31, 33]), st.integers(0, 3))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(SEGMENT, max_size=5), st.integers(0, 2), st.integers(0, 10_000), st.sampled_from([16, 64, 200]),
    st.sampled_from([EXACT, BLOOM]),
)  # fmt: skip
def test_any_plan_equals_reference(segments, spare, seed, n_tokens, form):
    compare(*make_step(seed, segments, max(1, len(segments) + spare), form), n_tokens, form)


def test_256_rows_of_one_token():
    plan, pieces, rows = make_step(1, [(s % 90, 1, s % 4) for s in range(256)], 256)
    done = sum(int(rows.done[r]) for r, f in zip(plan.seg_row.tolist(), plan.seg_flags.tolist(), strict=True) if f < 2)
    context = compare(plan, pieces, rows, 256)
    assert int(context.n_tokens) == 256 - done
    assert int(context.seg_skipped.sum()) == done > 0


def test_more_tokens_than_places_are_cut():
    context = compare(*make_step(2, [(0, 20, BOTH), (0, 30, BOTH), (0, 9, BOTH)], 3), 32)
    assert int(context.n_tokens) == 32
    assert context.last_index.max() == 31


def test_a_done_row_computes_nothing_and_a_first_segment_revives_it():
    plan, pieces, rows = make_step(3, [(4, 2, pinned.SAMPLE), (0, 3, BOTH)], 2)
    rows.done.fill_(1)
    context = compare(plan, pieces, rows, 16)
    assert context.seg_tokens.tolist() == [0, 3]
    assert context.seg_skipped.tolist() == [1, 0]
    assert context.last_index.tolist() == [-1, 2]
    assert rows.done[plan.seg_row.long()].tolist() == [1, 0]


@pytest.mark.parametrize("form", [EXACT, BLOOM], ids=KINDS)
def test_the_filter_holds_the_prompt_and_nothing_else(form):
    plan, _, rows = make_step(4, [(0, 1, pinned.FIRST)], 1, form)
    rows.prompt_len[0] = 60
    pieces, (ids,) = scattered(torch.Generator().manual_seed(4), [60])
    compare(plan, pieces, rows, 16, form)
    words = rows.seen[0].tolist()
    bits = {i for i in range(32 * form.words) if words[i // 32] >> i % 32 & 1}
    assert bits == (set(ids) if form is EXACT else {bit for token in ids for bit in oracle.bloom_bits(token)})


def test_the_last_token_clears_the_rest_of_a_page_that_this_step_opens():
    plan, pieces, rows = make_step(5, [(0, 5, 0), (3, 2, 0), (PAGE - 1, 2, 0), (0, PAGE, 0)], 4)
    rows.done.zero_()
    context = compare(plan, pieces, rows, 64)
    tails = context.tail_of_token.tolist()
    assert [tails[t] for t in (4, 6, 8, 40)] == [PAGE - 5, 0, PAGE - 1, 0]
    assert sum(tails) == PAGE - 5 + PAGE - 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, MAX_LEN), min_size=1, max_size=4), st.integers(0, 10_000))
def test_prompts_are_gathered_from_any_byte_of_the_arena_and_from_own_ids(lengths, seed):
    plan, _, rows = make_step(seed, [(0, 1, pinned.FIRST)] * len(lengths), len(lengths))
    rows.prompt_len.copy_(ints(lengths))
    pieces, prompts = scattered(torch.Generator().manual_seed(seed), lengths, 9)
    before = rows.prompt_ids.clone()
    compare(plan, pieces, rows, 16)
    for row, ids in enumerate(prompts):
        assert rows.prompt_ids[row].tolist() == ids + before[row, len(ids) :].tolist()


def test_flags_are_those_of_the_columns():
    assert (context_loader.SAMPLE, context_loader.FIRST) == (pinned.SAMPLE, pinned.FIRST)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(-2, VOCAB + 1), min_size=1, max_size=9), st.integers(0, 1000), st.sampled_from([EXACT, BLOOM])
)
def test_filter_update_equals_reference(tokens, seed, form):
    g = torch.Generator().manual_seed(seed)
    seen = torch.randint(-(2**31), 2**31, (len(tokens), form.words), generator=g)
    seen = (seen & torch.randint(-(2**31), 2**31, seen.shape, generator=g)).to(torch.int32).to(DEVICE)
    rows = ints(torch.randperm(len(tokens), generator=g).tolist())
    expected = seen.clone()
    filter_update(ints(tokens), rows, seen, form)
    filter_update_reference(ints(tokens), rows, expected, form)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("live", [0, 1, 7])
@pytest.mark.parametrize("hidden", [24, 1056])
def test_embed_rows_equals_reference(live, hidden):
    g = torch.Generator().manual_seed(live)
    table = normal(g, 11, hidden, dtype=torch.bfloat16)
    tokens = ints([3, 10, 0, 3, 7, 1, 2])
    found, expected = (torch.full((7, hidden), 7.0, device=DEVICE) for _ in range(2))
    embed_rows(tokens, table, found, ints([live]))
    embed_rows_reference(tokens, table, expected, ints([live]))
    assert torch.equal(found, expected)
    assert (found[live:] == 7).all()


def test_launchers_refuse_wrong_arguments():
    plan, pieces, rows = make_step(6, [(0, 1, 0)], 2)
    context = Context.allocate(16, 2, DEVICE)

    def refused(argument: str, plan=plan, pieces=pieces, rows=rows, context=context) -> None:
        with pytest.raises(ShapeError) as error:
            load_context(plan, pieces, rows, context, EXACT)
        assert error.value.argument == argument

    refused("seg_len", plan=plan._replace(seg_len=ints([1])))
    refused("seg_flags", plan=plan._replace(seg_flags=ints([1, 1])))
    short = rows.page_table[:, :1].contiguous()
    refused("page_table", rows=rows._replace(page_table=short, table=short))
    refused("own_ids", pieces=pieces._replace(own_ids=pieces.own_ids[:, 1:].contiguous()))
    refused("piece_source", pieces=pieces._replace(piece_source=pieces.piece_source.int()))
    refused("arena", pieces=pieces._replace(arena=pieces.arena.view(torch.uint8)))
    refused("prompt_ids", rows=rows._replace(prompt_ids=rows.prompt_ids.t()))
    refused("table", rows=rows._replace(table=rows.table[:, 1:].contiguous()))
    refused("seen", rows=rows._replace(seen=rows.seen[:, 1:].contiguous()))
    refused("done", rows=rows._replace(done=rows.done.int()))
    refused("positions", context=context._replace(positions=context.positions[:3]))
    refused("out.last_index", context=context._replace(last_index=context.last_index.long()))
    with pytest.raises(ShapeError):
        filter_update(ints([1]), ints([0, 1]), rows.seen, EXACT)
    with pytest.raises(ShapeError):
        embed_rows(ints([1]), torch.zeros(4, 8, device=DEVICE), torch.zeros(1, 8, device=DEVICE), ints([1]))
