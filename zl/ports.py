"""TCP ports: what a listener on an address binds, and whether it could. Owns no state; the standard library alone."""

from __future__ import annotations

import socket
from typing import Any


def resolve(host: str, port: int) -> tuple[Any, ...]:
    """Give what a listener on a TCP address binds, as socket.getaddrinfo: family, kind, protocol, name, end.

    Raises  OSError, UnicodeError: the host is not known here
    """
    flags = socket.AI_PASSIVE | socket.AI_NUMERICSERV
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]


def try_binding(host: str, port: int) -> None:
    """Bind a TCP address for a moment. OSError, UnicodeError: it cannot be had."""
    family, kind, protocol, _, end = resolve(host, port)
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(end)
