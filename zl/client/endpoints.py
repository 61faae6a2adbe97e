"""Which address to connect to, and the words for when that fails. Owns no state."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from zl.address import DEFAULT_HOST, DEFAULT_PORT, Address, TcpAddress, UnixAddress, default_socket, parse_address
from zl.client.errors import ConnectionFailed


def candidates(address: str | None, environ: Mapping[str, str] | None = None) -> list[Address]:
    """List the addresses to try: the given one, else `ZL_CONNECT`, else the default Unix socket and TCP port.

    Raises  ConfigError: the text is no address
    """
    environ = os.environ if environ is None else environ
    address = address or environ.get("ZL_CONNECT") or None
    if address is not None:
        return [parse_address(address)]
    path = default_socket(environ)
    found: list[Address] = [UnixAddress(path)] if _is_own_socket(path) else []
    return [*found, TcpAddress(DEFAULT_HOST, DEFAULT_PORT)]


def _is_own_socket(path: str) -> bool:
    # In /tmp anybody could have put a socket of that name: talk only to one that is ours or root's.
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid in (os.getuid(), 0)


def failure(tried: list[Address], error: OSError) -> ConnectionFailed:
    """Make the exception for addresses none of which answered."""
    where = " nor ".join(str(address) for address in tried)
    reason = "no answer in time" if isinstance(error, TimeoutError) else (error.strerror or str(error))
    return ConnectionFailed(f"cannot connect to {where}: {reason}; is a server running there? (zl serve)")
