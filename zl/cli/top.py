"""`zl top`: watch a running server by its metrics. Owns no state."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from zl.address import TcpAddress, parse_host_port
from zl.errors import ConfigError

if TYPE_CHECKING:
    from zl.tools.top_figures import Figures, Window
    from zl.tools.top_view import Glyphs

HELP = "watch a running server"
DESCRIPTION = """\
Watch a running server: rows, queue, tokens a second, glue share, latencies, pages, program hits and errors, read from
its metrics. Reading them costs the server nothing while it computes.

On a terminal the view is redrawn each second; q or Ctrl-C ends it. Elsewhere, in a pipe or a file, one line is printed
each second. NO_COLOR turns colours off.

Counts are of this moment. Rates are over the last second, latencies and shares over the last ten; with --once over the
server's whole life. The map has one cell for each row of the batch; the busy ones are drawn first.
"""
EPILOG = """\
examples:
  zl top
  zl top --metrics 10.0.0.5:9433
  ssh -t gpu1 zl top
  zl top --lines >> zl-top.log
  zl top --once
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address and how to show."""
    parser.add_argument("--metrics", metavar="HOST:PORT", help="where the server's metrics are (default: as zl serve "
                        "would be told here: the file, the environment, else 127.0.0.1:9433)")  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="TOML file with the server's settings")
    parser.add_argument("--once", action="store_true", help="show once, with latencies and shares since the server's "
                        "start, and end")  # fmt: skip
    parser.add_argument("--lines", action="store_true", help="print a line each second, also on a terminal")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two readings "
                        "(default: 1)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Show until told to stop, or once; ScrapeError where no server answers at the start."""
    from zl.tools.top_figures import Window
    from zl.tools.top_scrape import scrape
    from zl.tools.top_view import ASCII, UNICODE

    if not 0.1 <= args.interval <= 3_600:
        raise ConfigError("--interval must be from 0.1 to 3600 seconds")
    address = _address(args)
    window = Window(str(address).removeprefix("tcp:"), since_start=args.once)
    window.add(scrape(address))
    glyphs = UNICODE if "utf" in (sys.stdout.encoding or "").lower() else ASCII
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if args.once:
        time.sleep(args.interval)
        window.add(scrape(address))
        _print(window.figures(), glyphs, whole=on_terminal and not args.lines)
        return 0
    if on_terminal and not args.lines:
        return _watch(address, window, args.interval, glyphs)
    while True:
        time.sleep(args.interval)
        _look(address, window)
        _print(window.figures(), glyphs, whole=False)


def _address(args: argparse.Namespace) -> TcpAddress:
    if args.metrics is not None:
        return parse_host_port(args.metrics)
    from zl.config import load

    setting = load({}, file=args.config).metrics
    if setting == "off":
        raise ConfigError("metrics is off in the settings read here: say with --metrics HOST:PORT where they are")
    return parse_host_port(setting)


def _look(address: TcpAddress, window: Window) -> None:
    """Read once more; a server that does not answer is shown as such, for it may come back."""
    from zl.tools.top_scrape import ScrapeError, scrape

    try:
        window.add(scrape(address))
    except ScrapeError as error:
        window.missed(str(error))


def _colour() -> bool:
    return not os.environ.get("NO_COLOR")


def _print(figures: Figures, glyphs: Glyphs, *, whole: bool) -> None:
    from zl.tools.top_view import one_line, paint, view

    if whole:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
        print("\n".join(paint(line, _colour()) for line in view(figures, columns, glyphs)))
    else:
        print(time.strftime("%H:%M:%S"), one_line(figures, glyphs), flush=True)


def _watch(address: TcpAddress, window: Window, interval: float, glyphs: Glyphs) -> int:
    from zl.tools.top_screen import Screen
    from zl.tools.top_view import paint, view

    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    with Screen(sys.stdout, keys) as screen:
        due = time.monotonic()
        while True:
            lines = view(window.figures(), screen.size[0], glyphs)
            screen.draw([paint(line, _colour()) for line in lines])
            due = max(due + interval, time.monotonic())
            if screen.wait(due - time.monotonic()):
                return 0
            _look(address, window)
