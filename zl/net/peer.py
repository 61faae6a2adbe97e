"""Who is at the other end of a socket, in words for the logs. Owns no state. Refuses asyncio, torch and dispatch."""

from __future__ import annotations

import socket
import struct
from typing import Any

from zl.address import TcpAddress

_CREDENTIALS = struct.Struct("3i")  # struct ucred, unix(7): pid, uid, gid


def peer_of(sock: Any, where: Any) -> str:
    """Give HOST:PORT of a TCP peer, `uid N` of one on a Unix socket; "" where the system does not say.

    sock   the connected socket; None: none
    where  its peer's address, as getpeername has it
    """
    if sock is None:
        return ""
    if sock.family == socket.AF_UNIX:
        try:
            _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        except OSError:
            return ""
        return f"uid {uid}"
    return str(TcpAddress(where[0], where[1])).removeprefix("tcp:") if where else ""
