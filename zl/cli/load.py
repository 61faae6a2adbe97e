"""`zl load`: put a server under load and say how it answered. Owns no state."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zl.cli.connecting import ADDRESS, add_ca, add_token, token_of_flag
from zl.cli.numbers import above_zero, count, seconds
from zl.errors import ConfigError
from zl.ops import descriptors

if TYPE_CHECKING:
    from zl.tools.load import Driver
    from zl.tools.scenarios import Outcome, Plan

HELP = "put a server under load, and measure"
DESCRIPTION = """\
Put a server under load from many streams and measure: time to first token, gaps between token frames, tokens a second,
CPU seconds of both sides. Answers run to their full length (ignore_eos). Progress goes to stderr on a terminal.

--echo measures the generator itself, against a server in another process that computes nothing.

Exit status: 0 every request was answered, 3 some failed, 4 no connection, 2 wrong use.
"""
EPILOG = """\
scenarios:
  alone    one stream, four answers after each other   full  128 streams at once      mid  32
  poisson  requests at random times, at 70% of capacity or --rate                     max  256
  shared   128 streams under one system prompt of 400 words
  mixed    conversations of --prompts FILE, with their own lengths
  long     a prompt of 3,500 words into 32 running streams
  idle     8 active streams beside 10,000 open connections

examples:
  zl load
  zl load tcp:127.0.0.1:7433
  zl load --scenario poisson --rate 3 --seconds 30 unix:/tmp/zl.sock
  zl load --streams 16 --tokens 32 --prompts chat.jsonl --json tcp:127.0.0.1:7433
  zl load --client --connections 1 --streams 100 unix:/tmp/zl.sock
  zl load --echo
"""
REFUSED, NO_CONNECTION = 3, 4
_BAR = 40
_LOOK_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address, the scenario and what it is made of."""
    names = ("alone", "mid", "full", "max", "poisson", "shared", "mixed", "long", "idle")
    parser.add_argument("address", nargs="?", metavar="ADDR", help=f"{ADDRESS} (default: $ZL_CONNECT, else the Unix "
                        "socket of a server on this machine, else tcp:127.0.0.1:7433)")  # fmt: skip
    parser.add_argument("--scenario", choices=names, default="mid", help="default: mid; the flags below change it")
    group = parser.add_argument_group("scenario")
    for name, kind, about in (
        ("streams", count(1), "streams at a time"), ("tokens", count(1), "tokens of each answer"),
        ("per-stream", count(1), "requests on each stream, one after the other"),
        ("words", count(1), "words of each question"),
        ("shared-words", count(0), "words of a system prompt that all requests share"),
        ("idle", count(0), "further connections, open and silent"),
        ("rate", above_zero, "Poisson: requests a second"), ("seconds", above_zero, "Poisson: how long"),
        ("long-words", count(0), "words of one long prompt among the running streams"),
        ("prompts", Path, "JSONL file of conversations to send instead"), ("seed", int, "of words and arrival times"),
    ):  # fmt: skip
        group.add_argument("--" + name, type=kind, metavar="FILE" if kind is Path else "N", help=about)
    group = parser.add_argument_group("how")
    group.add_argument("--connections", type=count(0), default=0, metavar="N", help="connections for all streams "
                       "together (default: one a stream; with --client one)")  # fmt: skip
    add_ca(group)
    add_token(group)
    group.add_argument("--client", action="store_true", help="go through zl.client.AsyncClient, to measure that")
    group.add_argument("--server-pid", type=count(1), metavar="PID", help="whose CPU seconds to report (default: the "
                       "process at the other end of a Unix socket)")  # fmt: skip
    group.add_argument("--timeout", type=seconds, default=120.0, metavar="SECONDS",
                       help="give up when no token comes for so long (default: 120)")  # fmt: skip
    group.add_argument("--json", action="store_true", help="print figures as JSON")
    group.add_argument("--echo", action="store_true", help="measure the generator against an echo server of its own")


def run(args: argparse.Namespace) -> int:
    """Run the scenario and print its figures."""
    import uvloop

    from zl.client.errors import ConnectionFailed
    from zl.tools.scenarios import PRESETS

    fields = {each.name for each in dataclasses.fields(PRESETS["mid"])}
    given = {name: value for name, value in vars(args).items() if name in fields and value is not None}
    plan = dataclasses.replace(PRESETS[args.scenario], **given)
    if "rate" in given:
        plan = dataclasses.replace(plan, poisson=True)
    _check(args, plan.prompts)
    # Each connection is a file descriptor, and the usual limit of 1,024 is below what the scenarios open.
    descriptors.raise_limit()
    with _target(args) as (address, pid):
        try:
            figures = uvloop.run(_measure(args, plan, address, pid))
        except ConnectionFailed as error:
            print(f"zl: {error}", file=sys.stderr)
            return NO_CONNECTION
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n".join(report(figures)))
    return REFUSED if figures["failed"] else 0


def _check(args: argparse.Namespace, prompts: Path | None) -> None:
    if args.echo and args.address:
        raise ConfigError(f"--echo measures against a server of its own: leave {args.address} out, or --echo")
    if args.scenario == "mixed" and prompts is None:
        raise ConfigError('--scenario mixed needs --prompts FILE, with lines such as {"messages": ["Hi"], '
                          '"max_tokens": 16}')  # fmt: skip


@contextlib.contextmanager
def _target(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Give the address and the server's process; start the echo server where that is asked for."""
    if not args.echo:
        from zl.client.endpoints import candidates

        yield str(candidates(args.address)[0]), args.server_pid or 0
        return
    with tempfile.TemporaryDirectory(prefix="zl-echo-") as folder:
        path = os.path.join(folder, "s")
        # In a group of its own, since Ctrl-C is for us; at the end of its stdin it leaves, however we have left.
        with subprocess.Popen([sys.executable, "-m", "zl.tools.echo", path], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, process_group=0) as child:  # fmt: skip
            try:
                assert child.stdout is not None
                child.stdout.readline()
                yield f"unix:{path}", child.pid
            finally:
                child.terminate()


async def _measure(args: argparse.Namespace, plan: Plan, address: str, pid: int) -> dict[str, Any]:
    from zl.client.errors import ConnectionFailed
    from zl.tools.load import ClientStreams, Streams, cpu_seconds
    from zl.tools.scenarios import run_plan
    from zl.tools.traces import summarise

    driver: Driver = (ClientStreams if args.client else Streams)(
        address, args.connections, args.ca, token_of_flag(args)
    )
    try:
        await driver.connect(plan.streams)
        if not pid and isinstance(driver, Streams):
            pid = driver.server_pid()
        elif not pid and address.startswith("unix:"):
            probe = Streams(address)
            await probe.connect(1)
            pid = probe.server_pid()
            await probe.close()
        server_before, own_before = cpu_seconds(pid) if pid else None, time.process_time()
        begun_frames, begun = driver.frames, time.monotonic()
        outcome = await _watched(driver, run_plan(driver, plan), args.timeout)
        wall = time.monotonic() - begun
        own = time.process_time() - own_before
        frames = driver.frames - begun_frames
        server_after = cpu_seconds(pid) if pid else None
    finally:
        await driver.close()
    try:
        figures = summarise(outcome.traces)
    except ValueError as error:
        raise ConnectionFailed(str(error)) from error
    figures |= {"scenario": args.scenario, "wall_s": wall, "frames_per_s": frames / wall,
                "client_cpu_s": own, "client_us_per_frame": own * 1e6 / max(1, frames)}  # fmt: skip
    if server_before is not None and server_after is not None:
        figures["server_cpu_s"] = server_after - server_before
    figures["plan"] = {key: str(value) if isinstance(value, Path) else value
                       for key, value in dataclasses.asdict(plan).items()}  # fmt: skip
    return figures | outcome.extra


async def _watched(driver: Driver, running: Coroutine[Any, Any, Outcome], timeout: float) -> Outcome:
    """Run a plan; twice a second redraw a line on a terminal, and give up on a server that says nothing any more."""
    import asyncio

    from zl.client.errors import ConnectionFailed

    task = asyncio.ensure_future(running)
    shown = sys.stderr.isatty()
    begun = last = time.monotonic()
    before = driver.tokens
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            now = time.monotonic()
            if driver.tokens != before:
                last = now
            elif now - last > timeout:
                raise ConnectionFailed(f"no token has come for {timeout:g} s; --timeout says how long to wait")
            if shown:
                rate = (driver.tokens - before) / _LOOK_S
                line = f"{now - begun:6.1f} s  {driver.tokens} tokens  {rate:.0f} tokens/s"
                print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)
            before = driver.tokens
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if shown:
            print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)
    return task.result()


def report(figures: dict[str, Any]) -> list[str]:
    """Put figures into lines of text, with a histogram of each kind of waiting."""
    out = [
        f"{figures['scenario']}: {figures['requests']} requests, {figures['failed']} failed; "
        f"{figures['tokens']} tokens in {figures['seconds']:.2f} s: {figures['tokens_per_s']:.1f} tokens/s, "
        f"{figures['frames_per_s']:.0f} frames/s"
    ]
    out += [f"failed: {text}" for text in figures["errors"]]
    for name, key in (("time to first token", "first"), ("gap between token frames", "gap")):
        found = figures[f"{key}_s"]
        if found:
            out.append(f"{name}: mean {_ms(found['mean'])}, p50 {_ms(found['p50'])}, p90 {_ms(found['p90'])}, "
                       f"p99 {_ms(found['p99'])}, longest {_ms(found['max'])}")  # fmt: skip
            out += histogram(figures[f"{key}_curve_s"])
    if "long_first_s" in figures:
        out.append(f"the long prompt's first token: {_ms(figures['long_first_s'])}")
    if "rate_per_s" in figures:
        out.append(f"arrivals: {figures['rate_per_s']:.2f} requests/s")
    cpu = f"CPU: client {figures['client_cpu_s']:.2f} s ({figures['client_us_per_frame']:.1f} µs a frame)"
    if "server_cpu_s" in figures:
        server = figures["server_cpu_s"]
        share = f", the client {figures['client_cpu_s'] / server:.1%} of it" if server else ""
        cpu += f", server {server:.2f} s{share}"
    return [*out, cpu]


def histogram(curve: Sequence[float], bins: int = 10) -> list[str]:
    """Draw how values are spread, from their percentiles 0 to 100; the slowest percent is in the last line's range.

    curve  101 values in seconds, ascending
    """
    low, high = curve[0], curve[99] if len(curve) > 99 else curve[-1]
    if high <= low:
        return []
    width = (high - low) / bins
    counts = [0] * bins
    for value in curve[:100]:
        counts[min(bins - 1, int((value - low) / width))] += 1
    top = max(counts)
    return [
        f"  {_ms(low + i * width):>9} {'#' * round(_BAR * count / top):<{_BAR}} {count:3d}%"
        for i, count in enumerate(counts)
    ]


def _ms(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.0f} µs"
