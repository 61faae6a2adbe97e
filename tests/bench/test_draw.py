"""bench/terminal.py and bench/draw.py: what a terminal shows, and pictures of it and of panels."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.draw import draw_dashboard, draw_terminal, unit
from bench.terminal import Cell, Terminal

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "zl.json"


def test_a_terminal_keeps_what_was_drawn_last():
    screen = Terminal(10, 3)
    screen.feed("\x1b[?1049h\x1b[?25l\x1b[2J\x1b[Hold line\x1b[K\r\n\x1b[1mtwo\x1b[0m!\x1b[K\r\nthree\x1b[K\x1b[J")
    assert screen.text() == ["old line", "two!", "three"]
    assert screen.cells[1][:4] == [Cell("t", "1"), Cell("w", "1"), Cell("o", "1"), Cell("!", "")]
    assert (screen.alternate, screen.cursor_shown) == (True, False)
    screen.feed("\x1b[Hnew\x1b[K\x1b[J")
    assert screen.text() == ["new", "", ""]
    screen.feed("\x1b[?25h\x1b[?1049l")
    assert (screen.alternate, screen.cursor_shown) == (False, True)


@pytest.mark.parametrize("text", ["12345678901", "a\r\nb\r\nc\r\nd", "\x1b[5X", "\x1b]0;title", "\x07"])
def test_what_does_not_fit_or_is_not_known_raises(text):
    with pytest.raises(ValueError):
        Terminal(10, 3).feed(text)


def test_numbers_are_written_in_their_unit():
    assert unit(0.0206, "percentunit") == "2.06%"
    assert (unit(0.92, "s"), unit(3.5, "s")) == ("920 ms", "3.5 s")
    assert unit(3 * 2**20, "bytes") == "3 MiB"
    assert (unit(971.4, "short"), unit(2.0, "short"), unit(1.3049, "short")) == ("971", "2", "1.3")
    assert unit(math.nan, "s") == "no data"


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_pictures_of_a_terminal_and_of_every_kind_of_panel(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are optional")
    screen = Terminal(40, 5)
    screen.feed("\x1b[36m■■\x1b[0m··\r\n\x1b[32m█▁▄\x1b[0m\x1b[2m░░\x1b[0m \x1b[1mword\x1b[0m")
    draw_terminal(screen, tmp_path / "terminal.png")
    width, height = size(tmp_path / "terminal.png")
    assert width > height > 50
    times = [1_000.0 + i for i in range(5)]

    def series(labels: dict[str, str], values: list[float]) -> dict:
        return {"metric": labels, "values": [[at, str(value)] for at, value in zip(times, values, strict=True)]}

    known = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"]}
    heat = [series({"le": le}, values) for le, values in (("0.1", [1, 2, 3, 2, 1]), ("+Inf", [1, 4, 3, 2, 9]))]
    nothing = series({"program": "none"}, [0, math.nan, 0, 0, 0])
    panels = [
        (known["Glue share"], [[series({}, [0.1, math.nan, 0.02, 0.03, 0.04])]]),
        (known["Tokens/s"], [[series({}, [100, 200, 150, 170, 180])]]),
        (known["Time to first token"], [heat]),
        (known["Program hits"], [[series({}, [0.9, 0.5, math.nan, 0.9, 1.0])]]),
        (known["Steps by program"], [[series({"program": "CHAT"}, [1, 2, 3, 4, 5]), nothing]]),
        (known["GPU clocks"], [[]]),
    ]
    draw_dashboard(panels, tmp_path / "dashboard.png")
    width, height = size(tmp_path / "dashboard.png")
    assert width > 1_000
    assert height > 500
