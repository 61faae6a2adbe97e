"""Live editing: `Debounce` asks when the typing pauses, `DoubleBuffer` has the likely next answer under way already.

Both work over anything with the `stream` of `AsyncClient` or `AsyncPool`. State: at most one request each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, Self, Unpack

from zl.client.messages import Answer, Chunk, Messages, Options, Result, join, request_fields

QUIET_S = 1.0
KEEP_S = 30.0

Sleep = Callable[[float], Awaitable[None]]


class Answering(Protocol):
    """An answer on its way, as `AsyncStream` is."""

    @property
    def result(self) -> Result | None:
        """How it ended."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Iterate over its chunks."""

    async def close(self) -> None:
        """Cancel what still runs."""


class Asking(Protocol):
    """Whatever sends requests, as `AsyncClient` does."""

    def stream(self, messages: Messages, **options: Unpack[Options]) -> Answering:
        """Send a request."""


class Debounce:
    """Sends what is being edited after `quiet` seconds without an edit; an edit cancels the request that runs.

    on_text   is called with each piece of the answer, and with None when a new answer begins
    quiet     seconds
    sleep     for tests
    """

    def __init__(
        self,
        client: Asking,
        on_text: Callable[[str | None], None] = lambda _: None,
        *,
        quiet: float = QUIET_S,
        sleep: Sleep = asyncio.sleep,
    ):
        self._client = client
        self._on_text = on_text
        self._quiet = quiet
        self._sleep = sleep
        self._task: asyncio.Task[Answer] | None = None

    def edit(self, messages: Messages, **options: Unpack[Options]) -> None:
        """Take the newest state of what is being edited."""
        self.cancel()
        self._task = asyncio.create_task(self._ask(messages, options), name="zl debounce")

    def cancel(self) -> None:
        """Drop what waits or runs."""
        if self._task is not None:
            self._task.cancel()

    async def answer(self) -> Answer | None:
        """Wait for the answer to the newest edit, over further edits that come meanwhile; None: it was cancelled.

        Raises  what the request ended with
        """
        while (task := self._task) is not None:
            await asyncio.wait([task])
            if task is self._task:
                return None if task.cancelled() else task.result()
        return None

    async def close(self) -> None:
        """Drop what waits or runs, and see it end."""
        self.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _ask(self, messages: Messages, options: Options) -> Answer:
        await self._sleep(self._quiet)
        self._on_text(None)
        stream = self._client.stream(messages, **options)
        try:
            chunks = []
            async for chunk in stream:
                chunks.append(chunk)
                self._on_text(chunk.text)
            assert stream.result is not None
            return join(chunks, stream.result)
        finally:
            await stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class DoubleBuffer:
    """Prepares the answer to the request that will likely come next, and drops it if another one comes.

    keep   seconds that a prepared answer may wait to be taken
    sleep  for tests
    """

    def __init__(self, client: Asking, *, keep: float = KEEP_S, sleep: Sleep = asyncio.sleep):
        self._client = client
        self._keep = keep
        self._sleep = sleep
        self._fields: dict[str, object] | None = None
        self._stream: Answering | None = None
        self._timer: asyncio.Task[None] | None = None

    async def prepare(self, messages: Messages, **options: Unpack[Options]) -> None:
        """Send a request that will likely be wanted; one prepared before and not taken is dropped."""
        fields = request_fields(messages, options)
        if fields == self._fields:
            return
        await self.drop()
        self._fields, self._stream = fields, self._client.stream(messages, **options)
        self._timer = asyncio.create_task(self._expire(), name="zl double buffer")

    async def take(self, messages: Messages, **options: Unpack[Options]) -> Answering:
        """Give the answer to a request: the prepared one where it is the same, a new one otherwise."""
        if self._stream is not None and request_fields(messages, options) == self._fields:
            stream, self._stream = self._stream, None
            await self.drop()
            return stream
        await self.drop()
        return self._client.stream(messages, **options)

    async def drop(self) -> None:
        """Cancel what was prepared and not taken."""
        timer, self._timer = self._timer, None
        stream, self._stream, self._fields = self._stream, None, None
        if timer is not None and timer is not asyncio.current_task():
            timer.cancel()
        if stream is not None:
            await stream.close()  # first: what waits for the timer may be cancelled
        if timer is not None and timer is not asyncio.current_task():
            await asyncio.gather(timer, return_exceptions=True)

    async def _expire(self) -> None:
        await self._sleep(self._keep)
        await self.drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drop()
