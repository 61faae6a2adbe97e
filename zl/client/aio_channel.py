"""Connections of asyncio's clients: the one place where these open sockets, and ask whether a server speaks TLS.

Owns no state; asyncio has the transports. channel.py is the same for blocking clients.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

from zl.address import Target, TcpAddress, UnixAddress
from zl.client import endpoints
from zl.client.trust import Trust

_READ_BYTES = 1 << 16
_GOODBYE_S = 1.0
"""How long a closing TLS connection waits for the server's goodbye; asyncio itself would wait for half a minute."""

P = TypeVar("P", bound=asyncio.BaseProtocol)


async def open_transport(
    factory: Callable[[], P], text: str | None, timeout: float, trust: Trust
) -> tuple[asyncio.Transport, P, Target]:
    """Connect to an address, or to the default ones for None.

    timeout  seconds for each address tried, a TLS handshake included
    Raises   ConnectionFailed, TlsFailed; ConfigError: the text is no address, or the CA file cannot be used
    """
    addresses = endpoints.candidates(text)
    loop = asyncio.get_running_loop()
    last = OSError("nothing to try")
    for address in addresses:
        try:
            async with asyncio.timeout(None if math.isinf(timeout) else timeout):
                if isinstance(address, UnixAddress):
                    return *await loop.create_unix_connection(factory, address.path), address
                if isinstance(address, TcpAddress):
                    return *await loop.create_connection(factory, address.host, address.port), address
                return *await loop.create_connection(
                    factory, address.host, address.port, ssl=trust.context(), server_hostname=address.host,
                    ssl_shutdown_timeout=_GOODBYE_S,
                ), address  # fmt: skip
        except OSError as error:  # TimeoutError is one
            last = error
    raise endpoints.failure(addresses, last, trust.ca_file) from last


def end_transport(transport: asyncio.WriteTransport) -> None:
    """Close a connection without waiting for a server that does not read: what is unsent then stays unsent."""
    if transport.get_write_buffer_size():
        transport.abort()
    else:
        transport.close()


async def speaks_tls(address: TcpAddress, seconds: float) -> bool:
    """Ask a server over a connection of its own whether it speaks TLS.

    seconds  how long it may take to show it, at most `ASK_TLS_S`
    """
    from zl.client.tls import client_hello

    if seconds <= 0:
        return False
    try:
        async with asyncio.timeout(min(seconds, endpoints.ASK_TLS_S)):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(client_hello(address.host))  # wire
                return endpoints.is_tls(await reader.read(_READ_BYTES))
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return False
