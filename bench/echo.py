"""Proves that the load generator is not the bottleneck: `python -m bench.echo` drives servers that compute nothing.

They speak zl's frames and server-sent events, send each stream its tokens one frame at a time, all streams in turn, as
fast as the socket takes them. What comes out bounds client and echo server together, on the same cores as a real run.
State: the child process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.clients import Client, FrameClient, SseClient
from bench.drivers.base import HOST, ROOT
from bench.procs import free_port
from bench.scenarios import burst
from zl.tools import prompts
from zl.tools.traces import summarise

KINDS = ("frames", "sse")


class _Echo(asyncio.Protocol):
    """Answer each request with as many tokens as it asks for."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def answer(self, n: int, token: bytes, last: bytes) -> None:
        for _ in range(n):
            if self._transport.is_closing():
                return
            self._transport.write(token)
            await asyncio.sleep(0)  # the other streams' turn: one frame a stream and turn, as a decode step has
        self._transport.write(last)


class _FrameEcho(_Echo):
    def data_received(self, data: bytes) -> None:
        from zl.net import codec, schema_pb2

        self._buffer += data
        while len(self._buffer) >= 4 and len(self._buffer) >= (end := 4 + int.from_bytes(self._buffer[:4], "big")):
            request = codec.decode_request(self._buffer[4:end])
            self._buffer = self._buffer[end:]
            token = codec.encode_tokens(request.request_id, [1234], b" word", [], None)
            done = schema_pb2.Response(request_id=request.request_id, is_finished=True).SerializeToString()
            last = len(done).to_bytes(4, "big") + done
            asyncio.ensure_future(self.answer(request.max_tokens, token, last))  # noqa: RUF006 (the loop outlives it)


class _SseEcho(_Echo):
    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found or len(rest) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        self._buffer = b""
        n = json.loads(rest)["max_tokens"]
        # As long as vLLM's chunks are.
        event = b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":'
        event += b'1790000000,"model":"model","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
        event += b'"finish_reason":null,"token_ids":null}]}\n\n'
        token = b"%x\r\n%s\r\n" % (len(event), event)
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % n
        end = usage + b"data: [DONE]\n\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        last = b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end)
        asyncio.ensure_future(self.answer(n, token, last))  # noqa: RUF006 (the loop outlives it)


async def serve_echo(kind: str, port: int) -> None:
    """Serve until the process is ended."""
    made = _FrameEcho if kind == "frames" else _SseEcho
    server = await asyncio.get_running_loop().create_server(made, HOST, port, backlog=1024)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


async def prove(kind: str, streams: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Drive an echo server in another process; return each round's figures, the client's CPU a token among them."""
    port = free_port()
    argv = [sys.executable, "-m", "bench.echo", "--serve", kind, "--port", str(port)]
    child = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
    client: Client = FrameClient(HOST, port) if kind == "frames" else SseClient(HOST, port, "model", "penalty", {})
    found = []
    try:
        assert child.stdout is not None
        child.stdout.readline()
        for number in range(rounds + 1):
            own = time.process_time()
            traces = await burst(client, prompts.burst(streams, tokens, number), streams)
            own = time.process_time() - own
            figures = summarise(traces)
            if number:  # the first warms up
                found.append(figures | {"client_us_per_token": own * 1e6 / figures["tokens"]})
    finally:
        await client.close()
        child.terminate()
        child.wait()
    return found


def main() -> None:
    """Serve (the child), or measure and print one line a kind and round."""
    parser = argparse.ArgumentParser(prog="python -m bench.echo", description=__doc__)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve_echo(args.serve, args.port))
        return
    kept = {}
    for kind in KINDS:
        kept[kind] = uvloop.run(prove(kind, args.streams, args.tokens, args.rounds))
        for figures in kept[kind]:
            print(
                f"{kind}: {figures['tokens_per_s']:.0f} tokens/s over {args.streams} streams, "
                f"client {figures['client_us_per_token']:.1f} µs CPU a token, failed {figures['failed']}"
            )
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
