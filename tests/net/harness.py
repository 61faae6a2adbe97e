"""A server of real sockets around a small honest application, and peers to talk to it.

The application checks with the real codec, answers a few tokens, honours max_tokens, seed and cancel, and keeps books
that `serving` audits when it ends: no berth, request, connection or watch may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from zl.address import TcpAddress, UnixAddress
from zl.errors import Code, Finish, RequestError
from zl.gpu.arena import Arena
from zl.net import codec, rules
from zl.net.codec import Request, Response, ServerInfo, Usage
from zl.net.connections import Net
from zl.net.frames import PING, FrameDecoder, FrameEvent, Payload, Ping
from zl.net.host import Limits
from zl.net.listen import bind_all, listen

VOCAB = 49_152
LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
INFO = ServerInfo(version="1", model="fake", vocab_size=VOCAB, build_id="b")


def run(main: Coroutine[Any, Any, None], kind: str = "uvloop") -> None:
    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        runner.run(asyncio.wait_for(main, 60))


@dataclass(eq=False)
class Job:
    request: Request
    n_left: int
    n_done: int = 0


@dataclass
class App:
    """Answers by itself, a token a turn of the loop; with `held`, only when `step` is called."""

    held: bool = False
    n_tokens: int = 3
    text: bytes = b"x"
    accepting: bool = True
    healthy: bool = True
    queue_limit: int = 10_000
    jobs: dict[Any, dict[int, Job]] = field(default_factory=dict)
    submitted: list[Request] = field(default_factory=list)
    refusals: list[tuple[int, Code]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    closed_conns: list[Any] = field(default_factory=list)

    def submit(self, conn: Any, request: Request) -> None:
        if sum(map(len, self.jobs.values())) >= self.queue_limit:
            raise RequestError(Code.OVERLOADED, "no place left", retry_after_ms=20)
        rules.check_request(request)  # the number of turns is the application's matter
        rules.check_tokens(request, VOCAB)
        self.submitted.append(request)
        n = min(request.max_tokens or 256, self.n_tokens)
        self.jobs.setdefault(conn, {})[request.request_id] = Job(request, n)
        if not self.held:
            asyncio.get_running_loop().call_soon(self.step)

    def refused(self, conn: Any, request: Request | None, code: Code) -> None:
        if request is not None:
            self.refusals.append((request.request_id, code))

    def cancel(self, conn: Any, request_id: int) -> None:
        self.cancelled.append(request_id)
        self._finish(conn, self.jobs[conn][request_id], Finish.CANCELLED)
        conn.flush()

    def closed(self, conn: Any) -> None:
        self.closed_conns.append(conn)
        for job in self.jobs.pop(conn, {}).values():
            job.request.give_back()

    def server_info(self) -> bytes:
        return codec.pack_server_info(INFO)

    def step(self) -> None:
        """Give every request one token."""
        for conn, jobs in list(self.jobs.items()):
            for job in list(jobs.values()):
                seed = (job.request.seed or 1) if not job.n_done else None
                conn.queue(codec.encode_tokens(job.request.request_id, [job.n_done], self.text, None, seed))
                job.n_done += 1
                job.n_left -= 1
                if not job.n_left:
                    self._finish(conn, job, Finish.LENGTH)
            conn.flush()
        if self.jobs and not self.held:
            asyncio.get_running_loop().call_soon(self.step)

    def _finish(self, conn: Any, job: Job, finish: Finish) -> None:
        request_id = job.request.request_id
        del self.jobs[conn][request_id]
        job.request.give_back()
        if not self.jobs[conn]:
            del self.jobs[conn]
        conn.queue(codec.encode_last(request_id, [], b"", None, finish, Usage(completion_tokens=job.n_done)))
        conn.finished(request_id)


class Peer:
    """A client of raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self._decoder = FrameDecoder()
        self._events: list[FrameEvent] = []

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ask(self, request_id: int, **fields: Any) -> None:
        await self.send(ask(request_id, **fields))

    async def event(self) -> FrameEvent | None:
        """Give the next frame; None: the server has ended its side, between frames."""
        while not self._events:
            data = await self.reader.read(65_536)
            if not data:
                assert self._decoder.eof() is None
                return None
            self._events += self._decoder.feed(data)
        return self._events.pop(0)

    async def response(self) -> Response:
        event = await self.event()
        assert isinstance(event, Payload), event
        return codec.decode_response(event.data)

    async def answer(self) -> list[Response]:
        """Give the frames up to the next that finishes a request."""
        frames = [await self.response()]
        while not frames[-1].is_finished:
            frames.append(await self.response())
        return frames

    async def error(self) -> tuple[Code, int]:
        response = await self.response()
        assert response.is_finished
        assert response.error is not None
        assert response.finish is Finish.ERROR
        return response.error.code, response.request_id

    async def ping(self) -> None:
        await self.send(PING)
        assert await self.event() == Ping()

    def reset(self) -> None:
        """Vanish without a word: the server's kernel gets a reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def ask(request_id: int, **fields: Any) -> bytes:
    return codec.encode_request(**{"request_id": request_id, "messages": ["hello"], **fields})


@dataclass
class Served:
    net: Net
    app: App
    arena: Arena
    port: int
    path: str
    peers: list[Peer] = field(default_factory=list)

    async def peer(self, kind: str = "tcp", **options: Any) -> Peer:
        if kind == "unix":
            streams = await asyncio.open_unix_connection(self.path, **options)
        else:
            streams = await asyncio.open_connection("127.0.0.1", self.port, **options)
        self.peers.append(Peer(*streams))
        return self.peers[-1]

    async def until(self, condition: Any) -> None:
        """Turn the loop until something holds; `run` bounds the wait."""
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path,
    app: App | None = None,
    *,
    n_berths: int = 8,
    limits: Limits | None = None,
    auth_token: bytes | None = None,
    tls: Any = None,
    factory: Any = None,
    decode: codec.Decoder | None = None,
    max_files: int = 1 << 31,
) -> AsyncIterator[Served]:
    app = app or App()
    arena = Arena(n_berths)
    loop = asyncio.get_running_loop()
    net = Net(loop=loop, app=app, arena=arena, limits=limits, auth_token=auth_token, decode=decode, max_files=max_files)
    path = str(tmp_path / "s.sock")
    bounds = bind_all([TcpAddress("127.0.0.1", 0), UnixAddress(path)])
    listeners = await listen(bounds, (lambda: factory(net)) if factory else net.connection, tls=tls)
    served = Served(net, app, arena, bounds[0].sock.getsockname()[1], path)
    try:
        yield served
    finally:
        for peer in served.peers:
            await peer.close()
        listeners.close()
        net.close_connections()
        await served.until(lambda: not net.connections)
        counters = net.counters
        assert counters.connections_open == 0
        assert len(app.closed_conns) == len(set(app.closed_conns)) == counters.connections_total
        assert not app.jobs
        assert net.hangups.n_watched == 0
        net.close()
        assert arena.in_use == arena.waiting == 0
        arena.check()
        arena.close()  # raises if a view of a berth is left
