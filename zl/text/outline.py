"""Lay out a conversation whose contents are token ids by their lengths alone: where each goes, not what it says.

The template's own text is tokenized beforehand; contents stand between its tokens, not stripped and not merged. Budgets
cut a content at its end and put the mark there, as `text.prompt` does with text.
State: layouts made ready. Refuses: asyncio, torch, zl.net.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from zl.errors import Code, RequestError
from zl.ids import Ids
from zl.lease import Lease
from zl.policy import ALLOW, CLAMP, REJECT, Policy
from zl.shapes import MAX_PIECES, TOKEN_BYTES, Shapes
from zl.text.layout import Layout, Part
from zl.text.template import SYSTEM, Hole

LITERAL = -1
CONTEXT = -2

_SKELETONS = 256
"""Most layouts whose outline is kept ready: all forms of conversation, and the blank ones of late."""


class Span(NamedTuple):
    """Some tokens in a row: `n` from `start` on of the content in a slot, of the CONTEXT, or of Outline.literals."""

    slot: int
    start: int
    n: int


class Outline(NamedTuple):
    """Where the tokens of a prompt come from.

    literals    int32 [n], token ids of the template and of marks; the same array for all prompts of a layout, read-only
    spans       in order
    n_tokens    of the whole
    prefix_len  this many leading tokens depend only on the template and the system prompt
    truncated   some content was cut
    """

    literals: np.ndarray
    spans: list[Span]
    n_tokens: int
    prefix_len: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A layout as spans of its literals, and slots where contents go; the first `n_prefix` parts are the prefix.

    Behind the layout's own literals stand what marks a cut, and what joins context and message.
    """

    layout: Layout
    literals: np.ndarray
    parts: tuple[Span | int, ...]
    n_prefix: int
    mark: Span
    joint: Span


class Outliner:
    """Outline prompts for one model.

    layout_of  gives the layout of a conversation, by the contents' texts by slot: "" where one is empty
    mark       ids that stand for what was cut
    joint      ids between the context and the message
    """

    def __init__(
        self,
        layout_of: Callable[[Sequence[str]], Layout],
        shapes: Shapes,
        policy: Policy,
        mark: Sequence[int],
        joint: Sequence[int],
    ):
        self._layout_of = layout_of
        self._shapes = shapes
        self._policy = policy
        self._mark = tuple(mark)
        self._joint = tuple(joint)
        self._skeletons: dict[int, _Skeleton] = {}  # by the identity of the layout, which they keep alive

    def outline(self, system: int, messages: Sequence[int], context: int, limit: int) -> Outline:
        """Lay a conversation out, given the lengths of its contents in tokens; at most `limit` tokens in all.

        Raises  RequestError: LIMIT_EXCEEDED, as `text.prompt.PromptBuilder.build`
        """
        sizes = {slot: (n, n) for slot, n in enumerate(messages, 1)}  # of each content, and how much of it is kept
        sizes[SYSTEM] = system, self._fit(system, "system_tokens", "system_prompt")
        sizes[CONTEXT] = context, self._fit(context, "context_tokens", "context")
        texts = ["m" if n else "" for n in (system, *messages)]
        if context:
            texts[-1] = "m"
        skeleton = self._skeleton(self._layout_of(texts))
        spans, prefix_len, n_tokens = _filled(skeleton, sizes, len(messages))
        truncated = any(kept < n for n, kept in sizes.values())
        if n_tokens > limit:
            truncated = True
            level = self._level(messages, n_tokens, limit)
            sizes |= {slot: (n, min(n, level)) for slot, n in enumerate(messages, 1)}
            spans, prefix_len, n_tokens = _filled(skeleton, sizes, len(messages))
        return Outline(skeleton.literals, spans, n_tokens, prefix_len, truncated)

    def _skeleton(self, layout: Layout) -> _Skeleton:
        found = self._skeletons.get(id(layout))
        if found is None:
            if len(self._skeletons) >= _SKELETONS:
                self._skeletons.clear()
            found = self._skeletons[id(layout)] = _skeleton_of(layout, self._mark, self._joint)
        return found

    def _fit(self, n: int, limit: str, field: str) -> int:
        """Return how many tokens of a content are kept, the mark of a cut among them; RequestError: it is refused."""
        budget: int = getattr(self._shapes, limit)
        if n <= budget:
            return n
        action = self._policy.over(limit)
        if action == ALLOW:
            budget = self._shapes.max_model_len
            if n <= budget:
                return n
        if action != CLAMP:
            refuse_length(field, n, limit if action != ALLOW else "max_model_len", budget)
        return budget

    def _level(self, messages: Sequence[int], total: int, limit: int) -> int:
        """Return the one length to which the longest turns are cut so that the whole fits."""
        if self._policy.over("prompt_tokens") == REJECT:
            refuse_whole(total, limit, self._shapes)
        rest = total - sum(messages)
        level = water_level(messages, limit - rest)
        if level <= len(self._mark):
            refuse_crowded(rest + len(messages) * (len(self._mark) + 1), limit, self._shapes)
        return level


def _skeleton_of(layout: Layout, mark: Sequence[int], joint: Sequence[int]) -> _Skeleton:
    literals: list[int] = []
    parts: list[Span | int] = []
    n_prefix = None
    for index, part in enumerate(layout.parts):
        if index == layout.n_prefix:
            n_prefix = len(parts)
        for piece in _pieces(part):
            if isinstance(piece, int):
                parts.append(piece)
            elif piece:
                before = parts[-1] if parts and len(parts) != n_prefix else None
                if isinstance(before, Span):
                    parts[-1] = before._replace(n=before.n + len(piece))
                else:
                    parts.append(Span(LITERAL, len(literals), len(piece)))
                literals += piece
    at = len(literals)
    ids = np.array([*literals, *mark, *joint], np.int32)
    ids.flags.writeable = False
    marks = Span(LITERAL, at, len(mark)), Span(LITERAL, at + len(mark), len(joint))
    return _Skeleton(layout, ids, tuple(parts), len(parts) if n_prefix is None else n_prefix, *marks)


def _pieces(part: Part) -> list[int | tuple[int, ...]]:
    """List a part's literals, and the slots of its holes."""
    if isinstance(part, tuple):
        return [part]
    return [
        piece.slot if isinstance(piece, Hole) else ids
        for piece, ids in zip(part.pieces, part.literal_ids, strict=True)
    ]


def _filled(skeleton: _Skeleton, sizes: Mapping[int, tuple[int, int]], last: int) -> tuple[list[Span], int, int]:
    """Put contents into the holes, the context before the message in the `last`; return spans, prefix_len, n_tokens."""
    spans: list[Span] = []
    n_tokens = 0
    prefix_len = -1
    for index, part in enumerate(skeleton.parts):
        if index == skeleton.n_prefix:
            prefix_len = n_tokens
        if isinstance(part, Span):
            spans.append(part)
            n_tokens += part.n
            continue
        slots = (CONTEXT, part) if part == last and sizes[CONTEXT][0] else (part,)
        for slot in slots:
            n, kept = sizes[slot]
            n_tokens += kept
            if kept < n:
                spans += (Span(slot, 0, kept - skeleton.mark.n), skeleton.mark)
            elif n:
                spans.append(Span(slot, 0, n))
            if slot == CONTEXT:
                spans.append(skeleton.joint)
                n_tokens += skeleton.joint.n
    return spans, n_tokens if prefix_len < 0 else prefix_len, n_tokens


def water_level(lengths: Sequence[int], room: int) -> int:
    """Return the length to which the longest must be cut so that the sum is at most `room`."""
    for index, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - index)
        if length > share:
            return share
        room -= length
    return max(lengths)


def refuse_length(field: str, found: int | str, limit: str, budget: int) -> NoReturn:
    """Refuse a text; `limit` is the setting that allows it `budget` tokens."""
    refuse(field, f"{found} tokens, {budget} allowed by {limit}; shorten it", Code.LIMIT_EXCEEDED)


def refuse_whole(found: int | str, limit: int, shapes: Shapes) -> NoReturn:
    """Refuse a prompt that is longer than the model's length allows it to be."""
    refuse("messages", f"the prompt has {found} tokens, {_allowed(limit, shapes)}; shorten it", Code.LIMIT_EXCEEDED)


def refuse_crowded(need: int, limit: int, shapes: Shapes) -> NoReturn:
    """Refuse a conversation whose messages have no place."""
    text = "template, system prompt and context leave no place for the messages: "
    refuse("messages", f"{text}about {need} tokens needed, {_allowed(limit, shapes)}", Code.LIMIT_EXCEEDED)


def _allowed(limit: int, shapes: Shapes) -> str:
    kept = shapes.max_model_len - limit
    return f"{limit} allowed by max_model_len" + (f", which keeps {kept} for the answer" if kept > 0 else "")


def refuse(field: str, text: str, code: Code = Code.BAD_REQUEST) -> NoReturn:
    """Raise the RequestError that names the field."""
    raise RequestError(code, f"{field}: {text}", field=field)


def placed(
    outline: Outline, contents: Mapping[int, bytes | memoryview], lease: Lease | None, arena: np.ndarray | None
) -> Ids:
    """Give the ids of a prompt where they lie: in the leased berth, or in a copy where there is none, or no room.

    contents  packed little-endian int32 ids by slot, CONTEXT among them; views of the berth where there is a lease
    arena     as `Ids`
    """
    # A layout's literals become the row's own as a whole, with those of marks that this prompt has not: of a very short
    # prompt they can be more than its row has room for.
    fits = len(outline.spans) <= MAX_PIECES and len(outline.literals) <= outline.n_tokens
    if lease is not None and fits:
        pieces = [
            (~start if slot == LITERAL else lease.offset(memoryview(contents[slot])) + TOKEN_BYTES * start, n)
            for slot, start, n in outline.spans
        ]
        return Ids(outline.literals, pieces, lease, arena)
    ids = {slot: np.frombuffer(packed, "<i4") for slot, packed in contents.items()}
    ids[LITERAL] = outline.literals
    copied = [ids[slot][start : start + n] for slot, start, n in outline.spans]
    made = Ids.of(np.concatenate(copied) if copied else ())
    if lease is not None:
        lease.end()
    return made
