"""The `zl` command: reads the command line, runs one subcommand, turns errors into one line and an exit status.

Each subcommand is a module here with `HELP`, `add_arguments(parser)` and `run(args) -> int`. What is heavy is imported
inside `run`, so that `zl --help` answers at once. Owns no state.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from zl import __version__
from zl.cli import ask, build, chat, dissect, doctor, frame, hold, load, nc, pull, serve, switch, top
from zl.cli.misuse import explain, unknown_command
from zl.cli.packages import explain_missing
from zl.errors import ConfigError, ZlError
from zl.ops.signals import Signals

COMMANDS = {
    "serve": serve,
    "ask": ask,
    "chat": chat,
    "pull": pull,
    "build": build,
    "doctor": doctor,
    "frame": frame,
    "nc": nc,
    "dissect": dissect,
    "load": load,
    "switch": switch,
    "hold": hold,
    "top": top,
}

_EPILOG = """\
first steps:
  zl pull                                   fetch the small embedded model (93 MB)
  zl serve                                  serve it on this machine
  zl ask "What is the capital of France?"   ask it, from another terminal
  zl chat                                   talk with it

Every command explains itself: zl serve --help
"""


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Make the parser of the whole command line; also the parsers of the commands, by name."""
    parser = argparse.ArgumentParser(
        prog="zl",
        description="Serve a language model over raw sockets, and talk to it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"zl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, module in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # else --auth-token SECRET would read a file of that name
        )
        module.add_arguments(own)
    return parser, commands.choices


def main(argv: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    signals  those of a server, where they are heard already
    """
    parser, commands = build_parser()
    try:
        args, extras = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:  # of zl itself: a command's own parser ends by itself
        word = (sys.argv[1:] if argv is None else argv)[0]
        if word.startswith("-"):
            parser.error(f"unknown flag {word}: a command comes first, as in zl serve; zl --help lists them")
        if word not in COMMANDS:
            print("zl: " + unknown_command(word, COMMANDS), file=sys.stderr)
            return 2
        parser.error(str(error))
    args.signals = signals
    if args.command is None:
        if extras:
            parser.error(f"unknown flag {extras[0]}")
        parser.print_help(sys.stderr)
        return 2
    try:
        if extras:
            raise ConfigError(explain(commands[args.command], args, extras))
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
    except ZlError as error:
        print("zl: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:
        said = explain_missing(args.command, error)
        if said is None:
            raise
        print(f"zl: {said}", file=sys.stderr)
        return ConfigError.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left (`zl ask … | head -1`). Python flushes stdout once more on its way out:
        # give it a place where that cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as the shell says it
    return status
