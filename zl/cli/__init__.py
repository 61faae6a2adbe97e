"""The `zl` command: reads the command line, runs one subcommand, turns errors into one line and an exit status.

Each subcommand is a module here with `HELP`, `add_arguments(parser)` and `run(args) -> int`. What is heavy is imported
inside `run`, so that `zl --help` answers at once. What is imported here at the top takes next to no time: Ctrl-C while
the rest is loaded is to end as quietly as later. Owns no state.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from zl.ops.signals import Signals

_PRINTING = ("ask", "chat", "doctor", "frame", "nc", "dissect", "load", "top")
"""Commands whose whole work is what they print."""
_MANY = {"frame": "turns", "nc": "files"}
"""Commands that take any number of words, and where those are kept."""

_EPILOG = """\
first steps:
  zl pull                                   fetch the small embedded model (93 MB)
  zl serve                                  serve it on this machine
  zl ask "What is the capital of France?"   ask it, from another terminal
  zl chat                                   talk with it

Every command explains itself: zl serve --help
"""


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Make the parser of the whole command line; also the parsers of the commands, by name.

    What it reads has the `run` of the command.
    """
    import argparse

    from zl import __version__
    from zl.cli import ask, build, chat, dissect, doctor, frame, hold, load, nc, pull, serve, switch, top

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
    for module in (serve, ask, chat, pull, build, doctor, frame, nc, dissect, load, switch, hold, top):
        own = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # else --auth-token SECRET would read a file of that name
        )
        own.set_defaults(run=module.run)
        module.add_arguments(own)
    return parser, commands.choices


def main(argv: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong use, 130 interrupted.

    141 is for a reader who left before all was printed (`zl ask … | head -1`): 128 + SIGPIPE, as the shell says it.

    signals  those of a server, where they are heard already
    """
    try:
        return _settled(argv, signals)
    except KeyboardInterrupt:
        return 130


def _settled(argv: Sequence[str] | None, signals: Signals | None) -> int:
    """Run one command; say so where standard output did not take what it printed."""
    from contextlib import suppress

    from zl import streams

    streams.occupy()
    broken: BaseException | None = None
    status = 1
    try:
        status = _run(argv, signals)
    except (KeyboardInterrupt, SystemExit, OSError) as error:  # SystemExit: argparse has printed help, or what is wrong
        broken = error
    lost = streams.lost()
    if (failure := lost.get("stdout")) is not None:
        if isinstance(failure, BrokenPipeError):
            return 141
        with suppress(OSError):
            print(f"zl: {streams.explain(failure)}", file=sys.stderr)
        return 1
    if broken is not None and not (lost and isinstance(broken, OSError)):
        raise broken
    return status


def _run(argv: Sequence[str] | None, signals: Signals | None) -> int:
    import argparse
    from contextlib import suppress

    from zl import streams
    from zl.cli.misuse import explain, unknown_command
    from zl.cli.packages import explain_missing
    from zl.errors import ConfigError, ZlError

    parser, commands = build_parser()
    try:
        args, extras = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:  # of zl itself: a command's own parser ends by itself
        word = (sys.argv[1:] if argv is None else argv)[0]
        if word.startswith("-"):
            parser.error(f"unknown flag {word}: a command comes first, as in zl serve; zl --help lists them")
        if word not in commands:
            print("zl: " + unknown_command(word, commands), file=sys.stderr)
            return 2
        parser.error(str(error))
    args.signals = signals
    if args.command is None:
        if extras:
            parser.error(f"unknown flag {extras[0]}")
        parser.print_help(sys.stderr)
        return 2
    try:
        if extras := _more_words(args, extras):
            raise ConfigError(explain(commands[args.command], args, extras))
        if args.command in _PRINTING:
            streams.need_output()
        else:
            streams.ignore_output()
        status: int = args.run(args)
    except ZlError as error:
        with suppress(OSError):  # the status says it as well
            print("zl: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:
        said = explain_missing(args.command, error)
        if said is None:
            raise
        with suppress(OSError):
            print(f"zl: {said}", file=sys.stderr)
        return ConfigError.exit_status
    return status


def _more_words(args: argparse.Namespace, extras: list[str]) -> list[str]:
    """Take words that stand behind a flag (`zl nc ADDR --output json FILE`); return the rest, which nobody knows.

    argparse gives an argument that may be repeated only the words up to the first flag, and calls the others unknown.
    """
    at = extras.index("--") if "--" in extras else len(extras)  # behind it, nothing is a flag
    if args.command not in _MANY or any(word.startswith("-") and word != "-" for word in extras[:at]):
        return extras
    name = _MANY[args.command]
    setattr(args, name, [*getattr(args, name), *extras[:at], *extras[at + 1 :]])
    return []
