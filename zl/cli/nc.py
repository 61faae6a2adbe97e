"""`zl nc`: send frames as they are, print the answers. Owns no state; what it does is in `zl.tools.netcat`."""

from __future__ import annotations

import argparse

from zl.cli.connecting import ADDRESS, add_ca
from zl.cli.numbers import seconds

HELP = "send frames, print answers"
DESCRIPTION = """\
Send the bytes of files, or of stdin, to a server as they are, close the sending side (with TLS, which cannot be closed
on one side alone, only when all is answered), and print what comes back: text
(each answer in turn, pongs as "pong"), one JSON object a frame, or the raw bytes. Errors are lines on stderr.

Exit status: 0 every request and ping was answered; 3 some request ended with an error; 4 no connection, or it broke or
went silent before every answer was complete; 2 wrong use.
"""
EPILOG = """\
examples:
  zl frame "What is the capital of France?" | zl nc tcp:127.0.0.1:7433
  zl frame --ping | zl nc unix:/tmp/zl.sock
  zl frame --json < prompts.jsonl | zl nc --output json tcp:127.0.0.1:7433
  zl nc --output raw tcp:127.0.0.1:7433 a.bin b.bin | zl dissect -
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address, the files and the flags."""
    parser.add_argument("address", metavar="ADDR", help=ADDRESS)
    parser.add_argument("files", nargs="*", default=[], metavar="FILE",
                        help="what to send (default: stdin; - is stdin too)")  # fmt: skip
    parser.add_argument("--output", choices=("text", "json", "raw"), default="text", help="default: text")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="SECONDS",
                        help="longest silence of the server, also while connecting (default: 120)")  # fmt: skip
    add_ca(parser)


def run(args: argparse.Namespace) -> int:
    """Send and print; the status says how it went."""
    from zl.tools.netcat import exchange

    return exchange(args.address, args.files or ["-"], args.output, args.timeout, args.ca)
