"""A small honest server for client tests: the real wire, answers made from what the last turn says.

    say A B C      one token a word             hang          two tokens, then nothing
    silent         nothing at all               endless       a token every 2 ms until it is cancelled
    flood N        N tokens at once             break         two tokens, then the connection ends
    fail CODE      an error at once             fail-late CODE  two tokens, then the error
    echo           says its own request as text  garbage       a payload that is no Response
    split          multi-byte text, the frame cut into single bytes
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path
from typing import Self

from zl.errors import Code, Finish, PeerError
from zl.net.codec import (
    Operation,
    Request,
    ServerInfo,
    Usage,
    decode_request,
    encode_error,
    encode_last,
    encode_server_info,
    encode_tokens,
    pack_server_info,
)
from zl.net.frames import PING, FrameDecoder, Payload, Ping, frame

INFO = ServerInfo(version="0.0.1", model="fake", vocab_size=10, max_batch=4, max_model_len=4_096, device="none",
                  build_id="b1")  # fmt: skip

CONTEXT_BYTES = 1_000
"""More context than this is cut, or so the usage says."""


class FakeServer:
    """Runs in a thread of its own; `address` is where."""

    def __init__(self, unix: Path | None = None, auth_token: bytes = b"", answers_pings: bool = True,
                 tls: ssl.SSLContext | None = None):  # fmt: skip
        self._unix = unix
        self._tls = tls
        self._auth_token = auth_token
        self._answers_pings = answers_pings
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main(),))
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.closed = threading.Event()  # a client has left
        self.was_cancelled = threading.Event()
        self.address = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _main(self) -> None:
        if self._unix:
            server = await asyncio.start_unix_server(self._serve, self._unix)
            self.address = f"unix:{self._unix}"
        else:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
            kind = "tls" if self._tls else "tcp"
            self.address = f"{kind}:127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        # A connection that asyncio accepts in the turn in which its server closes is leaked (Python 3.11 asserts in
        # Server._attach): accept none any more, let those just accepted be set up, and then close.
        for sock in server.sockets:
            self._loop.remove_reader(sock.fileno())
        for _ in range(3):
            await asyncio.sleep(0)
        server.close()
        # A connection just accepted has a task that has not begun; cancelled now, it would never close its writer.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(others, timeout=0.02)
        for _ in range(3):  # transports tell their protocols of the end in the loop's next turns
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        running: dict[int, asyncio.Task[None]] = {}
        try:
            await self._converse(reader, writer, running)
            # The client may only have closed its sending side: what is being answered is answered to its end.
            await asyncio.gather(*running.values(), return_exceptions=True)
        except ConnectionError:
            pass
        except asyncio.CancelledError:
            writer.transport.abort()  # not close: that waits for the peer to read what is unsent
        finally:
            for each in running.values():
                each.cancel()
            writer.close()  # before anything is awaited: whoever stops the server may cancel us more than once
            await asyncio.gather(*running.values(), return_exceptions=True)
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self.closed.set()
            self._tasks.discard(task)

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, running: dict[int, asyncio.Task[None]]
    ) -> None:
        decoder = FrameDecoder()
        welcome = not self._auth_token
        while data := await reader.read(65_536):
            for event in decoder.feed(data):
                if isinstance(event, Ping):
                    if self._answers_pings:
                        writer.write(PING)
                    continue
                assert isinstance(event, Payload)
                request = decode_request(event.data)
                if request.operation == Operation.HELLO:
                    welcome = welcome or request.auth_token == self._auth_token
                if not welcome:
                    error = PeerError(Code.UNAUTHENTICATED, "auth_token: say hello with it first")
                    writer.write(encode_error(error, request.request_id))
                    return
                if request.operation == Operation.HELLO:
                    writer.write(encode_server_info(request.request_id, pack_server_info(INFO)))
                elif request.operation == Operation.CANCEL:
                    self.cancelled.append(request.request_id)
                    self.was_cancelled.set()
                    if task := running.pop(request.request_id, None):
                        task.cancel()
                        writer.write(encode_last(request.request_id, [], b"", None, Finish.CANCELLED, Usage()))
                else:
                    self.requests.append(request)
                    running[request.request_id] = asyncio.create_task(self._answer(request, writer))

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        what, _, rest = request.messages[-1].decode().partition(" ")
        seed = 99 if request.seed is None else request.seed
        rid = request.request_id

        def tokens(first: int, *texts: str) -> None:
            for i, text in enumerate(texts, first):
                values = [-0.5 * i] if request.logprobs else None
                writer.write(encode_tokens(rid, [i], text.encode(), values, seed if i == 1 else None))

        if what in ("hang", "fail-late", "break"):
            tokens(1, "one ", "two ")
        if what in ("fail", "fail-late"):
            writer.write(encode_error(PeerError(Code[rest], f"told to fail: {rest}", retry_after_ms=1500), rid))
        elif what == "break":
            await writer.drain()
            writer.close()
        elif what == "garbage":
            writer.write(frame(b"\xff\xff\xff"))
        elif what == "endless":
            for i in range(1, 100_000):
                if writer.is_closing():
                    return
                tokens(i, f"{i} ")
                await asyncio.sleep(0.002)
        elif what in ("say", "echo", "flood", "split"):
            words = [word + " " for word in rest.split()]
            if what == "echo":
                words = [repr(request)]
            elif what == "flood":
                words = ["x"] * int(rest)
            elif what == "split":
                data = encode_tokens(rid, [1], "é€😀".encode(), None, seed)
                for byte in data:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0)
                words = []
            tokens(1, *words)
            usage = Usage(prompt_tokens=7, completion_tokens=len(words), queue_us=1000,
                          truncated=len(request.context) > CONTEXT_BYTES)  # fmt: skip
            writer.write(encode_last(rid, [], b"", None, Finish.STOP, usage))
