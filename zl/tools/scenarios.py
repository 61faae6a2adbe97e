"""The load generator's scenarios: which requests, on how many streams, when. Owns no state.

The names and their usual sizes are those of the project's benchmarks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zl.errors import ConfigError
from zl.tools import prompts
from zl.tools.load import Driver, Streams, arrivals, burst, long_into
from zl.tools.prompts import Prompt
from zl.tools.traces import Trace, poisson_times, summarise

CAPACITY_SHARE = 0.7
"""The Poisson stream's rate, of the requests a second that the server finished with all streams busy."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One round.

    streams, per_stream   streams at a time, and requests that each makes one after the other
    tokens                of each answer; never fewer, since ignore_eos is set
    words, shared_words   of each question; of the system prompt, 0 for a short one
    idle                  further connections that are open and silent
    poisson               arrivals at `rate` requests a second (0: 70% of capacity, measured first) for `seconds`
    long_words            of one further prompt that comes when all streams are in their stride; 0: none
    prompts               JSONL file of conversations to use instead, with their own lengths
    """

    streams: int
    tokens: int = 64
    per_stream: int = 1
    words: int = 60
    shared_words: int = 0
    idle: int = 0
    poisson: bool = False
    rate: float = 0.0
    seconds: float = 20.0
    long_words: int = 0
    prompts: Path | None = None
    seed: int = 1


PRESETS = {
    "alone": Plan(1, per_stream=4),
    "mid": Plan(32),
    "full": Plan(128),
    "max": Plan(256),
    "poisson": Plan(128, poisson=True),
    "shared": Plan(128, shared_words=400),
    "mixed": Plan(128),
    "long": Plan(32, tokens=256, long_words=3_500),
    "idle": Plan(8, per_stream=4, idle=10_000),
}


class Outcome(NamedTuple):
    """One round's traces, and figures that only its scenario has."""

    traces: list[Trace]
    extra: dict[str, float]


def asked(plan: Plan, n: int, seed: int) -> list[Prompt]:
    """Make n requests.

    Raises  ConfigError: the prompts file cannot be used
    """
    if plan.prompts is not None:
        try:
            return prompts.mixed(plan.prompts, n)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{plan.prompts} cannot be used ({error}): it must have one object a line, such as "
                '{"messages": ["Hi"], "max_tokens": 16}'
            ) from error
    system = prompts.text(plan.shared_words, 0) if plan.shared_words else prompts.SYSTEM
    return prompts.burst(n, plan.tokens, seed, plan.words, system)


async def run_plan(driver: Driver, plan: Plan) -> Outcome:
    """Run one round.

    Raises  ConfigError; ConnectionFailed
    """
    if plan.idle and not isinstance(driver, Streams):
        raise ConfigError("idle connections need the generator's own streams: leave --client out")
    first = asked(plan, plan.streams * plan.per_stream, plan.seed)
    await driver.connect(plan.streams)
    idle = [await driver.extra() for _ in range(plan.idle)] if isinstance(driver, Streams) else []
    try:
        if plan.poisson:
            return await _poisson(driver, plan, first)
        if plan.long_words:
            long = Prompt(prompts.SYSTEM, (prompts.text(plan.long_words, plan.seed),), 16)
            traces, last = await long_into(driver, first, long)
            extra = {"long_first_s": last.first} if last.arrivals else {}
            return Outcome([*traces, last], extra)
        return Outcome(await burst(driver, first, plan.streams), {})
    finally:
        for each in idle:
            each.transport.close()


async def _poisson(driver: Driver, plan: Plan, first: Sequence[Prompt]) -> Outcome:
    rate = plan.rate
    if not rate:
        figures = summarise(await burst(driver, first, plan.streams))
        rate = CAPACITY_SHARE * (figures["requests"] - figures["failed"]) / figures["seconds"]
    n = max(1, round(rate * plan.seconds))
    plan = dataclasses.replace(plan, seed=plan.seed + 1)
    return Outcome(await arrivals(driver, asked(plan, n, plan.seed), poisson_times(n, rate, plan.seed)),
                   {"rate_per_s": rate})  # fmt: skip
