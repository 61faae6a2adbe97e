"""The scenarios: which requests, how many at a time, when. Owns no state; knows no system.

Each takes a client that is connected to one server and returns the traces of one round.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clients import Client, clock
from bench.stats import gap_stretch
from zl.tools import prompts
from zl.tools.prompts import Prompt
from zl.tools.traces import Trace, poisson_times

LONG_TOKENS = 3_500
LONG_ANSWER = 16
SETTLED_FRAMES = 16
"""The long prompt is sent when every running stream has had this many frames."""
PROMPT_TOKENS = 160
"""Room for a 60-word prompt with the template and its system text."""
POISSON_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Size:
    """What the command line decided.

    per_stream   requests that each stream makes, one after the other
    idle         connections that are open and silent meanwhile
    arrivals_s   length of the Poisson stream; rate is requests a second for it, set once capacity is known
    """

    streams: int
    tokens: int
    per_stream: int
    idle: int
    arrivals_s: float
    prompts: Path
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round's traces, and figures that only its scenario has."""

    traces: list[Trace]
    extra: dict[str, float]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A name, its usual size, what it needs of a server, and how a round goes."""

    name: str
    streams: int
    tokens: int
    per_stream: int
    about: str
    run: Callable[[Client, Size, int], Awaitable[Outcome]]
    row_tokens: Callable[[Size], int]


async def burst(client: Client, asked: Sequence[Prompt], streams: int) -> list[Trace]:
    """Send one request on each stream at once, and the next on a stream when its answer has ended."""
    traces: list[Trace] = []

    async def follow(stream: int) -> None:
        for prompt in asked[stream::streams]:
            traces.append(await client.ask(prompt, stream))

    await client.connect(streams)
    with _no_collector():
        await asyncio.gather(*(follow(i) for i in range(streams)))
    return traces


async def arrivals(client: Client, asked: Sequence[Prompt], times: Sequence[float]) -> list[Trace]:
    """Send request i at times[i] seconds from now, whatever has become of the others; each has its own connection."""
    await client.connect(len(asked))

    async def follow(i: int) -> Trace:
        await asyncio.sleep(max(0.0, begun + times[i] - clock()))
        return await client.ask(asked[i], i)

    with _no_collector():
        begun = clock()
        return list(await asyncio.gather(*(follow(i) for i in range(len(asked)))))


class _no_collector:  # noqa: N801
    """Keep Python's cycle collector from stretching gaps that are then laid at the server's door."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()


async def _plain(client: Client, size: Size, seed: int) -> Outcome:
    asked = prompts.burst(size.streams * size.per_stream, size.tokens, seed)
    return Outcome(await burst(client, asked, size.streams), {})


async def _shared(client: Client, size: Size, seed: int) -> Outcome:
    asked = prompts.shared(size.streams * size.per_stream, size.tokens, seed)
    return Outcome(await burst(client, asked, size.streams), {})


async def _mixed(client: Client, size: Size, seed: int) -> Outcome:  # noqa: ARG001
    asked = prompts.mixed(size.prompts, size.streams * size.per_stream)
    return Outcome(await burst(client, asked, size.streams), {})


async def capacity(client: Client, size: Size, seed: int) -> float:
    """Measure requests a second with all streams busy."""
    asked = prompts.burst(size.streams * 2, size.tokens, seed)
    traces = await burst(client, asked, size.streams)
    ended = max(t.arrivals[-1] for t in traces if t.arrivals)
    return len(traces) / (ended - min(t.sent for t in traces))


async def _poisson(client: Client, size: Size, seed: int) -> Outcome:
    if size.rate <= 0:
        raise ValueError("the Poisson scenario needs a rate; measure capacity first")
    n = max(32, min(1_024, round(size.rate * size.arrivals_s)))
    asked = prompts.burst(n, size.tokens, seed)
    traces = await arrivals(client, asked, poisson_times(n, size.rate, seed))
    return Outcome(traces, {"rate_per_s": size.rate})


async def _long(client: Client, size: Size, seed: int) -> Outcome:
    """Run the streams, send the long prompt when all of them are in their stride, follow all to their end."""
    asked = prompts.burst(size.streams, size.tokens, seed)
    long = Prompt(prompts.SYSTEM, (prompts.text(LONG_TOKENS, seed),), LONG_ANSWER)
    await client.connect(size.streams + 1)
    with _no_collector():
        running = [asyncio.ensure_future(client.ask(p, i)) for i, p in enumerate(asked)]
        await asyncio.sleep(0)  # all are sent now: until then, progress is that of the answer before
        while any(client.progress(i) < SETTLED_FRAMES and not running[i].done() for i in range(size.streams)):
            await asyncio.sleep(0.005)
        trace = await client.ask(long, size.streams)
        traces = list(await asyncio.gather(*running))
    if trace.error or not trace.arrivals:
        raise ValueError(f"the long prompt failed: {trace.error or 'no token came'}")
    still = sum(t.arrivals[-1] > trace.arrivals[0] for t in traces if t.arrivals)
    after = gap_stretch(traces, since=trace.sent)
    extra = {
        "long_first_s": trace.first,
        "long_prompt_tokens": float(trace.prompt_tokens),
        "running_at_long_first_token": float(still),
        "worst_stretch": max(after),
        "median_stretch": sorted(after)[len(after) // 2],
        "worst_stretch_whole_life": max(gap_stretch(traces)),
    }
    return Outcome([*traces, trace], extra)


def _prompt_and_answer(size: Size) -> int:
    return PROMPT_TOKENS + size.tokens


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("alone", 1, 64, 4, "one stream, four answers after each other", _plain, _prompt_and_answer),
        Scenario("mid", 32, 64, 1, "32 streams at once", _plain, _prompt_and_answer),
        Scenario("full", 128, 64, 1, "128 streams at once", _plain, _prompt_and_answer),
        Scenario("max", 256, 64, 1, "256 streams at once", _plain, _prompt_and_answer),
        Scenario("poisson", 128, 64, 1, "arrivals at 70% of measured capacity", _poisson, _prompt_and_answer),
        Scenario(
            "shared", 128, 64, 1, "128 streams under one 400-token system prompt", _shared,
            lambda size: 450 + _prompt_and_answer(size),
        ),
        Scenario("mixed", 128, 0, 1, "chat.jsonl with its own token counts", _mixed, lambda _: 768),
        Scenario(
            "long", 32, 256, 1, "a 3,500-token prompt into 32 running streams", _long, lambda _: LONG_TOKENS + 512
        ),
        Scenario("idle", 8, 64, 4, "8 active streams beside 10,000 open connections", _plain, _prompt_and_answer),
    )
}  # fmt: skip
