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
from zl.client.errors import ConnectionFailed


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
    return f"the connection broke: {error.strerror or error}"


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
