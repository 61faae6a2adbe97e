"""Streaming clients that count what a user would notice: requests that fail, streams that break, answers that differ.

State: of one load, every stream that has begun and how it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zl.client import AsyncPool, ZlClientError


@dataclass
class Stream:
    """One request: monotonic seconds of its begin, first token and end (0: not yet), its tokens, its error."""

    client: int
    request: int
    begun: float
    first: float = 0.0
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: ZlClientError | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of all streams. `by`: whole answers by the server that gave them."""

    by: Mapping[str, int]
    failed: Sequence[Stream]  # an error before the first token
    broken: Sequence[Stream]  # an error after it
    wrong: Sequence[Stream]  # ended well, with tokens that no server gives to that request

    @property
    def flawless(self) -> bool:
        """Say whether no user noticed anything."""
        return not (self.failed or self.broken or self.wrong)


class Load:
    """`n` clients, each asking one thing after the other until `stop`.

    Clients with even numbers keep one pool, and so one connection, for as long as it lasts; the others make a new one
    for each request.
    """

    def __init__(self, address: str, requests: Sequence[Mapping[str, Any]], n: int, timeout: float = 60.0):
        self._address = address
        self._requests = requests
        self._timeout = timeout
        self._stopping = False
        self.streams: list[Stream] = []
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(n)]

    @property
    def running(self) -> list[Stream]:
        """The streams that have had a token and have not ended."""
        return [each for each in self.streams if each.first and not each.ended]

    @property
    def waiting(self) -> list[Stream]:
        """The streams that have had no token yet."""
        return [each for each in self.streams if not each.first and not each.ended]

    async def stop(self) -> None:
        """Begin nothing more; return when all streams have ended."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        kept = AsyncPool(self._address, timeout=self._timeout) if number % 2 == 0 else None
        try:
            turn = number
            while not self._stopping:
                turn += 1
                pool = kept or AsyncPool(self._address, timeout=self._timeout)
                try:
                    await self._ask(pool, number, turn % len(self._requests))
                finally:
                    if pool is not kept:
                        await pool.close()
        finally:
            if kept is not None:
                await kept.close()

    async def _ask(self, pool: AsyncPool, client: int, request: int) -> None:
        stream = Stream(client, request, time.monotonic())
        self.streams.append(stream)
        try:
            async for chunk in pool.stream(**self._requests[request]):
                if chunk.token_ids:
                    stream.first = stream.first or time.monotonic()
                    stream.tokens += chunk.token_ids
        except ZlClientError as error:
            stream.error = error
            await asyncio.sleep(0.05)  # a client that asks again at once would only count the same failure often
        stream.ended = time.monotonic()

    def verdict(self, references: Mapping[str, Sequence[Sequence[int]]]) -> Verdict:
        """Judge all streams that have ended against what each server must say."""
        by = dict.fromkeys(references, 0)
        failed, broken, wrong = [], [], []
        for each in self.streams:
            if each.error is not None:
                (broken if each.tokens else failed).append(each)
                continue
            for name, answers in references.items():
                if each.tokens == list(answers[each.request]):
                    by[name] += 1
                    break
            else:
                wrong.append(each)
        return Verdict(by, failed, broken, wrong)


def make_requests(n: int, tokens: int) -> list[dict[str, Any]]:
    """Make requests whose answers are known: seeds are given, lengths are as asked."""
    return [
        {"messages": f"Question {i}?", "seed": i, "max_tokens": tokens - i, "temperature": 1.0, "ignore_eos": True}
        for i in range(n)
    ]
