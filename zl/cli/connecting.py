"""What commands that connect share: flags for the connection and for sampling, and where the token comes from.

Owns no state.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, cast

from zl.cli.numbers import seconds
from zl.readers import read_token
from zl.shapes import DEFAULT_TOKENS, MAX_TOKENS

if TYPE_CHECKING:
    from zl.client import Client, Options


ADDRESS = "tcp:HOST:PORT, unix:PATH, or tls:HOST:PORT where the server has a certificate"


def add_ca(parser: argparse._ActionsContainer) -> None:
    """Add the flag that says who vouches for a server at a tls: address."""
    parser.add_argument("--ca", metavar="FILE", help="with tls: PEM file of the authorities to believe (default: "
                        "$ZL_CA, else the system's)")  # fmt: skip


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the server is."""
    group = parser.add_argument_group("connection")
    group.add_argument("--connect", metavar="ADDR", help=f"{ADDRESS} (default: $ZL_CONNECT, else the Unix socket of a "
                       "server on this machine, else tcp:127.0.0.1:7433)")  # fmt: skip
    add_ca(group)
    add_token(group)
    group.add_argument("--timeout", type=seconds, metavar="SECONDS", help="longest wait for a token (default: 120)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how to answer."""
    group = parser.add_argument_group("answer")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument("--type", choices=("chat", "summarize", "creative"), help="sampling profile (default: chat)")
    group.add_argument("--temperature", type=float, metavar="X", help="0 always takes the likeliest token")
    group.add_argument("--top-p", type=float, metavar="X", help="draw among the likeliest tokens of this probability")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 discourages repeating; 1 is off")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens; 0 is the server's "
                       f"default ({DEFAULT_TOKENS}), and its limit ({MAX_TOKENS}) cuts what is more; the server may be "
                       "set otherwise")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")


def add_token(parser: argparse._ActionsContainer) -> None:
    """Add the flag that says where the token is."""
    parser.add_argument("--auth-token-file", metavar="FILE", help="file with the server's token (or set ZL_AUTH_TOKEN)")


def token_of_flag(args: argparse.Namespace) -> str | None:
    """Read the token that the flag names; None where it is not given: clients then take `ZL_AUTH_TOKEN`."""
    return None if args.auth_token_file is None else read_token(args.auth_token_file, "--auth-token-file", once=True)


def connect(args: argparse.Namespace) -> Client:
    """Connect as the flags say."""
    from zl.client import Client, Timeouts

    timeout = 120.0 if args.timeout is None else args.timeout
    token = token_of_flag(args)
    limits = Timeouts(min(5.0, timeout), timeout, timeout)
    return Client(args.connect, timeout=limits, auth_token=token, ca_file=args.ca)


def options(args: argparse.Namespace) -> Options:
    """Collect the options that were given."""
    names = ("system", "type", "temperature", "top_p", "repetition_penalty", "max_tokens", "seed", "stop")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return cast("Options", given)
