"""Outlines against a builder that inserts the ids themselves, and what `placed` makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zl.errors import Code, RequestError
from zl.gpu.arena import Arena
from zl.policy import Policy
from zl.shapes import MAX_PIECES, Shapes
from zl.text.layout import Control, Run, layout_of
from zl.text.outline import CONTEXT, Outline, Outliner, Span, placed
from zl.text.template import Hole

SIZES = Shapes(max_model_len=120, system_tokens=12, context_tokens=9)
MARK, JOINT = (901, 902), (903,)


def layout(texts):
    """BOS, the system prompt if there is one, then turns; empty turns are written differently."""
    atoms: list = [Control(1, False, False)]
    for slot, text in enumerate(texts):
        if slot or text:
            atoms.append((100 + slot % 2,))
            if text:
                pieces = ("<", Hole(slot, "m", False), ">")
                atoms.append(Run(pieces, ((11, 12), (), (13,)), False, False, False, False))
            atoms.append(Control(2, False, False))
    return layout_of([*atoms, (3, 4)], 4 if texts[0] else 1)


def naive(system, messages, context, limit):
    """The same prompt by lists, one content after another; None: it cannot be."""

    def fit(ids, budget):
        return ids if len(ids) <= budget else [*ids[: budget - len(MARK)], *MARK]

    system, context = fit(system, SIZES.system_tokens), fit(context, SIZES.context_tokens)
    head = [*context, *JOINT] if context else []

    def whole(turns):
        made = [1]
        for slot, ids in enumerate([system, *turns[:-1], [*head, *turns[-1]]]):
            if slot or ids:
                made += [100 + slot % 2, *([11, 12, *ids, 13] if ids else []), 2]
        return [*made, 3, 4]

    if len(whole(messages)) <= limit:
        return whole(messages)
    for level in range(max(map(len, messages)) - 1, len(MARK), -1):
        made = whole([fit(ids, level) for ids in messages])
        if len(made) <= limit:
            return made
    return None


def ids(n, base):
    return list(range(base, base + n))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 20), st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(lambda x: len(x) % 2 and x[-1]),
    st.integers(0, 15), st.integers(10, 120), st.integers(0, 3),
)  # fmt: skip
def test_outline_equals_insertion_by_lists(system, messages, context, limit, shift):
    contents = {0: ids(system, 1_000), CONTEXT: ids(context, 2_000)}
    contents |= {turn: ids(n, 3_000 + 100 * turn) for turn, n in enumerate(messages, 1)}
    wanted = naive(contents[0], [contents[t] for t in range(1, len(messages) + 1)], contents[CONTEXT], limit)
    outliner = Outliner(layout, SIZES, Policy(SIZES), MARK, JOINT)
    if wanted is None:
        with pytest.raises(RequestError) as refusal:
            outliner.outline(system, messages, context, limit)
        assert refusal.value.code is Code.LIMIT_EXCEEDED
        return
    found = outliner.outline(system, messages, context, limit)
    packed = {slot: np.array(one, "<i4").tobytes() for slot, one in contents.items()}
    copied = placed(found, packed, None, None)
    assert copied.head(len(copied)).tolist() == wanted
    assert found.n_tokens == len(wanted) <= limit
    assert found.truncated == (system > 12 or context > 9 or MARK[0] in wanted)
    assert all(span.n for span in found.spans)
    in_berth(found, packed, shift, wanted)


def in_berth(found, packed, shift, wanted):
    """Lay the contents in a berth, at any byte: the same ids without a copy of one."""
    arena = Arena(2, 4_096)
    berth = arena.acquire()
    lease = arena.lend(berth)
    views, at = {}, shift
    for slot, one in packed.items():
        berth.view[at : at + len(one)] = one
        views[slot] = berth.view[at : at + len(one)]
        at += len(one) + 1
    there = placed(found, views, lease, np.frombuffer(arena.memory, np.uint8))
    assert there.head(len(there)).tolist() == wanted
    there.give_back()
    arena.check()
    assert arena.in_use == 0


def test_a_prompt_of_more_pieces_than_a_row_takes_is_copied_and_its_berth_given_back():
    arena = Arena(2, 4_096)
    berth = arena.acquire()
    lease = arena.lend(berth)
    berth.view[:800] = np.arange(200, dtype="<i4").tobytes()
    spans = [Span(1, i, 1) for i in range(MAX_PIECES + 1)]
    made = placed(Outline(np.empty(0, np.int32), spans, len(spans), 0, False), {1: berth.view[:800]}, lease, None)
    assert made.head(len(made)).tolist() == list(range(MAX_PIECES + 1))
    assert arena.in_use == 0


def test_a_prompt_shorter_than_its_layouts_literals_is_copied_and_its_berth_given_back():
    """Of empty turns little is left but the template, while marks and joint belong to every layout."""
    outliner = Outliner(layout, SIZES, Policy(SIZES), tuple(range(900, 980)), JOINT)
    found = outliner.outline(0, [1], 0, 120)
    assert len(found.literals) > found.n_tokens
    arena = Arena(2, 4_096)
    berth = arena.acquire()
    lease = arena.lend(berth)
    berth.view[:4] = np.array([77], "<i4").tobytes()
    views = {0: berth.view[:0], 1: berth.view[:4], CONTEXT: berth.view[:0]}
    made = placed(found, views, lease, np.frombuffer(arena.memory, np.uint8))
    assert made.head(len(made)).tolist() == naive([], [[77]], [], 120)
    assert len(made.own) == len(made)
    assert arena.in_use == 0


def test_an_empty_prompt_is_no_error():
    assert len(placed(Outline(np.empty(0, np.int32), [], 0, 0, False), {}, None, None)) == 0


def test_the_mark_of_a_refusal_names_numbers():
    outliner = Outliner(layout, SIZES, Policy(SIZES), MARK, JOINT)
    with pytest.raises(RequestError, match="about 11 tokens needed, 10 allowed"):
        outliner.outline(0, [40], 0, 10)
