"""`zl dissect`: every byte of a recorded stream explained, and what is wrong where. Owns no state."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from zl.cli.numbers import count
from zl.errors import ConfigError
from zl.streams import standard_input

if TYPE_CHECKING:
    from zl.tools.dissector import Dissection
    from zl.tools.walker import Line

HELP = "explain the bytes of a recorded stream"
DESCRIPTION = """\
Explain every byte that one side sent: offset, bytes, frame, field, wire type, value, and what is wrong where it is
wrong. The last line is the verdict: fine, or the offset of the first wrong byte. A number that is wrong (a length, a
tag) is wrong at its first byte; where something is missing, the offset is where it should have begun.

Exit status: 0 fine, 1 something is wrong, 2 wrong use.
"""
EPILOG = """\
examples:
  zl frame "What is the capital of France?" | zl dissect -
  zl frame "Hi" | nc -N 127.0.0.1 7433 | zl dissect -
  zl dissect --from server --vocab-size 49152 answer.bin
"""
_HEX = 8
_PROBLEM, _FRAME, _WIRE, _PLAIN = "\x1b[1;31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the flags."""
    parser.add_argument("file", metavar="FILE", help="recorded bytes; - reads stdin")
    parser.add_argument("--from", dest="side", choices=("client", "server"),
                        help="who sent the bytes (default: whose messages they resemble)")  # fmt: skip
    parser.add_argument("--max-frame", type=count(1, 2**32 - 1), metavar="BYTES",
                        help="longest payload that the reader takes")  # fmt: skip
    parser.add_argument("--vocab-size", type=count(1), metavar="N", help="judge token ids against a vocabulary of "
                        "this size")  # fmt: skip
    parser.add_argument("--quiet", "-q", action="store_true", help="print the verdict only")


def run(args: argparse.Namespace) -> int:
    """Print the lines and the verdict."""
    from zl.tools import dissector

    data = read_bytes(args.file)
    vocab = dissector.ANY_VOCAB if args.vocab_size is None else args.vocab_size
    found = dissector.dissect(data, args.side, max_frame=args.max_frame, vocab_size=vocab)
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if not args.quiet:
        guessed = "" if args.side else " (guessed; --from says otherwise)"
        print(f"from the {found.side}{guessed}: {len(data)} bytes, {_counted(found.n_frames, 'frame')}")
        for line in found.lines:
            print(render(data, line, coloured))
    print(verdict(found))
    return 1 if found.problems else 0


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def render(data: bytes, line: Line, coloured: bool) -> str:
    """Lay one line out: offset, first bytes, what they are."""
    content = data[line.offset : line.offset + line.size]
    shown = content[:_HEX].hex(" ") + (" …" if line.size > _HEX else "")
    if line.wire and line.wire != "length":
        what = f"{line.name} ({line.wire})"
    else:
        what = line.name
    text = f"{'  ' * line.depth}{what}" + (f": {line.value}" if line.value else "")
    wrong = f"  <-- {line.problem}" if line.problem else ""
    start = f"{line.offset:08x} {line.offset:>7}  {shown:<{3 * _HEX + 1}} "
    if not coloured:
        return (start + text + wrong).rstrip()
    colour = _PROBLEM if line.name in ("wrong", "missing") else _FRAME if not line.depth else ""
    return f"{_WIRE}{start}{_PLAIN}{colour}{text}{_PLAIN if colour else ''}{_PROBLEM if wrong else ''}{wrong}{_PLAIN}"


def verdict(found: Dissection) -> str:
    """Say it in one line."""
    if not found.problems:
        return "fine"
    offset, text, code, frame = found.problems[0]
    more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
    answer = "" if found.side == "server" else f"; a server answers {code.name}"
    return f"wrong at offset {offset}, in frame {frame}: {text}{answer}{more}"


def read_bytes(path: str) -> bytes:
    """Read a file or, for `-`, stdin.

    Raises  ConfigError: it cannot be read
    """
    try:
        if path == "-":
            return standard_input().buffer.read()
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
