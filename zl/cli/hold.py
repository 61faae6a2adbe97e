"""`zl hold`: hold listening sockets for servers that come and go. Owns no state; what it does is in `zl.tools.hold`."""

from __future__ import annotations

import argparse

HELP = "hold sockets for servers that come and go"
DESCRIPTION = """\
Where there is no systemd: hold the sockets that clients connect to, so that servers can be restarted and replaced
behind them and no connection attempt is lost.

With --listen, bind the addresses and wait; descriptors are given to this user's processes that ask at --control. With
a command, run it with those sockets, as systemd would (LISTEN_FDS); --own adds a socket of its own, at which this one
instance can be pinged.
"""
EPILOG = """\
examples:
  zl hold --listen tcp:0.0.0.0:7433 --control unix:/run/zl/hold.sock
  zl hold --control unix:/run/zl/hold.sock --own unix:/run/zl/blue.sock -- zl serve --config /etc/zl/blue.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the addresses and the command."""
    parser.add_argument("--listen", metavar="ADDR", action="append", default=[],
                        help="tcp:HOST:PORT or unix:PATH to hold; may be repeated")  # fmt: skip
    parser.add_argument("--control", metavar="unix:PATH", required=True, help="where descriptors are asked for")
    parser.add_argument("--own", metavar="ADDR", default="", help="a socket for this instance alone")
    parser.add_argument("command_line", metavar="COMMAND", nargs="*", help="what to run with the sockets, after --")


def run(args: argparse.Namespace) -> int:
    """Hold, or become the command."""
    from zl.errors import ConfigError
    from zl.tools import hold

    if bool(args.listen) == bool(args.command_line):
        raise ConfigError("zl hold: give either --listen, to hold sockets, or a command after --, to run with them")
    if args.command_line:
        import os

        hold.join(args.control, args.own, args.command_line, os.environ)
    return hold.hold(args.listen, args.control, lambda names: hold.announce(names, args.control))
