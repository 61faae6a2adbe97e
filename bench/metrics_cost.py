"""What watching costs: tokens/s while /metrics is scraped every second, beside a server with `--metrics off`.

`python -m bench.metrics_cost [--streams 128] [--tokens 48] [--rounds 5]`: two servers of this checkout, stopped by
SIGSTOP while the other is measured, in alternating rounds of one run; each ratio is taken within a round. Two processes
of the same program may differ by where their memory lies, so the watched one is measured without scrapes too: that
ratio is the cost of a scrape alone. The counters are kept in any case; what they cost a step is measured apart, by
calling them. Owns the two servers. Prints a line a round and JSON at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import timeit
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench.procs import Server, free_port
from bench.serve import DEFAULT_GGUF
from bench.stats import alternating, ratios
from zl.client.errors import ConnectionFailed
from zl.histogram import Histogram
from zl.measures import PART_BUCKETS, START, EngineTimes, Landing, Measures
from zl.tools import prompts
from zl.tools.load import Streams, burst
from zl.tools.traces import summarise

START_PATIENCE_S = 120.0
OFF, IDLE, ON = "off", "unscraped", "scraped"
"""Metrics off; the port open and nobody there; the same server, scraped."""


class Scraper:
    """Read a server's figures every `every_s` seconds on a thread, as Prometheus would, between `start` and `stop`."""

    def __init__(self, port: int, every_s: float):
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._every_s = every_s
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.seconds: list[float] = []
        self.n_bytes = 0

    def scrape(self) -> None:
        """Read them once, and note how long that took."""
        begun = time.perf_counter()
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            self.n_bytes = len(answer.read())
        self.seconds.append(time.perf_counter() - begun)

    def start(self) -> None:
        """Begin, with a scrape at once."""
        self._ending.clear()
        self._thread = threading.Thread(target=self._run, name="scraper")
        self._thread.start()

    def stop(self) -> None:
        """End after the scrape at hand."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ending.is_set():
            self.scrape()
            due += self._every_s
            self._ending.wait(max(0.0, due - time.monotonic()))


class Subject:
    """One server with its streams, and its scraper where it has one."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace):
        address = f"unix:{folder / name}.sock"
        port = free_port()
        metrics = f"127.0.0.1:{port}" if name == ON else "off"
        command = [sys.executable, "-m", "zl", "serve", "--model", str(args.gguf), "--listen", address]
        self.server = Server(name, [*command, "--metrics", metrics], os.environ, folder / f"{name}.log")
        self.streams = Streams(address)
        self.scraper = Scraper(port, args.every) if name == ON else None

    async def ready(self, n: int) -> None:
        """Wait until it has answered, and open all connections; they are taken before the server is ready."""
        while True:
            self.server.check()
            with contextlib.suppress(ConnectionFailed):
                await self.streams.connect(n)
                first = await self.streams.ask(prompts.Prompt("", ("Hello",), 1), 0)
                if not first.error:
                    return
            if time.perf_counter() - self.server.started > START_PATIENCE_S:
                raise RuntimeError(f"{self.server.name}: no answer in {START_PATIENCE_S:g} s; see {self.server.log}")
            await asyncio.sleep(0.05)

    async def measure(self, asked: Sequence[prompts.Prompt], streams: int, *, scraped: bool) -> dict[str, Any]:
        """Run one round."""
        self.server.resume()
        scraper = self.scraper if scraped else None
        if scraper is not None:
            scraper.start()
        try:
            return summarise(await burst(self.streams, asked, streams))
        finally:
            if scraper is not None:
                await asyncio.to_thread(scraper.stop)
            self.server.pause()


def bookkeeping_ns(n: int = 20_000) -> dict[str, float]:
    """Time what is kept whether or not anybody scrapes: one observation, and a step's bookkeeping on either thread."""
    histogram, times, measures = Histogram(PART_BUCKETS), EngineTimes(time.perf_counter_ns()), Measures()
    measures.decoding["CHAT"] = 128
    clock = time.perf_counter_ns

    def engine_step() -> None:
        times.scheduled(clock())
        times.watched(clock())
        times.moment()
        times.scheduled(clock())
        times.replayed(clock())
        times.scheduled(clock())
        times.replayed(clock())
        times.landed(100_000, 1_000, 1_000)
        times.landing(clock())

    def loop_step() -> None:
        stamps = [clock() for _ in range(5)]
        landing = Landing(START, stamps[1], stamps[2], stamps[3], stamps[4], clock())
        measures.step(landing, measures.decoding.copy(), (), ())

    works = {"observe": lambda: histogram.observe(0.003), "engine_step": engine_step, "loop_step": loop_step}
    return {name: min(timeit.repeat(work, number=n, repeat=5)) / n * 1e9 for name, work in works.items()}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure round by round; return the result."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # or its servers would outlive it
    with tempfile.TemporaryDirectory(prefix="zl-cost-") as name, contextlib.ExitStack() as stack:
        subjects = {}
        for label in (OFF, ON):
            subjects[label] = Subject(label, Path(name), args)
            stack.callback(subjects[label].server.stop)
            await subjects[label].ready(args.streams)
            warmup = prompts.burst(args.streams, 4, 0, args.words)
            await subjects[label].measure(warmup, args.streams, scraped=label == ON)
        speeds: dict[str, list[float]] = {OFF: [], IDLE: [], ON: []}
        scraper = subjects[ON].scraper
        assert scraper is not None
        scraper.seconds.clear()
        for number, label in alternating((OFF, IDLE, ON), args.rounds):
            asked = prompts.burst(args.streams, args.tokens, args.seed + number, args.words)
            if number % 2:  # the other way round, so that none always follows the same one
                label = {OFF: ON, ON: OFF}.get(label, label)
            subject = subjects[OFF if label == OFF else ON]
            figures = await subject.measure(asked, args.streams, scraped=label == ON)
            if figures["failed"]:
                raise RuntimeError(f"{label}: {figures['failed']} requests failed: {figures['errors']}")
            speeds[label].append(figures["tokens_per_s"])
            print(f"round {number} {label:<9} {figures['tokens_per_s']:9.1f} tokens/s, "
                  f"p99 gap {1e3 * figures['gap_s']['p99']:.1f} ms", flush=True)  # fmt: skip
        for subject in subjects.values():
            await subject.streams.close()
            subject.server.resume()
    return {
        "streams": args.streams,
        "tokens": args.tokens,
        "words": args.words,
        "tokens_per_s": speeds,
        "ratio": ratios(speeds[ON], speeds[OFF]),
        "scrape_ratio": ratios(speeds[ON], speeds[IDLE]),
        "spread_off": max(speeds[OFF]) / min(speeds[OFF]) - 1,
        "scrapes": len(scraper.seconds),
        "scrape_ms_median": 1e3 * statistics.median(scraper.seconds),
        "scrape_bytes": scraper.n_bytes,
        "bookkeeping_ns": bookkeeping_ns(),
    }


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.metrics_cost", description="Tokens/s scraped, beside unwatched.")
    p.add_argument("--streams", type=int, default=128)
    p.add_argument("--tokens", type=int, default=48)
    p.add_argument("--words", type=int, default=12, help="of a prompt: short, so that a round is mostly decoding")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--every", type=float, default=1.0, help="seconds between two scrapes")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--gguf", type=Path, default=DEFAULT_GGUF)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = parser().parse_args(argv)
    result = uvloop.run(run(args))
    for what, key in (("scraped / off", "ratio"), ("scraped / unscraped", "scrape_ratio")):
        ratio = result[key]
        print(f"{what}: {ratio['median']:.4f} ({ratio['min']:.4f} to {ratio['max']:.4f})")
    print(f"rounds with metrics off differ among themselves by {100 * result['spread_off']:.1f}%")
    kept = ", ".join(f"{name} {ns:.0f} ns" for name, ns in result["bookkeeping_ns"].items())
    print(f"{result['scrapes']} scrapes of {result['scrape_bytes']} bytes, median {result['scrape_ms_median']:.1f} ms; "
          f"kept all the time: {kept}")  # fmt: skip
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
