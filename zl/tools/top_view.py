"""How `zl top` looks: figures in, lines of styled text out; styled text in, what a terminal is sent out.

Owns no state and writes nothing itself. Refuses torch, numpy and asyncio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zl.tools.top_figures import HIT_GOAL, Figures, Pair

Span = tuple[str, str]
"""(text, style); the style is a key of STYLES, or empty."""
Line = list[Span]

STYLES: Mapping[str, str] = {"bold": "1", "dim": "2", "good": "32", "warn": "33", "bad": "31", "busy": "36"}
MAP_COLUMNS = 64
_COLUMN = 38
_BAR = 30
_ABOUT = 66  # columns of a bar's line beside the bar
_NAME = 13


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters that a terminal can show, each one column wide; `spark` from low to high."""

    busy: str
    idle: str
    full: str
    empty: str
    spark: str
    none: str
    micro: str


UNICODE = Glyphs("■", "·", "█", "░", "▁▂▃▄▅▆▇█", "–", "µs")
ASCII = Glyphs("#", ".", "#", "-", "_.-=+*%#", "-", "us")


class _Writer:
    """Numbers as text, in the characters that the terminal has."""

    def __init__(self, glyphs: Glyphs):
        self._glyphs = glyphs

    def seconds(self, value: float | None) -> str:
        if value is None:
            return self._glyphs.none
        for scale, unit in ((1e-6, self._glyphs.micro), (1e-3, "ms")):
            if value < scale * 999.5:
                return f"{_three(value / scale)} {unit}"
        if value < 119.5:
            return f"{_three(value)} s"
        minutes, rest = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        if days:
            return f"{days} d {hours} h"
        return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {rest:02d} s"

    def count(self, value: float | None) -> str:
        if value is None:
            return self._glyphs.none
        return f"{value:,.0f}" if value >= 99.95 or value == int(value) else f"{value:.1f}"

    def share(self, value: float | None) -> str:
        return self._glyphs.none if value is None else f"{value * 100:.1f}%"

    def pair(self, pair: Pair) -> str:
        return f"p50 {self.seconds(pair[0]):>8}  p99 {self.seconds(pair[1]):>8}"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def view(figures: Figures, width: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """Lay the figures out for a terminal `width` columns wide; no line is longer."""
    write = _Writer(glyphs)
    lines = [
        _title(figures, write),
        [],
        *_rows(figures, width, glyphs, write),
        [],
        *_columns(_left(figures, glyphs, write), _right(figures, write), width),
        [],
        *_shares(figures, width, glyphs, write),
        [],
        *_parts(figures, width, write),
        _errors(figures, write),
    ]
    if figures.trouble:
        lines.append([(figures.trouble, "bad")])
    return [clip(line, width) for line in lines]


def one_line(figures: Figures, glyphs: Glyphs = UNICODE) -> str:
    """Put the figures into one line for logs and pipes: the same words in the same order each time."""
    write = _Writer(glyphs)
    first, gap = figures.first, figures.gap
    taken = _taken(figures)
    said = (
        f"rows {write.count(figures.rows)}/{write.count(figures.max_rows)} queue {write.count(figures.queue)} "
        f"tokens/s {write.count(figures.tokens_per_s)} glue {write.share(figures.glue)} "
        f"first p50 {write.seconds(first[0])} p99 {write.seconds(first[1])} "
        f"gap p50 {write.seconds(gap[0])} p99 {write.seconds(gap[1])} "
        f"pages {write.count(taken)}/{write.count(figures.pages)} hits {write.share(figures.hits)} "
        f"errors {write.count(sum(figures.errors.values()))}"
    )
    return f"{said} {figures.state}" + (f": {figures.trouble}" if figures.trouble else "")


def _title(figures: Figures, write: _Writer) -> Line:
    style = {"ready": "good", "no answer": "bad", "stuck": "bad"}.get(figures.state, "warn")
    up = [] if figures.up_s is None else [f"up {write.seconds(figures.up_s)}"]
    facts = [figures.address, *up, *map(_plain, figures.facts)]
    return [("zl top", "bold"), ("  ", ""), (figures.state, style), ("  " + ", ".join(facts), "")]


def _rows(figures: Figures, width: int, glyphs: Glyphs, write: _Writer) -> list[Line]:
    """Draw one cell a row of the batch. The page counts rows without naming them, so busy ones are drawn first."""
    head: Line = [(f"{'rows':<{_NAME}}", "dim"), (write.count(figures.rows), "bold"),
                  (f" of {write.count(figures.max_rows)} busy", "")]  # fmt: skip
    if figures.rows is None or figures.max_rows is None:
        return [head]
    cells = int(figures.max_rows)
    busy = min(cells, round(figures.rows))
    columns = MAP_COLUMNS
    while columns > width - 2 and columns > 8:
        columns //= 2
    lines = [head]
    for begin in range(0, cells, columns):
        here = max(0, min(columns, busy - begin))
        rest = min(columns, cells - begin) - here
        lines.append([("  ", ""), (glyphs.busy * here, "busy"), (glyphs.idle * rest, "dim")])
    return lines


def _left(figures: Figures, glyphs: Glyphs, write: _Writer) -> list[Line]:
    queue_style = "warn" if figures.queue else ""
    speed, drawn = write.count(figures.tokens_per_s), spark(figures.history, glyphs)
    return [
        _named("tokens/s", [(speed, "bold"), (" " + drawn, "busy")]),
        _named("prompt t/s", [(write.count(figures.prompt_tokens_per_s), "")]),
        _named("requests/s", [(write.count(figures.requests_per_s), "")]),
        _named("queue", [(write.count(figures.queue), queue_style)]),
        _named("connections", [(write.count(figures.connections), "")]),
    ]


def _right(figures: Figures, write: _Writer) -> list[Line]:
    return [
        _named(name, [(write.pair(pair), "")])
        for name, pair in (("first token", figures.first), ("gap", figures.gap), ("in the queue", figures.queued),
                           ("whole answer", figures.whole))
    ]  # fmt: skip


def _columns(left: list[Line], right: list[Line], width: int) -> list[Line]:
    if width < 2 * _COLUMN:
        return left + right
    lines = []
    for i in range(max(len(left), len(right))):
        first = left[i] if i < len(left) else []
        gap = _COLUMN - sum(len(text) for text, _ in first)
        lines.append([*first, (" " * gap, ""), *(right[i] if i < len(right) else [])])
    return lines


def _shares(figures: Figures, width: int, glyphs: Glyphs, write: _Writer) -> list[Line]:
    room = min(_BAR, max(0, width - _ABOUT))
    hits = figures.hits
    hit_style = "" if hits is None else "good" if hits >= HIT_GOAL else "bad"
    beat = "" if figures.beat_age_s is None else f", checked {write.seconds(figures.beat_age_s)} ago"
    about_hits = f"goal {HIT_GOAL:.0%}, fallback {write.count(figures.fallback_steps)}{beat}"
    used, constant, pages = figures.pages_used, figures.pages_constant, figures.pages
    taken = _taken(figures)
    filled = taken / pages if pages and taken is not None else None
    about_free = "of what is free, for the oldest that waits"
    about_pages = f"{write.count(used)} used, {write.count(constant)} constant, {write.count(pages)} in all"
    return [
        _bar("glue", figures.glue, "good", "of answers' time is not the model's", room, glyphs, write),
        _bar("program hits", hits, hit_style, about_hits, room, glyphs, write),
        _bar("pages", filled, "busy", about_pages, room, glyphs, write),
        _bar("fragmented", figures.fragmentation, "warn", about_free, room, glyphs, write),
    ]


def _taken(figures: Figures) -> float | None:
    used, constant = figures.pages_used, figures.pages_constant
    return None if used is None or constant is None else used + constant


def _bar(name: str, share: float | None, style: str, about: str, room: int, glyphs: Glyphs, write: _Writer) -> Line:
    full = round(min(1.0, max(0.0, share or 0.0)) * room)
    if room > 2 and share is not None and 0.0 < share < 1.0:
        full = min(room - 1, max(1, full))  # a little is not nothing, and nearly all is not all
    return _named(name, [(f"{write.share(share):>6} ", "bold"), (glyphs.full * full, style),
                         (glyphs.empty * (room - full), "dim"), (("  " if room else "") + about, "")])  # fmt: skip


def _parts(figures: Figures, width: int, write: _Writer) -> list[Line]:
    """List the mean time of each part, longest first, on as many lines as it takes."""
    ordered = sorted(figures.parts.items(), key=lambda item: -item[1])
    said = [f"{_plain(name)} {write.seconds(mean)}" for name, mean in ordered]
    lines: list[str] = [""]
    for text in said or [write.count(None)]:
        longer = f"{lines[-1]}  {text}" if lines[-1] else text
        if lines[-1] and _NAME + len(longer) > width:
            lines.append(text)
        else:
            lines[-1] = longer
    return [_named("mean times" if i == 0 else "", [(text, "")]) for i, text in enumerate(lines)]


def _errors(figures: Figures, write: _Writer) -> Line:
    spans: Line = []
    for code, total in sorted(figures.errors.items(), key=lambda item: -item[1]):
        new = figures.new_errors.get(code, 0.0)
        if total:
            spans += [("  " if spans else "", ""), (f"{_plain(code)} {write.count(total)}", "bad" if new else "")]
            spans += [(f" (+{write.count(new)})", "bad")] if new else []
    return _named("errors", spans or [("none", "good")])


def _named(name: str, spans: Line) -> Line:
    return [(f"{name:<{_NAME}}", "dim"), *spans]


def spark(values: Sequence[float], glyphs: Glyphs) -> str:
    """Draw the newest values as columns, the tallest one full."""
    top = max(values, default=0.0)
    steps = len(glyphs.spark) - 1
    return "".join(glyphs.spark[round(max(0.0, value) / top * steps)] for value in values[-16:]) if top > 0 else ""


def clip(line: Line, width: int) -> Line:
    """Cut a line to `width` columns. Every character that is drawn is one column wide."""
    out: Line = []
    for text, style in line:
        if width <= 0:
            break
        out.append((text[:width], style))
        width -= len(text)
    return out


def _plain(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)


def paint(line: Line, colour: bool) -> str:
    """Turn a line into text, with ANSI colours or without."""
    return "".join(
        f"\x1b[{STYLES[style]}m{text}\x1b[0m" if colour and style and text else text for text, style in line
    )
