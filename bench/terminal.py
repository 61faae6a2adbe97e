"""What a terminal shows after a program has written to it: the few control sequences that `zl top` uses, and no others.

State: the cells and the cursor. Tests read the text; pictures are drawn from the cells. Standard library only.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PIECE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|([^\x1b])", re.DOTALL)


class Cell(NamedTuple):
    """A character and its SGR codes, such as "1" or "36"; "" for none."""

    text: str
    style: str


BLANK = Cell(" ", "")


class Terminal:
    """A screen of `columns` by `lines`; writing beyond an edge raises, for a full-screen program must not do it."""

    def __init__(self, columns: int, lines: int):
        self.columns, self.lines = columns, lines
        self.alternate, self.cursor_shown = False, True
        self._clear()

    def _clear(self) -> None:
        self.cells = [[BLANK] * self.columns for _ in range(self.lines)]
        self._x = self._y = 0
        self._style = ""

    def feed(self, text: str) -> None:
        """Take what the program wrote. ValueError: a sequence that is not known, a cell that is not there."""
        place = 0
        while place < len(text):
            match = _PIECE.match(text, place)
            if match is None:
                raise ValueError(f"not a known control sequence: {text[place : place + 8]!r}")
            place = match.end()
            private, numbers, letter, char = match.groups()
            if char is not None:
                self._put(char)
            else:
                self._obey(private + numbers + letter)

    def _put(self, char: str) -> None:
        if char == "\r":
            self._x = 0
        elif char == "\n":
            self._y += 1
        elif not char.isprintable() or self._x >= self.columns or self._y >= self.lines:
            raise ValueError(f"{char!r} at column {self._x}, line {self._y} of {self.columns} by {self.lines}")
        else:
            self.cells[self._y][self._x] = Cell(char, self._style)
            self._x += 1

    def _obey(self, sequence: str) -> None:
        if sequence in ("?1049h", "?1049l"):
            self.alternate = sequence.endswith("h")
            self._clear()
        elif sequence in ("?25h", "?25l"):
            self.cursor_shown = sequence.endswith("h")
        elif sequence == "2J":
            self.cells = [[BLANK] * self.columns for _ in range(self.lines)]
        elif sequence == "H":
            self._x = self._y = 0
        elif sequence == "K":
            self._erase(self._y)
        elif sequence == "J":
            self._erase(self._y)
            for line in range(self._y + 1, self.lines):
                self.cells[line] = [BLANK] * self.columns
        elif sequence.endswith("m"):
            self._style = "" if sequence in ("m", "0m") else sequence[:-1]
        else:
            raise ValueError(f"not a known control sequence: ESC [ {sequence}")

    def _erase(self, line: int) -> None:
        if line < self.lines:
            self.cells[line][self._x :] = [BLANK] * (self.columns - self._x)

    def text(self) -> list[str]:
        """Give the lines without the blanks at their ends."""
        return ["".join(cell.text for cell in line).rstrip() for line in self.cells]
