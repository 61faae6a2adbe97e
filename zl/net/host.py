"""What a connection is given: an arena, an application, limits and counters, each as small as a connection needs it.

State: none but the counters' numbers. Refuses asyncio, torch, text and dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from zl.errors import Code
from zl.histogram import Histogram
from zl.lease import Lease
from zl.measures import PART_BUCKETS
from zl.net.messages import Request
from zl.shapes import MAX_FRAME


class Answers(Hashable, Protocol):
    """What an application needs of a connection. For the logs `name` says its kind and number, `peer` who it is."""

    name: str
    peer: str

    def queue(self, data: bytes) -> None:
        """Put one whole frame in line."""

    def finished(self, request_id: int) -> None:
        """Free the id of a request whose last frame has been queued."""

    def flush(self) -> None:
        """Write what is in line."""


class Berth(Protocol):
    """What a connection needs of `gpu.arena.Berth`."""

    view: memoryview


class Berths(Protocol):
    """What a connection needs of `gpu.arena.Arena`."""

    def acquire(self) -> Berth | None:
        """Take a free berth."""

    def wait(self, owner: Hashable, on_free: Callable[[Berth], None]) -> None:
        """Queue for one."""

    def forget(self, owner: Hashable) -> None:
        """Leave the queue."""

    def release(self, berth: Any) -> None:
        """Give one back."""

    def lend(self, berth: Any) -> Lease | None:
        """Leave one to the request that arrived in it; None: it is to be released, as always."""


class Application(Protocol):
    """What answers requests. All calls come from the event loop's thread and must not wait."""

    accepting: bool

    @property
    def healthy(self) -> bool:
        """Say whether the engine works."""

    def submit(self, conn: Answers, request: Request) -> None:
        """Take a checked request, and with it the duty to end its lease; a RequestError refuses it."""

    def refused(self, conn: Answers, request: Request | None, code: Code) -> None:
        """Learn of a request, of any operation, that the conversation refused by itself: it never came to `submit`.

        None: what came was no request. Nothing of the request may be kept.
        """

    def cancel(self, conn: Answers, request_id: int) -> None:
        """End a request in flight with CANCELLED."""

    def closed(self, conn: Answers) -> None:
        """Drop all requests of a connection; called exactly once, after which nothing it sends arrives."""

    def server_info(self) -> bytes:
        """Return what `codec.pack_server_info` made."""


@dataclass(slots=True)
class NetCounters:
    """Plain counters over all connections, read at scrape.

    errors      error frames that this layer sent, by code: the refusals
    frame_read  seconds that a frame took in callbacks, from its first byte until it was complete
    parse       seconds from a complete payload to a request that may be handed on
    write       seconds of writes outside of steps: pongs, refusals, server info
    """

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    connections_open: int = 0
    connections_total: int = 0
    berth_waits: int = 0
    aborted_slow: int = 0  # the peer did not read its answers
    hangups: int = 0
    errors: dict[Code, int] = field(default_factory=lambda: dict.fromkeys(Code, 0))
    frame_read: Histogram = field(default_factory=lambda: Histogram(PART_BUCKETS))
    parse: Histogram = field(default_factory=lambda: Histogram(PART_BUCKETS))
    write: Histogram = field(default_factory=lambda: Histogram(PART_BUCKETS))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may take.

    max_frame        bytes of a payload; the arena's berths must hold as much
    frame_timeout_s  for a frame to arrive whole once it has begun, so that a slow sender cannot keep a berth
    output_cap       bytes that wait for a peer that does not read; above, the connection is aborted
    linger_s         for the peer to take the last frame and close its side
    """

    max_frame: int = MAX_FRAME
    frame_timeout_s: float = 30.0
    output_cap: int = 4 << 20
    linger_s: float = 5.0
