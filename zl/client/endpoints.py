"""Which address to connect to, and the words for when that fails. Owns no state."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from zl.address import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    Target,
    TcpAddress,
    TlsAddress,
    UnixAddress,
    default_socket,
    parse_target,
)
from zl.client.errors import ConnectionFailed, TlsFailed

_TLS_HEADER_BYTES = 5
"""Of a record; before it has as many, a TLS server says nothing."""

ASK_TLS_S = 1.0
"""How long a server that ended a connection without a word may take to show that it speaks TLS."""


def candidates(address: str | None, environ: Mapping[str, str] | None = None) -> list[Target]:
    """List the addresses to try: the given one, else `ZL_CONNECT`, else the default Unix socket and TCP port.

    Raises  ConfigError: the text is no address
    """
    environ = os.environ if environ is None else environ
    address = address or environ.get("ZL_CONNECT") or None
    if address is not None:
        return [parse_target(address)]
    path = default_socket(environ)
    found: list[Target] = [UnixAddress(path)] if _is_own_socket(path) else []
    return [*found, TcpAddress(DEFAULT_HOST, DEFAULT_PORT)]


def token_of(auth_token: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Give the token to say: the given one, "" for none; where nothing was given, that of `ZL_AUTH_TOKEN`."""
    environ = os.environ if environ is None else environ
    return environ.get("ZL_AUTH_TOKEN", "") if auth_token is None else auth_token


def _is_own_socket(path: str) -> bool:
    # In /tmp anybody could have put a socket of that name: talk only to one that is ours or root's.
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid in (os.getuid(), 0)


def failure(tried: list[Target], error: OSError, ca_file: str = "") -> ConnectionFailed:
    """Make the exception for addresses none of which answered; `ca_file` is the one that was used for TLS."""
    for address in tried:
        if isinstance(address, TlsAddress):
            from zl.client.tls import explain

            if (found := explain(address, error, ca_file)) is not None:
                return found
    where = " nor ".join(str(address) for address in tried)
    reason = error.strerror or str(error)
    if isinstance(error, TimeoutError):
        reason = "no answer in time"
    elif error.errno is not None and error.errno > 0:  # the system's; names that are not found have negative ones
        reason = os.strerror(error.errno)  # asyncio puts words of its own into strerror
    return ConnectionFailed(f"cannot connect to {where}: {reason}; is a server running there? (zl serve)")


def broke(error: OSError) -> str:
    """Say that a connection broke, and why."""
    if isinstance(error, ConnectionFailed):
        return str(error)
    return f"the connection broke: {error.strerror or error}"


def is_tls(data: bytes) -> bool:
    """Tell whether what a server says first is a TLS record: an alert to our frame, or its part of a handshake."""
    # RFC 8446, section 5.1. As the header of a frame it would announce 350 MB.
    return data[:1] in (b"\x15", b"\x16") and data[1:2] == b"\x03"


def judged(n_sent: int, ended: bool = False) -> bool:
    """Tell whether a TLS server would have turned away a connection by what was sent on it, or by the end of it."""
    return n_sent >= _TLS_HEADER_BYTES or (ended and n_sent > 0)


def needs_tls(address: TcpAddress) -> TlsFailed:
    """Make the exception for a server that speaks TLS behind an address that says otherwise."""
    host_port = str(address).removeprefix("tcp:")
    return TlsFailed(f"the server at {host_port} speaks TLS: use {TlsAddress(*address)}")


def ended(address: Target | None, heard: bool) -> str:
    """Say that the server closed the connection; `heard` if it had ever said anything on it."""
    reason = "the server closed the connection"
    if heard or not isinstance(address, TcpAddress):
        return reason
    return (
        f"{reason} without a word: it is going down, this is not its zl port (7433 where none is set, 9433 has the "
        f"metrics), or it has a certificate and {_wants_tls(address)}"
    )


def silent(address: Target | None, heard: bool) -> str:
    """Give what to add when a server does not answer in time."""
    if heard or not isinstance(address, TcpAddress):
        return ""
    return f"; a server with a certificate {_wants_tls(address)}"


def _wants_tls(address: TcpAddress) -> str:
    return f"must be called {TlsAddress(address.host, address.port)}"
