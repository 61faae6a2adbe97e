"""Bit-for-bit determinism of a real server: alone, crowded in random orders with cancels, after a restart.

    python -m bench.determinism [--requests 200] [--orders 5] [--concurrency 256] [--model PATH|NAME]

Every request of tests/data/chat.jsonl, repeated with other seeds, profiles and lengths, is served alone first; its
tokens, logprobs (as float bits) and text are the reference. Then the same requests arrive in random orders with up to
`--concurrency` of them in flight while others are cancelled beside them, then once more after a restart. Prints counts
and ends with status 1 if a single bit differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zl.client import AsyncClient

PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "chat.jsonl"
PROFILES = ("CHAT", "SUMMARIZE", "CREATIVE")


def make_requests(n: int, seed: int, most_tokens: int) -> list[dict[str, Any]]:
    """Mix prompts, seeds, profiles, lengths, own sampling values and greedy requests, decided by `seed` alone."""
    rng = random.Random(seed)
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    made = []
    for i in range(n):
        prompt = prompts[i % len(prompts)]
        options: dict[str, Any] = {
            "messages": prompt["messages"],
            "system": prompt["system"],
            "type": PROFILES[i % 3],
            "seed": rng.getrandbits(64),
            "max_tokens": rng.randrange(1, most_tokens + 1),
            "ignore_eos": rng.random() < 0.5,
            "logprobs": True,
        }
        if rng.random() < 0.2:
            options["temperature"] = rng.choice([0.0, 0.5, 1.3])
            options["top_p"] = rng.choice([0.3, 0.9, 1.0])
        made.append(options)
    return made


def fingerprint(answer: Any) -> bytes:
    """The answer's tokens, the bits of its logprobs, and its text."""
    ids, logprobs = answer.token_ids, answer.logprobs
    return struct.pack(f"<{len(ids)}i{len(logprobs)}f", *ids, *logprobs) + answer.text.encode()


async def ask(client: AsyncClient, request: dict[str, Any]) -> bytes:
    """Serve one request to its end."""
    options = dict(request)
    return fingerprint(await client.ask(options.pop("messages"), **options))


async def alone(address: str, requests: list[dict[str, Any]]) -> list[bytes]:
    """Serve the requests one after the other."""
    async with AsyncClient(address, timeout=600) as client:
        return [await ask(client, request) for request in requests]


async def crowded(
    address: str, requests: list[dict[str, Any]], concurrency: int, seed: int
) -> tuple[list[bytes], int]:
    """Serve them in a random order, `concurrency` in flight, with other requests cancelled beside them."""
    rng = random.Random(seed)
    order = list(range(len(requests)))
    rng.shuffle(order)
    results: list[bytes] = [b""] * len(requests)
    places = asyncio.Semaphore(concurrency)
    cancelled = 0

    async with AsyncClient(address, timeout=600) as client:

        async def wanted(i: int) -> None:
            async with places:
                results[i] = await ask(client, requests[i])

        async def unwanted(request: dict[str, Any], n_chunks: int) -> None:
            nonlocal cancelled
            options = {**request, "seed": 1, "max_tokens": 64, "ignore_eos": True}
            async with places:
                async with client.stream(options.pop("messages"), **options) as stream:
                    for _ in range(n_chunks):
                        await stream.__anext__()
                cancelled += 1

        tasks = []
        for i in order:
            tasks.append(asyncio.ensure_future(wanted(i)))
            if rng.random() < 0.25:
                tasks.append(asyncio.ensure_future(unwanted(rng.choice(requests), rng.randrange(4))))
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() * 0.2)
        await asyncio.gather(*tasks)
    return results, cancelled


class Server:
    """A `zl serve` of our own on a Unix socket."""

    def __init__(self, folder: Path, flags: list[str]):
        self.address = f"unix:{folder / 'zl.sock'}"
        self._log = folder / "zl.log"
        command = [sys.executable, "-m", "zl", "serve", "--listen", self.address, "--metrics", "off", *flags]
        with self._log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ.copy())
        while "zl: listening on" not in self._log.read_text():
            if self._process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{self._log.read_text()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it and check that it ended well."""
        self._process.terminate()
        if self._process.wait(timeout=60):
            raise SystemExit(f"the server ended badly:\n{self._log.read_text()}")


def differences(reference: list[bytes], found: list[bytes]) -> list[int]:
    """Indices of the requests whose answers are not equal to the last bit."""
    return [i for i, (a, b) in enumerate(zip(reference, found, strict=True)) if a != b]


def run(n_requests: int, n_orders: int, concurrency: int, most_tokens: int, flags: list[str]) -> int:
    """Compare everything; return the number of answers that differ."""
    requests = make_requests(n_requests, 7, most_tokens)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), flags)
        begun = time.monotonic()
        reference = asyncio.run(alone(server.address, requests))
        print(f"alone: {n_requests} requests in {time.monotonic() - begun:.1f} s", flush=True)
        for order in range(n_orders):
            begun = time.monotonic()
            found, cancelled = asyncio.run(crowded(server.address, requests, concurrency, order))
            bad = differences(reference, found)
            wrong += len(bad)
            print(
                f"order {order + 1}: {n_requests - len(bad)} of {n_requests} equal to the last bit, up to "
                f"{concurrency} in flight, {cancelled} others cancelled, {time.monotonic() - begun:.1f} s "
                f"{bad[:8] or ''}",
                flush=True,
            )
        server.stop()
        server = Server(Path(folder), flags)
        found, cancelled = asyncio.run(crowded(server.address, requests, concurrency, n_orders))
        bad = differences(reference, found)
        wrong += len(bad)
        print(
            f"after a restart: {n_requests - len(bad)} of {n_requests} equal to the last bit, "
            f"{cancelled} others cancelled {bad[:8] or ''}",
            flush=True,
        )
        server.stop()
    print(f"determinism: {wrong} of {n_requests * (n_orders + 1)} answers differ", flush=True)
    return wrong


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--most-tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    flags = ["--model", args.model, "--dtype", args.dtype]
    return 1 if run(args.requests, args.orders, args.concurrency, args.most_tokens, flags) else 0


if __name__ == "__main__":
    raise SystemExit(main())
