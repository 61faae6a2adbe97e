"""A small HTTP/1.1 server of streamed chat completions for peers that have an engine and no batching server.

An engine object gets `submit(body, stream)` for each request, and calls `stream.tokens(text)` and `stream.end(…)` from
its own thread, any number of them inside `with hub.step():`, which hands a step to the event loop in one wake-up.
State: the event loop's. Standard library only: it runs inside a peer's virtual environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(body: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


def start_engine(run: Callable[[], None], name: str) -> None:
    """Start an engine's thread; when it fails the process ends, since a server without engine would only hang."""

    def guarded() -> None:
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=guarded, name=name, daemon=True).start()


class Hub:
    """Carry what engine threads say to the event loop, a step at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._pending: list[tuple[Any, bytes]] | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Gather all that is said inside into one wake-up of the loop."""
        self._pending = []
        try:
            yield
        finally:
            said, self._pending = self._pending, None
            if said:
                self._loop.call_soon_threadsafe(self._write, said)

    def say(self, transport: Any, data: bytes) -> None:
        """Write data to a connection, at the end of the step where one is open."""
        if self._pending is not None:
            self._pending.append((transport, data))
        else:
            self._loop.call_soon_threadsafe(self._write, [(transport, data)])

    @staticmethod
    def _write(said: list[tuple[Any, bytes]]) -> None:
        for transport, data in said:
            if not transport.is_closing():
                transport.write(data)


class Stream:
    """One answer, as the engine sees it."""

    def __init__(self, hub: Hub, transport: Any):
        self._hub, self._transport = hub, transport
        self._begun = False

    @property
    def gone(self) -> bool:
        """The client has closed its connection."""
        return bool(self._transport.is_closing())

    def tokens(self, text: str) -> None:
        """Send the text of new tokens; it may be empty."""
        data = b"" if self._begun else _HEAD
        self._begun = True
        self._hub.say(self._transport, data + _event({"choices": [{"index": 0, "delta": {"content": text}}]}))

    def end(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Send the figures and end the stream."""
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        last = _event({"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._hub.say(self._transport, (b"" if self._begun else _HEAD) + last)

    def fail(self, why: str) -> None:
        """Answer with an error instead."""
        self._hub.say(self._transport, _plain(500, json.dumps({"error": why}).encode()))


def _plain(status: int, body: bytes) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, hub: Hub, submit: Callable[[dict[str, Any], Stream], None]):
        self._hub, self._submit = hub, submit
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
            if head.startswith(b"POST /v1/chat/completions "):
                try:
                    self._submit(json.loads(body), Stream(self._hub, self._transport))
                except ValueError as error:
                    self._transport.write(_plain(400, json.dumps({"error": str(error)}).encode()))
            else:
                self._transport.write(_plain(200 if head.startswith(b"GET /health ") else 404, b"{}"))


async def serve(host: str, port: int, make: Callable[[Hub], Callable[[dict[str, Any], Stream], None]]) -> None:
    """Serve until the process is ended; `make` gets the hub and returns the engine's submit."""
    loop = asyncio.get_running_loop()
    hub = Hub(loop)
    submit = make(hub)
    server = await loop.create_server(lambda: _Connection(hub, submit), host, port, backlog=1024)
    async with server:
        await server.serve_forever()
