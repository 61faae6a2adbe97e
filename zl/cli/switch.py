"""`zl switch`: have another instance serve, or restart all in turn, without a failed request. Owns no state; the
procedure is in `zl.tools.switchover`."""

from __future__ import annotations

import argparse
import os

from zl.cli.connecting import add_ca

HELP = "have another instance serve, without a failed request"
DESCRIPTION = """\
Blue/green and rolling restarts. `zl switch green` starts green, waits until it answers a ping, its readiness URL and a
request for one token, moves traffic to it, watches it, and then has the others drain and stop. Where it does not get
well, nothing was taken from the others and it is stopped again. --roll restarts all that serve, one after the other.
Without a name, says what serves.

The file names the instances and how traffic is moved: one listening socket that all accept from, HAProxy's runtime
socket, or a command of your own. docs/scaling.md describes it.

Ctrl-C, TERM and the loss of the terminal roll back as well, or, once an old one is being stopped, end it with a line
that says what serves and what is left to do. A pipe or disk that takes no more of what is printed ends nothing.

Exit status: 0 done; 1 rolled back, or nothing serves; 2 wrong use; 129, 130, 143 ended by HUP, Ctrl-C, TERM.
"""
EPILOG = """\
examples:
  zl switch                     what serves now
  zl switch green               green serves, blue drains and stops
  zl switch --roll --config /etc/zl/fleet.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name and the file."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="the instance that is to serve, such as blue or green")
    parser.add_argument("--roll", action="store_true", help="restart all that serve, one after the other")
    parser.add_argument("--config", metavar="FILE", help="default: /etc/zl/switch.toml")
    add_ca(parser)


def run(args: argparse.Namespace) -> int:
    """Switch, roll, or say what serves."""
    import fcntl

    from zl.errors import ConfigError, ZlError
    from zl.readers import read_token
    from zl.streams import Teller
    from zl.tools import fleet, probing
    from zl.tools.interruption import Interrupted, Interruption
    from zl.tools.switchover import Procedure

    if args.name and args.roll:
        raise ConfigError("zl switch: give either a name or --roll")
    plan = fleet.load(args.config or fleet.DEFAULT_FILE, args.ca or "")
    if not args.name and not args.roll:
        serving = 0
        for each in plan.instances:
            try:
                probing.probe(each)
                print(f"{each.name}\tserves at {each.address}")
                serving += 1
            except probing.NotReadyError as error:
                print(f"{each.name}\t{error}")
        return 0 if serving else 1
    named = plan.auth_token_file
    said = f"{plan.path}: auth_token_file"
    token = read_token(named, said, once=True) if named else os.environ.get("ZL_AUTH_TOKEN", "")
    with open(plan.path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ZlError(f"another zl switch with {plan.path} is under way; let it end first") from None
        interruption = Interruption()
        procedure = Procedure(plan, Teller(), token, interruption)
        try:
            with interruption.listening():
                if args.roll:
                    procedure.roll()
                else:
                    procedure.switch(args.name)
        except Interrupted as error:  # before anything was begun, or after all was done
            return error.status
    return 0
