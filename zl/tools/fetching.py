"""GET from a plain HTTP server that may be anything: within one time in all, however slowly it talks, and no proxy.

Owns no state. Refuses torch, numpy, asyncio, ssl and what else urllib.request would bring.
"""

from __future__ import annotations

import http.client
import socket
import time
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """A server's answer."""

    status: int
    reason: str
    body: bytes


def fetch(host: str, port: int, path: str, timeout_s: float, accept: str = "*/*") -> Reply:
    """Ask for a page, and read it whole.

    Raises  TimeoutError: not all had come in time; OSError; http.client.HTTPException: that is no HTTP
    """
    end = time.monotonic() + timeout_s
    connection = http.client.HTTPConnection(host, port)
    try:
        connection.sock = _DueSocket(socket.create_connection((host, port), timeout_s), end)
        connection.request("GET", path, headers={"Accept": accept, "Connection": "close"})
        answer = connection.getresponse()
        return Reply(answer.status, answer.reason, answer.read())
    finally:
        connection.close()


class _DueSocket(socket.socket):
    """A socket that must have given everything by one moment; a timeout alone begins anew with each byte."""

    def __init__(self, sock: socket.socket, end: float):
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._end = end
        self._hurry()

    def recv_into(self, *arguments: Any) -> int:
        """Receive; TimeoutError: it is too late."""
        self._hurry()
        return super().recv_into(*arguments)

    def _hurry(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(left)
