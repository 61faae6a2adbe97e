"""Prove that serving allocates nothing that lasts: `python -m bench.alloc --model FILE`; exit status 1 where it does.

A whole server runs in this process under tracemalloc, with clients beside it. After a warm-up: what the files of the
engine side hold alive, the addresses of every fixed buffer, the mapped and the resident memory are taken, at even
distances, while requests of mixed lengths come, some of them cancelled. State: the server that it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

import zl
from zl.address import parse_address
from zl.build import prepare
from zl.client import AsyncClient
from zl.config import load
from zl.net.listen import bind_all
from zl.phases import Phases
from zl.server import Server, open_build

ROOT = Path(zl.__file__).parent
WATCHED = ("gpu/loop.py", "gpu/pinned.py", "gpu/arena.py", "gpu/guard.py", "gpu/heartbeat.py", "gpu/native/*.py")
"""The files of the engine thread and of the fixed buffers."""

LASTING_BYTES = 16_384
"""What these files may hold more at the end than after the warm-up: numbers in counters, and recycled objects, which
tracemalloc books where their memory was first taken. One object a request would be 560,000 bytes after 10,000."""

SLOPE_BYTES = 512
"""Growth of resident memory a request that is still taken for the noise of Python's own heap."""


@dataclass
class Sample:
    """Memory at one moment, in bytes."""

    requests: int
    resident: int
    mapped: int


@dataclass
class Outcome:
    """What a run found."""

    requests: int
    cancelled: int
    lasting: dict[str, int]  # by watched file, bytes alive more than after the warm-up
    moved: list[str]  # fixed buffers whose address changed
    samples: list[Sample] = field(default_factory=list)

    @property
    def slope(self) -> float:
        """Fit the growth of resident memory in the samples, bytes a request."""
        x = np.array([s.requests for s in self.samples], float)
        return float(np.polyfit(x, np.array([s.resident for s in self.samples], float), 1)[0])

    @property
    def mapped_growth(self) -> int:
        """Give how much more is mapped at the end than after the warm-up."""
        return self.samples[-1].mapped - self.samples[0].mapped

    @property
    def proved(self) -> bool:
        """Tell whether nothing that lasts was allocated."""
        return sum(self.lasting.values()) <= LASTING_BYTES and not self.moved and self.slope <= SLOPE_BYTES

    def lines(self) -> list[str]:
        """Say it."""
        held = ", ".join(f"{name} {size:+d} B" for name, size in self.lasting.items())
        first, last = self.samples[0], self.samples[-1]
        return [
            f"requests: {self.requests}, of which {self.cancelled} cancelled",
            f"alive more than after the warm-up: {held}",
            f"fixed buffers that moved: {', '.join(self.moved) or 'none'}",
            f"resident: {first.resident / 2**20:.2f} MiB, at the end {last.resident / 2**20:.2f} MiB, "
            f"slope {self.slope:+.1f} B a request (clients and tracemalloc included)",
            f"mapped: {self.mapped_growth:+d} B",
            "proved: nothing that lasts was allocated" if self.proved else "NOT proved",
        ]


def sample(requests: int) -> Sample:
    """Read this process's memory."""
    mapped, resident = Path("/proc/self/statm").read_text().split()[:2]
    return Sample(requests, int(resident) * os.sysconf("SC_PAGE_SIZE"), int(mapped) * os.sysconf("SC_PAGE_SIZE"))


def alive() -> dict[str, int]:
    """Sum the live allocations of the watched files, by file; a pattern is one figure."""
    gc.collect()
    filters = [tracemalloc.Filter(True, str(ROOT / name)) for name in WATCHED]
    found = tracemalloc.take_snapshot().filter_traces(filters).statistics("filename")
    sizes = {str(Path(s.traceback[0].filename).relative_to(ROOT)): s.size for s in found}
    return {name: sum(size for file, size in sizes.items() if Path(file).match(name)) for name in WATCHED}


def buffers(server: Server, columns: object, slots: Sequence[object]) -> Iterator[tuple[str, int]]:
    """List every fixed buffer and its address."""
    for owner in (columns, *slots, server.rows):
        for name, value in vars(owner).items():
            if isinstance(value, np.ndarray):
                yield f"{type(owner).__name__}.{name}", value.ctypes.data


async def drive(address: str, n: int, seed: int, streams: int) -> int:
    """Send n requests over `streams` connections; every twentieth is cancelled. Returns how many were."""
    numbers = iter(range(n))
    cancelled = 0

    async def one() -> None:
        nonlocal cancelled
        async with AsyncClient(address, timeout=600) as client:
            for i in numbers:
                rng = random.Random(seed * 1_000_003 + i)
                text = " ".join(f"word{rng.randrange(999)}" for _ in range(rng.randrange(1, 12)))
                stream = client.stream(
                    text, system="You are terse.", max_tokens=rng.randrange(1, 6), ignore_eos=True,
                    seed=i, logprobs=i % 3 == 0, temperature=rng.choice((0.0, 0.7)),
                )  # fmt: skip
                async for _ in stream:
                    if i % 20 == 7:
                        stream.cancel()
                        cancelled += 1
                        break

    await asyncio.gather(*(one() for _ in range(streams)))
    return cancelled


async def run(args: argparse.Namespace) -> Outcome:
    """Serve, warm up, measure."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/zl.sock"
        settings = load(
            {
                "listen": address, "metrics": "off", "model": str(args.model), "max_rows": args.rows,
                "max_model_len": 512, "kv_memory": "64MiB", "heartbeat_s": 2.0, "threads": args.threads,
            },
            environ={},
        )  # fmt: skip
        build = prepare(settings, args.model, lambda _: None)
        opened = open_build(build, print)
        server = Server(build, opened)
        try:
            await server.start(bind_all([parse_address(address)]), None, Phases())
            warm = max(2 * args.rows, args.requests // 5)
            tracemalloc.start()
            await drive(address, warm, 1, args.rows)
            before, places = alive(), dict(buffers(server, opened.columns, opened.slots))
            outcome = Outcome(args.requests, 0, {}, [], [sample(0)])
            for part in range(args.parts):
                n = args.requests // args.parts
                outcome.cancelled += await drive(address, n, 2 + part, args.rows)
                gc.collect()
                outcome.samples.append(sample((part + 1) * n))
            while server.rows.in_use:
                await asyncio.sleep(0.01)
            after = alive()
            outcome.lasting = {name: after[name] - before[name] for name in WATCHED}
            outcome.moved = [name for name, at in buffers(server, opened.columns, opened.slots) if places[name] != at]
            return outcome
        finally:
            tracemalloc.stop()
            server.stop()
            await server.wait()
            await server.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.alloc", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--parts", type=int, default=10, help="samples of the memory")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or Hugging Face folder")
    args = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(run(args))
    print("\n".join(outcome.lines()))
    return 0 if outcome.proved else 1


if __name__ == "__main__":
    sys.exit(main())
