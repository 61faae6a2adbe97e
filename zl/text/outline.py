"""Lay out a conversation whose contents are token ids by their lengths alone: where each goes, not what it says.

The template's own text is tokenized beforehand; contents stand between its tokens, not stripped and not merged. Budgets
cut a content at its end and put the mark there, as `text.prompt` does with text.
State: none of a request's. Refuses: asyncio, torch, zl.net.
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
from zl.text.layout import Layout
from zl.text.template import SYSTEM, Hole

LITERAL = -1
CONTEXT = -2


class Span(NamedTuple):
    """Some tokens in a row: `n` from `start` on of the content in a slot, of the CONTEXT, or of Outline.literals."""

    slot: int
    start: int
    n: int


class Outline(NamedTuple):
    """Where the tokens of a prompt come from.

    literals    token ids of the template, and marks of what was cut
    spans       in order; no two LITERAL ones beside each other
    n_tokens    of the whole
    prefix_len  this many leading tokens depend only on the template and the system prompt
    truncated   some content was cut
    """

    literals: list[int]
    spans: list[Span]
    n_tokens: int
    prefix_len: int
    truncated: bool


Content = list[Span | tuple[int, ...]]
"""What fills a hole: spans of the request, and literal ids. A Span is a tuple too: ask for it first."""


@dataclass(slots=True)
class _Filling:
    """Joins what follows one another."""

    literals: list[int]
    spans: list[Span]
    n_tokens: int = 0

    def put(self, piece: Span | tuple[int, ...]) -> None:
        if isinstance(piece, Span):
            if piece.n:
                self.spans.append(piece)
                self.n_tokens += piece.n
        elif piece:
            before = self.spans[-1] if self.spans else None
            if before is not None and before.slot == LITERAL:
                self.spans[-1] = Span(LITERAL, before.start, before.n + len(piece))
            else:
                self.spans.append(Span(LITERAL, len(self.literals), len(piece)))
            self.literals += piece
            self.n_tokens += len(piece)


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

    def outline(self, system: int, messages: Sequence[int], context: int, limit: int) -> Outline:
        """Lay a conversation out, given the lengths of its contents in tokens; at most `limit` tokens in all.

        Raises  RequestError: LIMIT_EXCEEDED, as `text.prompt.PromptBuilder.build`
        """
        system_part, system_cut = self._fit(Span(SYSTEM, 0, system), "system_tokens", "system_prompt")
        context_part, context_cut = self._fit(Span(CONTEXT, 0, context), "context_tokens", "context")
        head = [*context_part, self._joint] if context else []
        texts = ["m" if n else "" for n in (system, *messages)]
        if context:
            texts[-1] = "m"
        layout = self._layout_of(texts)
        truncated = system_cut or context_cut
        turns: list[Content] = [[Span(turn, 0, n)] for turn, n in enumerate(messages, 1)]
        found, prefix_len = self._fill(layout, system_part, turns, head)
        if found.n_tokens > limit:
            truncated = True
            turns = self._shrunk(messages, found.n_tokens, limit)
            found, prefix_len = self._fill(layout, system_part, turns, head)
        return Outline(found.literals, found.spans, found.n_tokens, prefix_len, truncated)

    def _fill(
        self, layout: Layout, system: Content, turns: Sequence[Content], head: Content
    ) -> tuple[_Filling, int]:
        contents = [system, *turns[:-1], head + turns[-1]]
        made = _Filling([], [])
        prefix_len = -1
        for index, part in enumerate(layout.parts):
            if index == layout.n_prefix:
                prefix_len = made.n_tokens
            if isinstance(part, tuple):
                made.put(part)
                continue
            for piece, literal in zip(part.pieces, part.literal_ids, strict=True):
                for one in contents[piece.slot] if isinstance(piece, Hole) else [literal]:
                    made.put(one)
        return made, made.n_tokens if prefix_len < 0 else prefix_len

    def _fit(self, span: Span, limit: str, field: str) -> tuple[Content, bool]:
        """Return a content within its budget unless more is allowed, and whether it was cut."""
        budget: int = getattr(self._shapes, limit)
        if span.n <= budget:
            return [span], False
        action = self._policy.over(limit)
        if action == ALLOW:
            budget = self._shapes.max_model_len
            if span.n <= budget:
                return [span], False
        if action != CLAMP:
            refuse(field, f"{span.n} tokens, {budget} allowed; shorten it", Code.LIMIT_EXCEEDED)
        return self._cut(span, budget), True

    def _cut(self, span: Span, budget: int) -> Content:
        return [Span(span.slot, span.start, budget - len(self._mark)), self._mark]

    def _shrunk(self, messages: Sequence[int], total: int, limit: int) -> list[Content]:
        """Cut the longest turns, down to one common length, until the whole fits."""
        if self._policy.over("prompt_tokens") == REJECT:
            refuse("messages", f"the prompt has {total} tokens, {limit} allowed; shorten it", Code.LIMIT_EXCEEDED)
        rest = total - sum(messages)
        level = water_level(messages, limit - rest)
        if level <= len(self._mark):
            refuse_crowded(rest + len(messages) * (len(self._mark) + 1), limit)
        spans = [Span(turn, 0, n) for turn, n in enumerate(messages, 1)]
        return [self._cut(span, level) if span.n > level else [span] for span in spans]


def water_level(lengths: Sequence[int], room: int) -> int:
    """Return the length to which the longest must be cut so that the sum is at most `room`."""
    for index, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - index)
        if length > share:
            return share
        room -= length
    return max(lengths)


def refuse_crowded(need: int, limit: int) -> NoReturn:
    """Refuse a conversation whose messages have no place."""
    text = "template, system prompt and context leave no place for the messages: "
    refuse("messages", f"{text}about {need} tokens needed, {limit} allowed", Code.LIMIT_EXCEEDED)


def refuse(field: str, text: str, code: Code = Code.BAD_REQUEST) -> NoReturn:
    """Raise the RequestError that names the field."""
    raise RequestError(code, f"{field}: {text}", field=field)


def placed(
    outline: Outline, contents: Mapping[int, bytes | memoryview], lease: Lease | None, arena: np.ndarray | None
) -> Ids:
    """Give the ids of a prompt where they lie: in the leased berth, or, without one, in a copy.

    contents  packed little-endian int32 ids by slot, CONTEXT among them; views of the berth where there is a lease
    arena     as `Ids`
    """
    if lease is not None and len(outline.spans) <= MAX_PIECES:
        pieces = [
            (~start if slot == LITERAL else lease.offset(memoryview(contents[slot])) + TOKEN_BYTES * start, n)
            for slot, start, n in outline.spans
        ]
        return Ids(np.array(outline.literals, np.int32), pieces, lease, arena)
    ids = {slot: np.frombuffer(packed, "<i4") for slot, packed in contents.items()}
    ids[LITERAL] = np.array(outline.literals, np.int32)
    copied = [ids[slot][start : start + n] for slot, start, n in outline.spans]
    made = Ids.of(np.concatenate(copied))
    if lease is not None:
        lease.end()
    return made
