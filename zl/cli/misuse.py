"""What to write instead of a flag or word that a command does not know. Owns no state."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from zl.config import SETTINGS, spec_of

_LISTEN = "write --listen tcp:HOST:PORT, such as --listen tcp:127.0.0.1:7433"
_SERVER_CHOOSES = "the server has the model: zl serve --model MODEL"

INSTEAD: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("serve", "--port"): _LISTEN,
        ("serve", "--host"): _LISTEN,
        ("ask", "--model"): _SERVER_CHOOSES,
        ("chat", "--model"): _SERVER_CHOOSES,
        ("build", "--model"): "the model stands without a flag: zl build MODEL",
        ("pull", "--model"): "the name stands without a flag: zl pull NAME",
    }
)
"""What people write by habit, by command: nothing in zl is spelt like it."""


_COMMANDS: Mapping[str, str] = MappingProxyType({"run": "serve", "start": "serve", "generate": "ask", "bench": "load"})
"""What others call a command."""


def unknown_command(word: str, known: Iterable[str]) -> str:
    """Say which command is likely meant by a word that is none."""
    close = [_COMMANDS[word]] if word in _COMMANDS else difflib.get_close_matches(word, list(known), n=1)
    said = f": did you mean {close[0]}?" if close else "; zl --help lists those it has"
    return f"unknown command {word!r}{said}"


def explain(parser: argparse.ArgumentParser, args: argparse.Namespace, extras: Sequence[str]) -> str:
    """Say which word is wrong and what to write.

    parser  the command's own
    args    what was understood
    extras  what was not, at least one word
    """
    command = str(args.command)
    flag = next((word.partition("=")[0] for word in extras if word.startswith("-") and word != "-"), "")
    if flag:
        flags = parser._option_string_actions
        begun = [each for each in flags if each.startswith(flag) and flag != "--"]
        close = begun or difflib.get_close_matches(flag, flags, n=1)
        near = f"did you mean {close[0]}?" if close else ""
        hint = INSTEAD.get((command, flag)) or _secret(flag, flags) or _setting(flag, flags) or near
        said = f": {hint}" if hint else f"; zl {command} --help lists those it has"
        return f"{command}: unknown flag {flag}{said}"
    words = " ".join(extras)
    if command == "ask":
        return f'ask: one question, not several words: quote it: zl ask "{args.question} {words}"'
    if command == "serve":
        return f"serve: unexpected {extras[0]!r}: the model has a flag: zl serve --model {extras[0]}"
    return f"{command}: unexpected {words!r}; zl {command} --help says what it takes"


def _secret(flag: str, flags: Container[str]) -> str:
    """Say how a token is given: as a flag, every user of the machine could read it."""
    if flag not in ("--auth-token", "--token", "--password", "--api-key") or "--auth-token-file" not in flags:
        return ""
    return "a secret is no flag, for others can read it: --auth-token-file FILE, or ZL_AUTH_TOKEN"


def _setting(flag: str, flags: Container[str]) -> str:
    """Say where a server's setting goes that this command has no flag for, where it takes the settings' file."""
    name = flag.removeprefix("--").replace("-", "_")
    if "--config" not in flags or name not in {each.name for each in SETTINGS}:
        return ""
    table = f"{name} in the table [{spec_of(name).section}] of the file that --config names"
    return f"this setting has no flag here: {table}, or ZL_{name.upper()} in the environment"
