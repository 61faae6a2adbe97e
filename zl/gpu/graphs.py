"""Programs as captured graphs: a stream that runs, captures and replays work, and the graphs by what they are for.

The dry mode has a stream too: there, a graph is the work itself, so that the same code plans, captures and replays.
State: the stream, one fence a slot, the graphs. Refuses triton, rows, net and asyncio.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from zl.errors import InvariantError

Work = Callable[[], None]
"""Launches kernels on the current stream; never waits, never allocates."""


class Key(NamedTuple):
    """What one program is for: a step slot, a token bucket, and whether segments of several tokens may come."""

    slot: int
    bucket: int
    mixed: bool


class Stream(Protocol):
    """A stream in which work runs in the order it is given in.

    warms  work must have run once before it is captured, and a graph before it serves
    """

    warms: bool

    def run(self, work: Work) -> None:
        """Start work, kernel by kernel."""

    def capture(self, work: Work) -> Any:
        """Record work without running it."""

    def replay(self, graph: Any) -> None:
        """Start recorded work, by one launch."""

    def mark(self, slot: int) -> None:
        """Put slot `slot`'s fence behind all work given so far."""

    def wait(self, slot: int) -> None:
        """Block, without the interpreter's lock, until the work before the fence has ended."""

    def settle(self) -> None:
        """Block until everything has ended, on other streams of the device too."""

    def renew(self) -> None:
        """Prepare for captures after all graphs so far are gone."""


class PlainStream:
    """No device: work runs when it is given, and a graph is the work."""

    warms = False

    def run(self, work: Work) -> None:
        """Run it."""
        work()

    def capture(self, work: Work) -> Work:
        """Keep it."""
        return work

    def replay(self, graph: Work) -> None:
        """Run what was kept."""
        graph()

    def mark(self, slot: int) -> None:
        """Everything has ended already."""

    def wait(self, slot: int) -> None:
        """Everything has ended already."""

    def settle(self) -> None:
        """Everything has ended already."""

    def renew(self) -> None:
        """A graph leaves nothing behind."""


class CudaStream:
    """A stream of its own; graphs share one memory pool. Not yet run on hardware: docs/gpu-status.md.

    Results that kernels write to mapped host memory are visible to the CPU after `wait`: the end of the work and the
    event behind it order them at system scope (CUDA C++ Programming Guide 13, sections "Mapped Memory" and "Memory
    Consistency Model"), so kernels need no fence of their own.
    """

    warms = True

    def __init__(self, device: torch.device, n_slots: int):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # Not blocking: the waiting thread spins, which costs a core and saves the wake-up of tens of microseconds.
        self._events = [torch.cuda.Event() for _ in range(n_slots)]

    def run(self, work: Work) -> None:
        """Launch kernel by kernel, from whichever thread."""
        torch.cuda.set_device(self._device)  # a thread that never met the runtime has no context yet
        with torch.cuda.stream(self._stream):
            work()

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """Record. Thread-local: other threads may call the device meanwhile; this one must not but through `work`.

        The collector is off for that time: freeing a tensor or a graph is such a call. torch's own context manager
        collects everything, empties the allocator's cache and synchronises the device before each capture, which a
        capture beside a serving event loop cannot afford; here the caller settles instead.
        """
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Launch a graph."""
        with torch.cuda.stream(self._stream):
            graph.replay()

    def mark(self, slot: int) -> None:
        """Record the slot's event."""
        self._events[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """Wait for the slot's event, not for the device."""
        self._events[slot].synchronize()  # sync

    def settle(self) -> None:
        """Wait for the whole device: uploads and zeros are ordered on other streams."""
        torch.cuda.synchronize(self._device)  # sync

    def renew(self) -> None:
        """Take another memory pool: torch's allocator asserts that a pool whose last graph has gone is not used again.

        CUDACachingAllocator.cpp, create_or_incref_pool, torch 2.x.
        """
        self._pool = torch.cuda.graph_pool_handle()


def keys(buckets: Sequence[int], n_slots: int, *, canary: bool = False) -> Iterator[Key]:
    """List what is captured, in the order of capture: widest bucket first, so that the others fit its memory.

    canary  the last slot is the heartbeat's, whose steps all fit the narrowest bucket
    """
    for bucket in buckets:
        for mixed in (True, False):
            for slot in range(n_slots):
                if not (canary and slot == n_slots - 1 and bucket != buckets[-1]):
                    yield Key(slot, bucket, mixed)


class Graphs:
    """The captured programs of one engine.

    work    gives the work of a key; its plan must be empty while it is captured
    """

    def __init__(self, stream: Stream, wanted: Sequence[Key], work: Callable[[Key], Work]):
        self._on = stream
        self._wanted = list(wanted)
        self._work = work
        self._graphs: dict[Key, Any] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def missing(self) -> int:
        """Count the programs that are still to be captured."""
        return len(self._wanted) - len(self._graphs)

    def capture_next(self) -> None:
        """Warm up, capture and replay once the next program that is missing. # sync

        The warm-up compiles and loads the kernels, which no capture may do. The first launch of a graph moves it to the
        device and may allocate there: it happens here, and not in a step after READY.
        """
        key = self._wanted[len(self._graphs)]
        work = self._work(key)
        if self._on.warms:
            self._on.run(work)
            self._on.settle()
        graph = self._on.capture(work)
        if self._on.warms:
            self._on.replay(graph)
            self._on.settle()
        self._graphs[key] = graph

    def launch(self, key: Key) -> None:
        """Replay a program, and fence its slot. InvariantError: it was never captured."""
        graph = self._graphs.get(key)
        if graph is None:
            raise InvariantError(f"no program was captured for {key}")
        self._on.replay(graph)
        self._on.mark(key.slot)

    def launch_uncaptured(self, key: Key) -> None:
        """Run the same work kernel by kernel, captured or not, and fence its slot."""
        self._on.run(self._work(key))
        self._on.mark(key.slot)

    def drop(self) -> None:
        """Forget all graphs; none may be in flight."""
        self._graphs.clear()
        self._on.renew()
