"""Cut a chat template into constant text and holes for the contents, and prove the cut against the template itself.

The template is a program in a sandbox: it is run at start only, with sentinel contents whose places in the result
become holes. What it does to contents beyond inserting them (and stripping white space) is searched for by running it
on contents that look for trouble; what cannot be cut is refused then, never answered with a wrong prompt.

State: the compiled template. Refuses: asyncio, torch, zl.net, tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zl.errors import ModelError

SYSTEM = 0
"""The slot of the system prompt; turn i has slot i + 1."""

_LEFT, _RIGHT = "\u2003\n", "\n\u2003"  # white space that no template writes, to see whether it is stripped
_CORE = '"Zq{0:02d}<&é\'\\  {{x}}\n\t%s{0:02d}Qz"'  # upset by escaping, quoting, case, splitting, formatting
_SLOT = "{0:02d}"
_CORE_PATTERN = re.escape(_CORE).replace(re.escape(_SLOT), r"(\d\d)", 1).replace(re.escape(_SLOT), r"\2")
_SENTINEL = re.compile(f"({_LEFT})?{_CORE_PATTERN}({_RIGHT})?")
_TRACE = re.compile(r"zq\d\d|\d\dqz", re.IGNORECASE)
_PROBES = (
    *("x", " x", "x ", "\nx\n", "\t x \n\n", "a\n\n b", "12", "x" * 5000),
    *("ABC abc 12 äÖß", "&<>\"'\\n {{ 7*7 }}{% if %}%s{}"),
)
_REMEDY = "use a template that inserts each content as it is, or stripped of white space"
_BLANKS = ("", " ", "\n\n")


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a content goes; `left` and `right`: the template strips white space on that side."""

    slot: int
    left: bool
    right: bool

    def fill(self, content: str) -> str:
        """Return the content as the template writes it."""
        if self.left:
            content = content.lstrip()
        return content.rstrip() if self.right else content


Piece = str | Hole


class TemplateRefusalError(Exception):
    """The template raised for this form of conversation; the text is the template's own."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; it changes nothing in the result."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class ChatTemplate:
    """One compiled chat template, rendered as transformers renders it (`utils/chat_template_utils.py`, 5.24).

    `strftime_now` stays undefined on purpose: today's date would make a prompt depend on more than the request.
    Templates that ask whether it is defined fall back to their fixed date.
    """

    def __init__(self, source: str, special: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not compile ({error}); correct it in the model") from error
        self._special = dict(special)
        self._constants = sorted(
            {c.value for c in tree.find_all(jinja2.nodes.Const) if isinstance(c.value, str) and 0 < len(c.value) <= 200}
        )
        self.needles: tuple[frozenset[str], frozenset[str], frozenset[str]] = (frozenset(), frozenset(), frozenset())
        self.blank_matters = False

    def render(self, contents: Sequence[str | None]) -> str:
        """Render with a generation prompt; contents[0] is the system prompt or None, then the turns, a user's first."""
        messages = [] if contents[SYSTEM] is None else [{"role": "system", "content": contents[SYSTEM]}]
        for turn, content in enumerate(contents[1:]):
            messages.append({"role": "assistant" if turn % 2 else "user", "content": content})
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except Exception as error:  # a template is foreign code and may raise anything
            if "strftime_now" in str(error):
                raise ModelError(
                    "the chat template writes today's date, so the same request would be answered otherwise tomorrow; "
                    "replace strftime_now by a fixed date in the model's files"
                ) from error
            raise TemplateRefusalError(str(error)) from error

    def cut(self, n_turns: int, has_system: bool, blanks: Mapping[int, str] | None = None) -> tuple[Piece, ...]:
        """Cut the rendering of `n_turns` turns at its contents; those in `blanks` (by slot) are written, not cut out.

        Raises   TemplateRefusalError: the template refuses this form, or has no place for the system prompt
                 ModelError: contents do not come out as they went in
        """
        blanks = blanks or {}
        contents: list[str | None] = [_LEFT + _CORE.replace("{0:02d}", f"{s:02d}") + _RIGHT for s in range(n_turns + 1)]
        for slot, text in blanks.items():
            contents[slot] = text
        if not has_system:
            contents[SYSTEM] = None
        pieces: list[Piece] = []
        text, end = self.render(contents), 0
        for match in _SENTINEL.finditer(text):
            pieces += [text[end : match.start()], Hole(int(match[2]), match[1] is None, match[3] is None)]
            end = match.end()
        pieces.append(text[end:])
        found = {piece.slot for piece in pieces if isinstance(piece, Hole)}
        traces = any(_TRACE.search(piece) for piece in pieces if isinstance(piece, str))
        missing = [s for s, c in enumerate(contents) if c is not None and s not in found and s not in blanks]
        if missing == [SYSTEM] and not traces:
            raise TemplateRefusalError("it has no place for a system prompt")
        if missing or traces:
            what = "changes the contents of messages" if traces else f"leaves out message {missing[-1]} of {n_turns}"
            raise ModelError(f"the chat template {what}, so its prompts cannot be prepared at start; " + _REMEDY)
        return tuple(piece for piece in pieces if piece != "")

    def check(self, layouts: Mapping[tuple[int, bool], tuple[Piece, ...]]) -> None:
        """Compare every cut with the template on contents that look for trouble; learn `needles` and `blank_matters`.

        needles        by role (system, user, assistant): strings that this template treats specially inside a content
                       (found among its own constants); a request that has one must be refused
        blank_matters  blank contents change the text around them, so they need a cut of their own (`blanks`)
        Raises         ModelError: contents without such a string come out otherwise than the cut says
        """
        needles: tuple[set[str], set[str], set[str]] = (set(), set(), set())
        for (n_turns, has_system), pieces in layouts.items():
            holes = [piece for piece in pieces if isinstance(piece, Hole)]
            if any(hole.left or hole.right for hole in holes):
                self.blank_matters = True  # a strip of a blank may reach further, into the template's own text
            if n_turns > 3:
                continue
            for probe in _BLANKS:
                if next(self._deviating(pieces, n_turns, has_system, probe), None) is not None:
                    self.blank_matters = True
            for probe in _PROBES:
                if next(self._deviating(pieces, n_turns, has_system, probe), None) is not None:
                    raise ModelError(f"the chat template changes a message such as {probe[:40]!r}; {_REMEDY}")
            for constant in self._constants:
                for probe in (constant, f"x{constant}", f"{constant}y", f"x{constant}y"):
                    for slot in () if not probe.strip() else self._deviating(pieces, n_turns, has_system, probe):
                        if constant.isspace() or constant.isalnum():
                            raise ModelError(f"the chat template changes messages with {constant!r} in them; {_REMEDY}")
                        needles[role_of(slot)].add(constant)
        self.needles = (frozenset(needles[0]), frozenset(needles[1]), frozenset(needles[2]))

    def _deviating(self, pieces: tuple[Piece, ...], n_turns: int, has_system: bool, probe: str) -> Iterator[int]:
        slots = range(0 if has_system else 1, n_turns + 1)
        if self._agrees(pieces, [probe if slot in slots else None for slot in range(n_turns + 1)]):
            return
        blamed = False
        for slot in slots:
            contents: list[str | None] = [None if other not in slots else "m" for other in range(n_turns + 1)]
            contents[slot] = probe
            if not self._agrees(pieces, contents):
                blamed = True
                yield slot
        if not blamed:  # only together do they deviate: blame all
            yield from slots

    def _agrees(self, pieces: tuple[Piece, ...], contents: list[str | None]) -> bool:
        try:
            return self.render(contents) == fill(pieces, contents)
        except TemplateRefusalError:
            return False


def role_of(slot: int) -> int:
    """Return 0 for the system prompt's slot, 1 for a user's, 2 for an assistant's."""
    return 0 if slot == SYSTEM else 2 - slot % 2


def fill(pieces: Sequence[Piece], contents: Sequence[str | None]) -> str:
    """Write the contents (by slot) into the holes."""
    return "".join(piece if isinstance(piece, str) else piece.fill(contents[piece.slot] or "") for piece in pieces)
