"""The load generator's two protocols: HTTP/1.1 with server-sent events, and zl's own frames. One connection a stream.

Both put a time stamp on each read of the socket and parse no more than they must. State: the open connections.
Refuses zl's client library: what is measured is the server, and the parser here must cost the same for any of them.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Protocol

from zl.tools.prompts import Prompt
from zl.tools.traces import Trace

clock = time.perf_counter


class Client(Protocol):
    """A set of connections to one server; stream i talks over connection i."""

    async def connect(self, n: int) -> None:
        """Have at least n connections open."""

    async def ask(self, prompt: Prompt, stream: int) -> Trace:
        """Send one request and follow its answer to the end."""

    def progress(self, stream: int) -> int:
        """Count the token frames that the stream's running answer has had."""

    async def close(self) -> None:
        """Close all connections."""


class _Connection(asyncio.Protocol):
    """What both protocols share: one answer at a time, and a future that tells its end."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.trace = Trace()
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self.trace.error = f"the server closed the connection mid-answer ({exc})"
            self._ended.set_result(None)

    async def ask(self, request: bytes) -> Trace:
        if self.transport.is_closing():
            return Trace(error="the server has closed the connection")
        self._ended = asyncio.get_running_loop().create_future()
        self.trace = Trace(sent=clock())
        self.transport.write(request)
        await self._ended
        return self.trace

    def end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class SseConnection(_Connection):
    """HTTP/1.1 with a chunked body of server-sent events."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = bytearray()
        self._head = True
        self._failed = 0  # length of an error's body, 0 while all is well
        self._events = b""
        self._done = False

    def data_received(self, data: bytes) -> None:
        now = clock()
        self._buffer += data
        while self._step(now):
            pass

    def _step(self, now: float) -> bool:
        """Take one head or chunk from the buffer; say whether there was one."""
        buffer = self._buffer
        if self._failed:
            if len(buffer) < self._failed:
                return False
            self.trace.error += bytes(buffer[: self._failed]).decode(errors="replace")[:300]
            del buffer[: self._failed]
            self._failed = 0
            self.end()
            return False
        if self._head:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = bytes(buffer[:end]).lower()
            del buffer[: end + 4]
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                self.trace.error = head.split(b"\r\n", 1)[0].decode() + ": "
                length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
                self._failed = int(length or 1)
            else:
                self._head, self._done = False, False
            return True
        end = buffer.find(b"\r\n")
        if end < 0:
            return False
        size = int(bytes(buffer[:end]), 16)
        if len(buffer) < end + 4 + size:
            return False
        body = bytes(buffer[end + 2 : end + 2 + size])
        del buffer[: end + 4 + size]
        if size:
            self._take(body, now)
        else:
            self._head = True
            if not self._done:
                self.trace.error = self.trace.error or "the stream ended before [DONE]"
            self.end()
        return True

    def _take(self, body: bytes, now: float) -> None:
        *events, self._events = (self._events + body).replace(b"\r\n", b"\n").split(b"\n\n")
        trace = self.trace
        for event in events:
            if event.startswith(b"data: [DONE]"):
                self._done = True
            elif event.startswith(b"data: "):
                # The first event of a stream names the role and carries no token; usage comes after the last token.
                if b'"content":' in event and b'"role":' not in event:
                    trace.arrivals.append(now)
                    trace.n_tokens += 1
                elif b'"usage":{' in event.replace(b": ", b":"):
                    self._usage(json.loads(event[6:])["usage"])
                elif b'"error":' in event:
                    trace.error = event[6:306].decode(errors="replace")

    def _usage(self, usage: dict[str, Any]) -> None:
        self.trace.n_tokens = usage["completion_tokens"]
        self.trace.prompt_tokens = usage["prompt_tokens"]


class FrameConnection(_Connection):
    """zl's frames; the message classes are zl's generated ones."""

    def __init__(self) -> None:
        super().__init__()
        from zl.net.schema_pb2 import Response

        self._parse = Response.FromString
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        now = clock()
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            stop = at + 4 + int.from_bytes(buffer[at : at + 4], "big")
            if len(buffer) < stop:
                break
            self._take(self._parse(bytes(buffer[at + 4 : stop])), now)
            at = stop
        del buffer[:at]

    def _take(self, response: Any, now: float) -> None:
        trace = self.trace
        n = len(response.token_ids)
        if n:
            trace.arrivals.append(now)
            trace.n_tokens += n
        if response.is_finished:
            if response.HasField("error"):
                trace.error = f"code {response.error.code}: {response.error.message}"
            trace.prompt_tokens = response.usage.prompt_tokens
            names = ("constant_tokens", "queue_us", "prefill_us", "decode_us", "glue_us")
            trace.usage = {name: getattr(response.usage, name) for name in names}
            self.end()


class _Pool:
    """Connections to one address."""

    kind: type[SseConnection] | type[FrameConnection]

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port
        self._open: list[Any] = []

    async def connect(self, n: int) -> None:
        """Have at least n connections open."""
        loop = asyncio.get_running_loop()
        self._open = [c for c in self._open if not c.transport.is_closing()]
        while len(self._open) < n:
            batch = min(100, n - len(self._open))  # below the usual listen backlog
            made = [loop.create_connection(self.kind, self._host, self._port) for _ in range(batch)]
            self._open += [protocol for _, protocol in await asyncio.gather(*made)]

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._open:
            connection.transport.close()
        self._open = []
        await asyncio.sleep(0)

    def progress(self, stream: int) -> int:
        """Count the token frames that the stream's running answer has had."""
        return len(self._open[stream].trace.arrivals)

    async def _ask(self, request: bytes, stream: int) -> Trace:
        return await self._open[stream].ask(request)


class SseClient(_Pool):
    """OpenAI-like chat completions. `fields` are added to each request, `penalty` names the repetition penalty."""

    kind = SseConnection

    def __init__(self, host: str, port: int, model: str, penalty: str, fields: dict[str, Any]):
        super().__init__(host, port)
        self._model, self._penalty, self._fields = model, penalty, fields

    async def ask(self, prompt: Prompt, stream: int) -> Trace:
        """Send one request and follow its answer to the end."""
        return await self._ask(self.encode(prompt), stream)

    def encode(self, prompt: Prompt) -> bytes:
        """Make the request's bytes."""
        temperature, top_p, penalty = prompt.sampling
        body = json.dumps(
            {
                "model": self._model,
                "messages": prompt.chat(),
                "max_tokens": prompt.max_tokens,
                "temperature": temperature,
                "top_p": top_p,
                self._penalty: penalty,
                "stream": True,
                **self._fields,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class FrameClient(_Pool):
    """zl's native protocol, with the request type's compiled sampling profile."""

    kind = FrameConnection

    async def ask(self, prompt: Prompt, stream: int) -> Trace:
        """Send one request and follow its answer to the end."""
        return await self._ask(self.encode(prompt), stream)

    def encode(self, prompt: Prompt) -> bytes:
        """Make the request's frame. One request at a time is on a connection, so its id may repeat."""
        from zl.net import schema_pb2

        request = schema_pb2.Request(
            request_id=1,
            system_prompt=prompt.system.encode(),
            messages=[turn.encode() for turn in prompt.messages],
            max_tokens=prompt.max_tokens,
            type=schema_pb2.RequestType.Value(prompt.type),
            ignore_eos=True,
        )
        payload = request.SerializeToString()
        return len(payload).to_bytes(4, "big") + payload
