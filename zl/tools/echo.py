"""A server that computes nothing: each request gets its tokens, a frame each, as fast as the socket takes them.

One turn of its loop is like a step of the real server's: a token for every stream, one joined write for every
connection. It shows what a load generator can count at most. Run as `python -m zl.tools.echo PATH`.
State: the answers that are running, by connection. Refuses the server's own parts but the codec.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import uvloop

from zl.errors import Finish
from zl.net.codec import decode_request, encode_last, encode_tokens
from zl.net.frames import PING, FrameDecoder, Payload, Ping
from zl.net.messages import Operation, Usage


class _Peer(asyncio.Protocol):
    def __init__(self, turns: _Turns):
        self._turns = turns
        self._decoder = FrameDecoder()
        self._transport: Any = None
        self._paused = False
        self._left: dict[int, int] = {}  # request id to tokens to come
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # its token frame and its last

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._left.clear()
        self._turns.stop(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def eof_received(self) -> bool:
        return True

    def data_received(self, data: bytes) -> None:
        for event in self._decoder.feed(data):
            if isinstance(event, Ping):
                self._transport.write(PING)
            elif isinstance(event, Payload):
                request = decode_request(event.data)
                rid, n = request.request_id, max(1, request.max_tokens)
                if request.operation != Operation.GENERATE:
                    continue
                usage = Usage(prompt_tokens=sum(map(len, request.messages)), completion_tokens=n)
                self._frames[rid] = (
                    encode_tokens(rid, [1234], b" word"),
                    encode_last(rid, [1234], b" word", None, Finish.LENGTH, usage),
                )
                self._left[rid] = n
                self._turns.go(self)

    def turn(self) -> None:
        """Send one token of each running answer."""
        if self._paused:
            return
        out = []
        for rid, left in list(self._left.items()):
            token, last = self._frames[rid]
            if left > 1:
                self._left[rid] = left - 1
                out.append(token)
            else:
                del self._left[rid], self._frames[rid]
                out.append(last)
        self._transport.write(b"".join(out))  # wire
        if not self._left:
            self._turns.stop(self)


class _Turns:
    """Gives every connection with running answers its turn, over and over, while there are any."""

    def __init__(self) -> None:
        self._peers: set[_Peer] = set()
        self._scheduled = False

    def go(self, peer: _Peer) -> None:
        self._peers.add(peer)
        self._schedule()

    def stop(self, peer: _Peer) -> None:
        self._peers.discard(peer)

    def _schedule(self) -> None:
        if self._peers and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        for peer in list(self._peers):
            peer.turn()
        self._schedule()


async def serve(path: str) -> None:
    """Serve on a Unix socket until stdin ends or the process is ended; says `ready` on stdout first."""
    turns = _Turns()
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _Peer(turns), path, backlog=1024)
    over = asyncio.Event()
    stdin = sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            over.set()

    loop.add_reader(stdin, read)
    print("ready", flush=True)
    async with server:
        await over.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
