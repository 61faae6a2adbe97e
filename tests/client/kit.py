"""A clock that moves only when somebody sleeps, and servers that keep answers back until they are told."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from tests.fake_server import FakeServer


class Clock:
    """Fake time. Sleeping moves it on, and lets the real sockets of other threads and tasks have their turn."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        time.sleep(0.001)

    async def sleep_async(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0.001)


class Alarm:
    """Fake time for timers: sleepers wake when the test moves the time past their hour."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        waking = asyncio.Event()
        self._sleepers.append((self.now + seconds, waking))
        await waking.wait()

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(0)  # tasks just made begin to sleep
        self.now += seconds
        for hour, waking in self._sleepers:
            if hour <= self.now:
                waking.set()
        for _ in range(3):
            await asyncio.sleep(0)


class HoldingServer(FakeServer):
    """Answers `held …` as `say …`, but only once `release` was called."""

    def __init__(self, unix: Path | None = None):
        super().__init__(unix)
        self._released = asyncio.Event()
        self.holding = threading.Semaphore(0)  # one up for each request that waits

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    async def _answer(self, request, writer):
        if request.messages[-1].startswith(b"held "):
            request.messages[-1] = b"say " + request.messages[-1][5:]
            self.holding.release()
            await self._released.wait()
        await super()._answer(request, writer)


def run(coroutine, seconds: float = 20):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def until(condition, seconds: float = 10):
    """Wait in real time until something that another thread does is done."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
