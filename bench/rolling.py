"""Blue/green switches, rolling restarts and a killed server under load: what do streaming clients notice?

    python -m bench.rolling [switch-shared switch-haproxy roll-shared roll-haproxy kill] [--clients 64] [--moves 20]

switch-shared   blue and green accept from one listening socket, held by `zl hold`; `zl switch` goes to and fro
switch-haproxy  blue and green behind a real HAProxy with deploy/haproxy/haproxy.cfg; `zl switch` goes to and fro
roll-shared     both accept from the one socket; `zl switch --roll` restarts them in turn
roll-haproxy    three servers behind HAProxy; `zl switch --roll` restarts them in turn
kill            three servers behind HAProxy, one of them killed with SIGKILL and started again later

Every answer is compared, token by token, with what that server says to the request when nobody else asks. Ends with
status 1 if a client noticed what it must not. Needs haproxy, and torch for making the tiny models.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.fleet import ROOT, HAProxy, Holder, Instance, make_artifacts, write_switch_file
from bench.procs import free_port
from bench.streams import Load, Stream, Verdict, make_requests
from zl.client import StreamBroken
from zl.tools.haproxy import Runtime

SCENARIOS = ("switch-shared", "switch-haproxy", "roll-shared", "roll-haproxy", "kill")
NAMES = ("blue", "green", "red")
N_REQUESTS = 16
FLAGS = ("--threads", "1", "--max-rows", "16", "--kv-memory", "64MiB", "--drain-s", "120")


@dataclass(frozen=True)
class Report:
    """What a scenario found. `crossed`: whole answers of a server that were in flight when it was told to drain."""

    name: str
    verdict: Verdict
    n_clients: int
    n_moves: int
    seconds: float
    crossed: int = 0
    broken_as_they_must: int = 0
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Say whether clients noticed nothing but what they must."""
        v = self.verdict
        return not v.failed and not v.wrong and len(v.broken) == self.broken_as_they_must

    def lines(self) -> Iterator[str]:
        """Say it."""
        v = self.verdict
        by = ", ".join(f"{name} {n}" for name, n in v.by.items())
        yield f"{self.name}: {self.n_clients} streaming clients, {self.n_moves} moves in {self.seconds:.0f} s"
        yield f"  {sum(v.by.values())} whole answers ({by}), each equal to its server's own, token by token"
        yield f"  {len(v.failed)} failed requests, {len(v.broken)} broken streams, {len(v.wrong)} wrong answers"
        yield from (f"  {note}" for note in self.notes)
        for each in [*v.failed, *v.broken, *v.wrong][:3]:
            yield f"  such as: after {len(each.tokens)} tokens {type(each.error).__name__}: {each.error}"


class Site:
    """Instances with their references, and what stands before them."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, models: Sequence[Path], haproxy: bool,
                 flags: Sequence[str], tokens: int):  # fmt: skip
        hold = self.runtime = ""
        if not haproxy:
            holder = Holder(folder)
            stack.callback(holder.stop)
            hold, self.address = holder.control, holder.address
        self.instances = [
            Instance(name, folder, model, f"tcp:127.0.0.1:{free_port()}", hold, flags)
            for name, model in zip(NAMES, models, strict=False)
        ]
        for each in self.instances:
            stack.callback(each.stop)
            each.start()
        self.requests = make_requests(N_REQUESTS, tokens)
        self.references = {each.name: each.reference(self.requests) for each in self.instances}
        if haproxy:
            proxy = HAProxy(folder, {each.name: each.own for each in self.instances})
            stack.callback(proxy.stop)
            self.address, self.runtime = proxy.address, proxy.runtime
        self.config = write_switch_file(folder / "switch.toml", self.instances, self.runtime)

    def of(self, name: str, stream: Stream) -> bool:
        """Say whether what a stream has had is what the server of that name says."""
        return bool(stream.tokens) and self.references[name][stream.request][: len(stream.tokens)] == tuple(
            stream.tokens
        )


class Crossings:
    """The streams that were in flight when a server was told to drain, with a token or on the way to their first."""

    def __init__(self, site: Site, load: Load):
        self._site, self._load = site, load
        self._seen: list[tuple[str, Stream]] = []

    def heard(self, line: str) -> None:
        """Take a line of `zl switch`."""
        _, drains, rest = line.partition("draining ")
        if drains:
            in_flight = [*self._load.running, *self._load.waiting]
            self._seen += [(rest.partition(":")[0], stream) for stream in in_flight]

    def count(self) -> int:
        """Count those that were on that very server and had their whole answer from it."""
        references = self._site.references
        return sum(
            stream.error is None and tuple(stream.tokens) == references[name][stream.request]
            for name, stream in self._seen
        )


async def zl_switch(config: Path, crossings: Crossings, *arguments: str) -> None:
    """Run `zl switch` as a person would. RuntimeError: it failed, with what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "zl", "switch", "--config", str(config), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    async for line in process.stdout:
        said.append(line.decode())
        crossings.heard(said[-1])
    if await process.wait():
        raise RuntimeError(f"zl switch {' '.join(arguments)} ended with {process.returncode}:\n{''.join(said)}")


async def busy(load: Load, n: int, seconds: float = 60.0) -> None:
    """Wait until streams run in earnest."""
    async with asyncio.timeout(seconds):
        while len(load.running) < n:
            await asyncio.sleep(0.02)


def move(scenario: str, folder: Path, models: Sequence[Path], n_clients: int, n_moves: int, tokens: int) -> Report:
    """Switch to and fro, or restart in turn, under load."""
    kind, _, where = scenario.partition("-")
    haproxy = where == "haproxy"
    n = 3 if scenario == "roll-haproxy" else 2
    with contextlib.ExitStack() as stack:
        site = Site(stack, folder, models[:n], haproxy, FLAGS, tokens)
        if kind == "switch":
            site.instances[1].stop()

        async def main() -> Report:
            load = Load(site.address, site.requests, n_clients)
            crossings = Crossings(site, load)
            begun, moves = time.monotonic(), 0
            while moves < n_moves:
                await busy(load, min(8, n_clients // 2))
                if kind == "switch":
                    await zl_switch(site.config, crossings, NAMES[(moves + 1) % 2])
                    moves += 1
                else:
                    await zl_switch(site.config, crossings, "--roll")
                    moves += n
            seconds = time.monotonic() - begun
            await load.stop()
            crossed = crossings.count()
            note = f"{crossed} whole answers were in flight on a server when it was told to drain"
            return Report(
                scenario, load.verdict(site.references), n_clients, moves, seconds, crossed=crossed, notes=[note]
            )

        return asyncio.run(main())


def kill(folder: Path, models: Sequence[Path], n_clients: int, tokens: int) -> Report:
    """Kill one of three under load; say which streams ended by it and how long the others had to wait."""
    # Few rows: some requests wait for one, and have had no token when the server dies.
    rows = str(max(2, n_clients // 6))
    flags = [rows if flag == "16" else flag for flag in FLAGS]
    with contextlib.ExitStack() as stack:
        site = Site(stack, folder, models[:3], True, flags, tokens)
        victim = site.instances[1]
        proxy = Runtime(site.runtime)

        async def main() -> Report:
            load = Load(site.address, site.requests, n_clients)
            await busy(load, n_clients // 3)
            await asyncio.sleep(2.0)
            # Kill while streams run on it and others wait for a row: both kinds of loss must be there to be seen.
            async with asyncio.timeout(30):
                while True:
                    mine = [each for each in load.running if len(each.tokens) > 4 and site.of(victim.name, each)]
                    there = sessions(proxy, victim.name)
                    if mine and there > len(load.running) / 3 and load.waiting:
                        break
                    await asyncio.sleep(0.01)
            waiting, died = load.waiting, time.monotonic()
            usual = max((s.first or died) - s.begun for s in load.streams)
            victim.kill()
            while proxy.state("zl", victim.name).up:
                await asyncio.sleep(0.02)
            found_down = time.monotonic() - died
            await asyncio.sleep(3.0)
            await asyncio.to_thread(victim.start)
            while not proxy.state("zl", victim.name).up:
                await asyncio.sleep(0.02)
            back = time.monotonic() - died
            await asyncio.sleep(3.0)
            await load.stop()
            verdict = load.verdict(site.references)
            lost = [
                each for each in verdict.broken
                if isinstance(each.error, StreamBroken) and each.begun < died and each.error.tokens_received
                and each.error.tokens_received == len(each.tokens) and site.of(victim.name, each)
            ]  # fmt: skip
            after = sum(s.begun > died + back and not s.error and site.of(victim.name, s) for s in load.streams)
            notes = [
                f"at the kill {there} streams were at {victim.name}, {len(mine)} of them with tokens, and "
                f"{len(waiting)} had no token anywhere; longest wait for a first token before: {usual:.2f} s",
                f"{len(lost)} streams ended, all of {victim.name}, all with StreamBroken and the count of their tokens",
                f"all {len(waiting)} that waited were answered whole, the last first token "
                f"{longest(waiting, died):.2f} s after the kill; clients that had lost a stream had tokens again "
                f"within {again(load, lost, died):.2f} s",
                f"HAProxy found it down after {found_down:.2f} s; started again, it was up {back:.1f} s after the kill "
                f"and gave {after} whole answers from then on",
            ]
            return Report("kill", verdict, n_clients, 1, time.monotonic() - died, broken_as_they_must=len(lost),
                          notes=notes)  # fmt: skip

        return asyncio.run(main())


def longest(streams: Sequence[Stream], since: float) -> float:
    """Seconds from `since` to the last first token."""
    return max((each.first - since for each in streams), default=0.0)


def again(load: Load, lost: Sequence[Stream], since: float) -> float:
    """Seconds from `since` until each client that lost a stream had a token of its next."""
    nexts = []
    for each in lost:
        later = [s.first for s in load.streams if s.client == each.client and s.begun > each.begun and s.first]
        nexts.append(min(later, default=float("inf")) - since)
    return max(nexts, default=0.0)


def sessions(proxy: Runtime, server: str) -> int:
    """Connections that HAProxy has to a server now."""
    rows = csv.DictReader(proxy.command("show stat").removeprefix("# ").splitlines())
    return next(int(row["scur"]) for row in rows if row["pxname"] == "zl" and row["svname"] == server)


def run(scenario: str, folder: Path, models: Sequence[Path], n_clients: int, n_moves: int, tokens: int) -> Report:
    """Run one scenario in a folder of its own."""
    here = folder / scenario
    here.mkdir()
    if scenario == "kill":
        return kill(here, models, n_clients, tokens)
    return move(scenario, here, models, n_clients, n_moves, tokens)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=list(SCENARIOS))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--moves", type=int, default=20, help="switches or restarts in each scenario")
    parser.add_argument("--tokens", type=int, default=500, help="longest answer")
    args = parser.parse_args()
    if unknown := set(args.scenarios) - set(SCENARIOS):
        parser.error(f"unknown scenario {sorted(unknown)[0]}; there are {', '.join(SCENARIOS)}")
    bad: Mapping[str, bool] = {}
    # Servers have sessions of their own: whoever ends us must not leave them behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        models = make_artifacts(folder, 3)
        for scenario in args.scenarios:
            report = run(scenario, folder, models, args.clients, args.moves, args.tokens)
            print(*report.lines(), sep="\n", flush=True)
            bad = {**bad, scenario: not report.passed}
    failed = [name for name, is_bad in bad.items() if is_bad]
    print(f"rolling: {'FAILED: ' + ', '.join(failed) if failed else 'nothing that a client must not notice'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
