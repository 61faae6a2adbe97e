"""Serving figures of zl and its peers, in alternating rounds in one run: `python -m bench.serve --help`.

All servers are started once and stay up; while one is measured the others are idle, or stopped by SIGSTOP where idling
costs them CPU. Writes one JSON, one table and plots. State: the servers that it started, which it also ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench import procs, report
from bench.drivers import Driver, MissingPeerError, Plan, driver, known
from bench.drivers.base import ROOT
from bench.procs import Server, free_port
from bench.scenarios import POISSON_SHARE, SCENARIOS, Scenario, Size, capacity
from bench.stats import alternating
from zl.ops import descriptors
from zl.tools.prompts import Prompt
from zl.tools.traces import summarise

CACHE = Path.home() / ".cache/zl"
DEFAULT_GGUF = CACHE / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
START_PATIENCE_S = 600.0
IDLE_LIMIT = 0.02
"""CPU seconds a second above which an idle server is stopped by SIGSTOP between its rounds."""
SAMPLE_S = 0.25
SETTLE_S, SETTLE_LOOK_S = 10.0, 0.5
"""How long a server may burn on behind its last answer before the next system's turn, and how often that is seen."""


class Subject:
    """One system during a run: its driver, server, client, and what was noted of it."""

    def __init__(self, one: Driver, plan: Plan, logs: Path):
        self.driver = one
        self._plan, self._logs = plan, logs
        self.port = 0
        self.server: Server | None = None
        self.client: Any = None
        self.notes: dict[str, Any] = {"versions": one.versions(), "startup_s": []}
        self.must_pause = False

    async def start(self) -> None:
        """Start the server and note the time from its exec to the first token that a client gets."""
        self.port = free_port()
        argv, env = self.driver.command(self._plan, self.port)
        self.notes["command"] = [_shown(arg) for arg in argv]
        self.notes["environment"] = {k: _shown(v) for k, v in env.items() if os.environ.get(k) != v and k != "PATH"}
        log = self._logs / f"{self.driver.name}.log"
        self.server = Server(self.driver.name, argv, env, log)
        self.client = self.driver.client(self.port)
        hello = Prompt("", ("Hello",), 1)
        while True:
            self.server.check()
            with contextlib.suppress(OSError):
                await self.client.connect(1)
                trace = await self.client.ask(hello, 0)
                if trace.arrivals and not trace.error:
                    self.notes["startup_s"].append(trace.arrivals[0] - self.server.started)
                    return
            await self.client.close()
            if time.perf_counter() - self.server.started > START_PATIENCE_S:
                raise RuntimeError(f"{self.driver.name} gave no token in {START_PATIENCE_S:g} s; see its log {log}")
            await asyncio.sleep(0.02)

    async def note_idling(self) -> None:
        """See what the server burns with nothing to do, and decide whether to stop it between its rounds."""
        assert self.server is not None
        await asyncio.sleep(1.0)
        pids = self.server.pids()
        before = procs.cpu_seconds(pids)
        await asyncio.sleep(1.0)
        share = procs.cpu_seconds(pids) - before
        self.must_pause = share > IDLE_LIMIT
        self.notes |= {"idle_cpu_share": share, "stopped_between_rounds": self.must_pause}

    async def rest(self) -> None:
        """Get out of the way: stopped, or when nothing is left of the work (vLLM burns on for a second)."""
        assert self.server is not None
        if self.must_pause:
            self.server.pause()
            return
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            before = procs.cpu_seconds(self.server.pids())
            await asyncio.sleep(SETTLE_LOOK_S)
            if procs.cpu_seconds(self.server.pids()) - before <= IDLE_LIMIT * SETTLE_LOOK_S:
                return

    async def stop(self) -> None:
        """End client and server."""
        if self.client is not None:
            await self.client.close()
        if self.server is not None:
            self.server.stop()
            self.server = None


def _shown(text: str) -> str:
    """Leave this machine's folders out of what is kept."""
    return text.replace(sys.prefix, "./.venv").replace(str(ROOT), ".").replace(str(Path.home()), "~")


async def measure(subject: Subject, scenario: Scenario, size: Size, seed: int) -> dict[str, Any]:
    """Run one round of one system; return its figures."""
    server = subject.server
    assert server is not None
    server.check()
    server.resume()
    pids = server.pids()
    server.peak_bytes = 0
    counted = subject.driver.counts(subject.port)
    sampling = asyncio.ensure_future(_sample(server))
    threads, own = procs.cpu_by_thread(pids), time.process_time()
    before = procs.cpu_seconds(pids)
    outcome = await scenario.run(subject.client, size, seed)
    own = time.process_time() - own
    spent, after = procs.cpu_seconds(pids) - before, procs.cpu_by_thread(pids)
    sampling.cancel()
    server.sample()
    figures = summarise(outcome.traces) | outcome.extra
    figures |= {name: n - counted[name] for name, n in subject.driver.counts(subject.port).items()}
    by_thread = {name: round(s - threads.get(name, 0.0), 2) for name, s in after.items()}
    return figures | {
        "cpu_s": spent,
        "cpu_by_thread_s": {name: s for name, s in sorted(by_thread.items()) if s > 0},
        "rss_peak_bytes": server.peak_bytes,
        "pss_bytes": procs.proportional_bytes(server.pids()),
        "client_cpu_s": own,
    }


async def _sample(server: Server) -> None:
    while True:
        server.sample()
        await asyncio.sleep(SAMPLE_S)


async def run(args: argparse.Namespace, logs: Path) -> list[dict[str, Any]]:
    """Start all, then for each scenario warm up and measure round by round; end all; return a result a scenario."""
    sizes = {name: size_of(args, name) for name in args.scenario}
    streams = max(max(size.streams, 256 if name == "poisson" else 0) for name, size in sizes.items())
    row_tokens = max(SCENARIOS[name].row_tokens(size) for name, size in sizes.items())
    plan = Plan(args.gguf, args.hf_folder, streams, row_tokens, args.threads)
    subjects = {name: Subject(driver(name), plan, logs) for name in args.systems}
    try:
        for name, subject in subjects.items():
            for _ in range(args.startups - 1):
                await subject.start()
                await subject.stop()
            await subject.start()
            say(f"{name}: first token {subject.notes['startup_s'][-1]:.1f} s after its start")
            await subject.rest()
        return [await compare(args, SCENARIOS[name], size, subjects) for name, size in sizes.items()]
    finally:
        for subject in subjects.values():
            await subject.stop()


async def compare(
    args: argparse.Namespace, scenario: Scenario, size: Size, subjects: dict[str, Subject]
) -> dict[str, Any]:
    """Measure one scenario on servers that are up; return the result."""
    result = header(args, scenario.name, size)
    rates: dict[str, float] = {}
    for name, subject in subjects.items():
        assert subject.server is not None
        subject.server.resume()
        warm = dataclasses.replace(size, rate=size.rate or 4.0, arrivals_s=4.0)
        await scenario.run(subject.client, warm, args.seed + 9_000)
        if scenario.name == "poisson":
            rates[name] = args.rate or POISSON_SHARE * await capacity(subject.client, size, args.seed + 9_001)
            subject.notes["capacity_per_s"] = rates[name] / POISSON_SHARE
        await subject.note_idling()
        if size.idle:
            await subject.client.connect(size.streams + size.idle)
        await subject.rest()
    for number, name in alternating(args.systems, args.rounds):
        sized = dataclasses.replace(size, rate=rates.get(name, 0.0))
        figures = await measure(subjects[name], scenario, sized, args.seed + number)
        await subjects[name].rest()
        result["rounds"].append({"round": number, "system": name, **figures})
        say(f"{scenario.name}: {report.line(number, name, figures)}")
    result["systems"] = {name: dict(subject.notes) for name, subject in subjects.items()}
    return result


def header(args: argparse.Namespace, scenario: str, size: Size) -> dict[str, Any]:
    """Put down what was measured, where and when."""
    machine = subprocess.run(
        [sys.executable, "-m", "bench.machine", "--threads", str(args.threads), "--seconds", str(args.machine_seconds)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    settings = dataclasses.asdict(size) | {"prompts": size.prompts.name, "threads": args.threads, "seed": args.seed}
    return {
        "scenario": scenario,
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": json.loads(machine.stdout),
        "settings": settings | {"rounds": args.rounds, "model": args.gguf.name},
        "order": list(args.systems),
        "rounds": [],
    }


def git(*words: str) -> str:
    """Ask git; empty where there is no repository or no commit."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def say(text: str) -> None:
    """Tell progress on stderr; stdout is for the table."""
    print(text, file=sys.stderr, flush=True)


def size_of(args: argparse.Namespace, scenario: str) -> Size:
    """Take what was said and the scenario's own figures for the rest."""
    s = SCENARIOS[scenario]
    return Size(
        streams=args.streams or s.streams,
        tokens=args.tokens or s.tokens,
        per_stream=args.per_stream or s.per_stream,
        idle=(args.idle if args.idle is not None else 10_000) if s.name == "idle" else 0,
        arrivals_s=args.arrivals_seconds,
        prompts=args.prompts,
    )


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.serve", description="Compare servers in alternating rounds.")
    p.add_argument("--systems", type=lambda s: s.split(","), default=["zl", "vllm"], help=f"of {', '.join(known())}")
    p.add_argument("--scenario", type=lambda s: s.split(","), default=["full"], help=f"of {', '.join(SCENARIOS)}")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--streams", type=int, help="default: the scenario's")
    p.add_argument("--tokens", type=int, help="tokens of an answer; default: the scenario's")
    p.add_argument("--per-stream", type=int, help="answers that a stream asks for, one after the other")
    p.add_argument("--idle", type=int, help="silent connections of the scenario idle (10000)")
    p.add_argument("--rate", type=float, default=0.0, help="Poisson arrivals a second for all; default: 70%% of own")
    p.add_argument("--arrivals-seconds", type=float, default=20.0, help="length of the Poisson stream")
    p.add_argument("--startups", type=int, default=1, help="how often to start each server for its start-up time")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--gguf", type=Path, default=DEFAULT_GGUF)
    p.add_argument("--hf-folder", type=Path, help="the same weights for peers; made from the GGUF where it is missing")
    p.add_argument("--prompts", type=Path, default=ROOT / "tests/data/chat.jsonl", help="for the scenario mixed")
    p.add_argument("--machine-seconds", type=float, default=1.0, help="time for each of the machine's figures")
    p.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder that takes the result")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0: measured, 1: a system could not be measured, 2: bad arguments."""
    p = parser()
    args = p.parse_args(argv)
    strange = [name for name in args.systems if name not in known()]
    if strange:
        p.error(f"no system is called {strange[0]!r}; there are {', '.join(known())}")
    strange = [name for name in args.scenario if name not in SCENARIOS]
    if strange:
        p.error(f"no scenario is called {strange[0]!r}; there are {', '.join(SCENARIOS)}")
    if not args.gguf.exists():
        p.error(f"{args.gguf} is not there; `make pull` fetches the embedded model, --gguf names another")
    descriptors.raise_limit()  # idle connections are files, here and in the servers, which inherit it
    args.out.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    logs = CACHE / "bench/logs" / stamp
    logs.mkdir(parents=True, exist_ok=True)
    try:
        args.hf_folder = hf_folder(args)
        results = uvloop.run(run(args, logs))
    except (MissingPeerError, RuntimeError, ValueError) as error:
        print(f"bench.serve: {error}", file=sys.stderr)
        return 1
    for result in results:
        path = args.out / f"{stamp}-{result['scenario']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(report.table(result))
        say(f"written: {', '.join(str(p) for p in report.write(path))}")
    return 0


def hf_folder(args: argparse.Namespace) -> Path:
    """Find the bf16 folder for peers; make it from the GGUF where a system needs it and it is missing."""
    folder: Path = args.hf_folder or CACHE / "bench" / f"{args.gguf.stem}-bf16"
    wants = any(name.startswith(("vllm", "transformers")) for name in args.systems)
    if wants and not (folder / "tokenizer_config.json").exists():
        say(f"making {folder} from {args.gguf.name}")
        subprocess.run(
            [sys.executable, "-m", "bench.hf_folder", str(args.gguf), str(folder)], cwd=ROOT, check=True
        )
    return folder


if __name__ == "__main__":
    sys.exit(main())
