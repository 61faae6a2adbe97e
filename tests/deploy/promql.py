"""What a PromQL expression asks for: its metric names and the labels it matches or groups by.

Not a parser: it splits an expression into tokens and knows what may stand beside a name. Syntax is promtool's to judge.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`)'
    r"|(?P<range>\[[^\]]*\])"
    r"|(?P<number>\d[\w.]*(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[a-zA-Z_:][\w:]*)"
    r"|(?P<mark>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>@])"
    r"|(?P<space>\s+)"
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "start", "end", "inf", "nan"}


class Asked(NamedTuple):
    """selectors: (metric, names of matched labels) in order; grouped: all labels of by, on and their like."""

    selectors: list[tuple[str, frozenset[str]]]
    grouped: frozenset[str]


def tokens(expression: str) -> list[tuple[str, str]]:
    found, place = [], 0
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise ValueError(f"no token of PromQL at {expression[place:]!r}")
        place = match.end()
        if match.lastgroup != "space":
            assert match.lastgroup is not None
            found.append((match.lastgroup, match.group()))
    return found


def asked(expression: str) -> Asked:
    """Read an expression. ValueError: something that is no token, or a bracket that does not close."""
    found = tokens(expression)
    selectors: list[tuple[str, frozenset[str]]] = []
    grouped: set[str] = set()
    i = 0
    while i < len(found):
        kind, text = found[i]
        after = found[i + 1][1] if i + 1 < len(found) else ""
        i += 1
        if kind != "name" or text.lower() in _WORDS:
            continue
        if text.lower() in _GROUPING:
            if after == "(":
                names, i = _inside(found, i, ")")
                grouped.update(names)
        elif after == "{":
            names, i = _inside(found, i, "}")
            selectors.append((text, frozenset(names)))
        elif after != "(" and not (found[i][1].lower() in _GROUPING if i < len(found) else False):
            selectors.append((text, frozenset()))
    return Asked(selectors, frozenset(grouped))


def _inside(found: list[tuple[str, str]], opening: int, closing: str) -> tuple[list[str], int]:
    """Give the names between a bracket and the one that closes it, and the place behind."""
    names = []
    for place in range(opening + 1, len(found)):
        kind, text = found[place]
        if text == closing:
            return names, place + 1
        if kind == "name":
            names.append(text)
    raise ValueError(f"{closing} is missing")
