"""Whose certificates a client believes: a file of authorities, or those of the system.

State: of each `Trust`, the TLS context made from them, which clients of one pool share. ssl is imported when the first
context is made, for a client without TLS must not pay for it. Refuses asyncio.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from zl.errors import ConfigError

if TYPE_CHECKING:
    import ssl


class Trust:
    """The authorities that may vouch for a server.

    ca_file  PEM file with their certificates, and no others count; None: `ZL_CA`, else the system's authorities
    """

    def __init__(self, ca_file: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None):
        environ = os.environ if environ is None else environ
        self.ca_file = os.fspath(ca_file or "") or environ.get("ZL_CA", "")
        self._context: ssl.SSLContext | None = None
        self._made_from: tuple[int, int] | None = None

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Trust | None) -> Trust:
        """Make one of what a caller gave, which may be one that is shared."""
        return given if isinstance(given, Trust) else cls(given)

    def context(self) -> ssl.SSLContext:
        """Give the context; a file that has been replaced is read again.

        Raises  ConfigError: the file cannot be read, or holds no certificate
        """
        from zl.client.tls import client_context

        # Two threads at the first use may each make one: either is right.
        found = _version(self.ca_file) if self.ca_file else None
        if self._context is None or found != self._made_from:
            try:
                self._context, self._made_from = client_context(self.ca_file), found
            except ConfigError:
                if self._context is None:
                    raise  # else it is being replaced: what counted before still does
        return self._context

    def check(self, addresses: Iterable[str]) -> None:
        """Read the file now if one of these addresses will need it. Raises as `context` does."""
        if any(address.startswith("tls:") for address in addresses):
            self.context()


def _version(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None  # the reader will say so
    return found.st_mtime_ns, found.st_ino
