"""What to write instead of a flag or word that a command does not know. Owns no state."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

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


def explain(parser: argparse.ArgumentParser, args: argparse.Namespace, extras: Sequence[str]) -> str:
    """Say which word is wrong and what to write.

    parser  the command's own
    args    what was understood
    extras  what was not, at least one word
    """
    command = str(args.command)
    flag = next((word.partition("=")[0] for word in extras if word.startswith("-") and word != "-"), "")
    if flag:
        close = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
        hint = INSTEAD.get((command, flag)) or (f"did you mean {close[0]}?" if close else "")
        said = f": {hint}" if hint else f"; zl {command} --help lists those it has"
        return f"{command}: unknown flag {flag}{said}"
    words = " ".join(extras)
    if command == "ask":
        return f'ask: one question, not several words: quote it: zl ask "{args.question} {words}"'
    if command == "serve":
        return f"serve: unexpected {extras[0]!r}: the model has a flag: zl serve --model {extras[0]}"
    return f"{command}: unexpected {words!r}; zl {command} --help says what it takes"
