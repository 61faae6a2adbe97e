"""Turn the pieces of a cut template into constant token segments and runs of text, and encode runs.

A run is the text between two control tokens: template text and contents are tokenized together, as in one whole,
because white space at a content's edge may merge with its neighbour. Control tokens are written here, from the
template's own text, and nowhere else; in a run the same strings are ordinary text.

State: tokenizers made at start. Refuses: asyncio, torch, zl.net, jinja2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from zl.errors import Code, RequestError
from zl.text.template import SYSTEM, Hole, Piece
from zl.text.tokenizer import TextModel

# What `\s` means to the tokenizers library (Unicode White_Space); str.strip() alone would take U+001C to 1F too.
_WHITE = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


@dataclass(frozen=True, slots=True)
class Control:
    """A control token of the template; `strip_left`, `strip_right`: it swallows the white space on that side."""

    token_id: int
    strip_left: bool
    strip_right: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Text between two control tokens, with at least one content in it.

    pieces        template text and holes
    literal_ids   per piece its tokens (empty for a hole), for contents that come as tokens
    first         nothing stands before this run
    left, right   the neighbouring control token swallows white space at that edge
    reusable      holds no part of the last turn, so the same text is likely to come again
    """

    pieces: tuple[Piece, ...]
    literal_ids: tuple[tuple[int, ...], ...]
    first: bool
    left: bool
    right: bool
    reusable: bool

    def text(self, contents: Sequence[str]) -> str:
        """Return the run's text with the contents (by slot) in place."""
        text = "".join([p.fill(contents[p.slot]) if isinstance(p, Hole) else p for p in self.pieces])
        if self.left:
            text = text.lstrip(_WHITE)
        return text.rstrip(_WHITE) if self.right else text


Atom = Control | Run | tuple[int, ...]
Part = tuple[int, ...] | Run


@dataclass(frozen=True, slots=True)
class Layout:
    """One form of conversation, ready to be filled.

    parts       constant token segments and runs, in order
    n_prefix    this many parts depend only on the template and the system prompt, and end at a control token
    """

    parts: tuple[Part, ...]
    n_prefix: int


class Encoder:
    """Encode text in which no string is a control token.

    literals   all template text; an added token that occurs in it is guarded like a control token even where the
               vocabulary does not mark it special (transformers' `sanitize_control_tokens` infers the same)
    """

    def __init__(self, model: TextModel, literals: Iterable[str]):
        source = model.tokenizer
        written = "\0".join(literals)
        self._controls: dict[str, Control] = {}
        for token_id, token in sorted(source.get_added_tokens_decoder().items()):
            text = token.content
            if token.special or token_id in model.control_ids or (text in written and not text.isspace()):
                self._controls[text] = Control(token_id, token.lstrip, token.rstrip)
        guarded = frozenset(self._controls)
        for token_id in model.control_ids:  # named BOS or EOS that the file does not list as added
            if (name := model.tokenizer.id_to_token(token_id)) is not None:
                self._controls.setdefault(name, Control(token_id, False, False))
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        unknown = getattr(source.model, "unk_token", None)  # text may well be unknown
        self._forbidden = frozenset(c.token_id for text, c in self._controls.items() if text != unknown)
        # A blank is put before text by some vocabularies: always, or only at the very start. `first` encodes what is
        # at the start, `inner` what follows a control token, `rest` what continues text that was encoded before.
        rules = {"normalizer": _rules(source.normalizer), "pre_tokenizer": _rules(source.pre_tokenizer)}
        inner, rest = _edited(rules, "first"), _edited(rules, "first", "always")
        self._first = _twin(source, guarded) or _loaded(source, guarded)
        self._inner = self._first if inner == rules else _loaded(source, guarded, "first")
        self._rest = self._inner if rest == inner else _loaded(source, guarded, "first", "always")

    def run(self, text: str, first: bool = False) -> list[int]:
        """Encode a whole run; `first`: nothing stands before it."""
        tokenizer = self._first if first else self._inner
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self._forbidden.isdisjoint(ids) else self._broken(text, tokenizer)

    def rest(self, text: str) -> list[int]:
        """Encode text by itself, as the continuation of other text."""
        ids = self._rest.encode(text, add_special_tokens=False).ids
        return ids if self._forbidden.isdisjoint(ids) else self._broken(text, self._rest)

    def count(self, text: str) -> int:
        """Count the tokens of a text by itself."""
        return len(self.rest(text))

    def head(self, text: str, n_tokens: int) -> int:
        """Return how many leading characters `n_tokens` tokens spell whole, in a text that has more tokens."""
        take = n_tokens * 8 + 64
        encoding = self._rest.encode(text[:take], add_special_tokens=False)
        while len(encoding) < n_tokens + 16 and take < len(text):  # the last tokens may change with what follows
            take *= 4
            encoding = self._rest.encode(text[:take], add_special_tokens=False)
        for index in range(min(n_tokens, len(encoding) - 1), -1, -1):
            if (chars := encoding.token_to_chars(index)) is not None:  # None: a token that no character stands behind
                return int(chars[0])
        return 0

    def _broken(self, text: str, tokenizer: Tokenizer) -> list[int]:
        # Some vocabularies can merge a control string from ordinary pieces; cut inside each one so that it cannot.
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            cut = match.start() + 1
            ids += tokenizer.encode(text[start:cut], add_special_tokens=False).ids
            tokenizer, start = self._rest, cut
        ids += tokenizer.encode(text[start:], add_special_tokens=False).ids
        if not self._forbidden.isdisjoint(ids):
            raise RequestError(
                Code.BAD_REQUEST, "a text spells a control token that this vocabulary cannot write as text; remove it"
            )
        return ids

    def atoms(self, pieces: Sequence[Piece], last_slot: int) -> list[Atom]:
        """Split pieces at the control tokens of the template's text; runs without contents become tokens at once."""
        items: list[Piece | Control] = []
        for piece in pieces:
            if isinstance(piece, Hole):
                items.append(piece)
                continue
            end = 0
            for match in self._pattern.finditer(piece):
                items += [piece[end : match.start()], self._controls[match[0]]]
                end = match.end()
            items.append(piece[end:])
        atoms: list[Atom] = []
        run: list[Piece] = []
        for item in (*items, None):
            if isinstance(item, str | Hole):
                run.append(item)
                continue
            left = bool(atoms) and isinstance(before := atoms[-1], Control) and before.strip_right
            right = isinstance(item, Control) and item.strip_left
            self._close_run(run, atoms, left, right, last_slot)
            run = []
            if isinstance(item, Control):
                atoms.append(item)
        return atoms

    def _close_run(self, run: list[Piece], atoms: list[Atom], left: bool, right: bool, last_slot: int) -> None:
        pieces = tuple(piece for piece in run if piece != "")
        slots = [piece.slot for piece in pieces if isinstance(piece, Hole)]
        literals: list[tuple[int, ...]] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, Hole):
                literals.append(())
                continue
            text = piece.lstrip(_WHITE) if left and index == 0 else piece
            text = text.rstrip(_WHITE) if right and index == len(pieces) - 1 else text
            literals.append(tuple(self.rest(text) if index else self.run(text, first=not atoms)))
        made = Run(pieces, tuple(literals), not atoms, left, right, last_slot not in slots)
        if slots:
            atoms.append(made)
        elif pieces:
            atoms.append(tuple(self.run(made.text(()), made.first)))


def prefix_of(atoms: Sequence[Atom]) -> list[Atom]:
    """Return the leading atoms that hold no turn, up to and with the last control token."""
    n_atoms = 0
    for index, atom in enumerate(atoms):
        if isinstance(atom, Run) and any(isinstance(p, Hole) and p.slot != SYSTEM for p in atom.pieces):
            break
        if isinstance(atom, Control):
            n_atoms = index + 1
    return list(atoms[:n_atoms])


def shared_atoms(one: Sequence[Atom], other: Sequence[Atom]) -> list[Atom]:
    """Return the longest common start that ends at a control token."""
    n_same = 0
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            break
        if isinstance(a, Control):
            n_same = index + 1
    return list(one[:n_same])


def layout_of(atoms: Sequence[Atom], n_prefix_atoms: int) -> Layout:
    """Join neighbouring constants into segments, with a border after the prefix."""
    parts: list[Part] = []
    n_prefix, joinable = 0, False
    for index, atom in enumerate(atoms):
        if index == n_prefix_atoms:
            n_prefix, joinable = len(parts), False
        if isinstance(atom, Run):
            parts.append(atom)
            joinable = False
            continue
        ids = (atom.token_id,) if isinstance(atom, Control) else atom
        before = parts[-1] if joinable else None
        if isinstance(before, tuple):
            parts[-1] = before + ids
        else:
            parts.append(ids)
        joinable = True
    return Layout(tuple(parts), n_prefix if n_prefix_atoms < len(atoms) else len(parts))


def _edited(node: Any, *schemes: str) -> Any:
    # Take the automatic leading blank out of a tokenizer's description, for the given Metaspace schemes.
    if isinstance(node, list):
        return [_edited(item, *schemes) for item in node if not ("always" in schemes and _is_prepend(item))]
    if not isinstance(node, Mapping):
        return node
    if "always" in schemes and node.get("type") == "ByteLevel":
        return {**node, "add_prefix_space": False}
    if node.get("prepend_scheme") in schemes:
        return {**node, "prepend_scheme": "never"}
    return {
        key: value
        if key in ("model", "added_tokens", "decoder")
        else None
        if "always" in schemes and _is_prepend(value)
        else _edited(value, *schemes)
        for key, value in node.items()
    }


def _is_prepend(node: Any) -> bool:
    return isinstance(node, Mapping) and node.get("type") == "Prepend"


def _rules(part: Any) -> Any:
    """Describe a normalizer or pre-tokenizer as the library's file would."""
    return None if part is None else json.loads(part.__getstate__())


def _twin(source: Tokenizer, guarded: frozenset[str]) -> Tokenizer | None:
    """Make a tokenizer that shares the source's vocabulary and merges; None where its added tokens cannot be repeated.

    Copying by way of the library's file format takes half a second for 50,000 tokens.
    """
    twin = Tokenizer(source.model)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if (part := getattr(source, name)) is not None:
            setattr(twin, name, part)
    added = source.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        special = token.special or token.content in guarded
        copy = AddedToken(
            token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
            normalized=token.normalized, special=special,
        )  # fmt: skip
        (twin.add_special_tokens if special else twin.add_tokens)([copy])
    if {index: t.content for index, t in twin.get_added_tokens_decoder().items()} != {
        index: t.content for index, t in added.items()
    }:
        return None
    twin.encode_special_tokens = True
    return twin


def _loaded(source: Tokenizer, guarded: frozenset[str], *schemes: str) -> Tokenizer:
    """Copy a tokenizer by way of its description, edited for the given Metaspace schemes."""
    base: dict[str, Any] = json.loads(source.to_str())
    base["truncation"] = base["padding"] = base["post_processor"] = None
    for token in base["added_tokens"]:
        token["special"] |= token["content"] in guarded
    tokenizer = Tokenizer.from_str(json.dumps(_edited(base, *schemes) if schemes else base))
    tokenizer.encode_special_tokens = True
    return tokenizer
