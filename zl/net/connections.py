"""All connections of one server, and what they share: the application, the arena, limits and counters.

State: the connections; when one was accepted last; when the log was last told that descriptors run out. Refuses torch,
text and dispatch.
"""

from __future__ import annotations

import asyncio
import logging
import math

from zl.net import codec, protocol
from zl.net.hangup import HangupWatch
from zl.net.host import Application, Berths, Limits, NetCounters

log = logging.getLogger("zl")

SCRATCH_BYTES = 65_536

SPARE_FILES = 8
"""A connection whose descriptor is so close to the limit of open files is one of the last that can be had."""

WARNING_S = 60.0
"""Longest silence of the log about that."""


class Net:
    """What all connections of one server share; made by the composition root, which calls `close` at the end.

    max_files  how many descriptors this process may have
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        app: Application,
        arena: Berths,
        limits: Limits | None = None,
        counters: NetCounters | None = None,
        auth_token: bytes | None = None,
        decode: codec.Decoder | None = None,
        max_files: int = 1 << 31,
    ):
        self.loop = loop
        self.app = app
        self.arena = arena
        self.limits = limits or Limits()
        self.counters = counters or NetCounters()
        self.auth_token = auth_token
        self.decode = decode
        self._max_files = max_files
        self._warned_at = -math.inf  # loop time of the last warning that they run out
        self.connections: set[protocol.Connection] = set()
        self.hangups = HangupWatch(loop)
        self._accepted_at = -math.inf  # loop time of the last one
        self._n_shaking_hands = 0  # accepted and not connected yet; those that failed at it stay counted
        # Where bytes land that nobody will read: all connections may scribble on it at once.
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))

    def connection(self) -> protocol.Connection:
        """Make the protocol of a new connection: the factory that a listener calls."""
        self._accepted_at = self.loop.time()
        self._n_shaking_hands += 1
        return protocol.Connection(self)

    def connected(self, conn: protocol.Connection) -> None:
        """Take a connection over which frames may come."""
        self._n_shaking_hands -= 1
        self.connections.add(conn)
        if conn.fd >= self._max_files - SPARE_FILES:  # the kernel gives the lowest free number
            self._warn_of_files()

    def _warn_of_files(self) -> None:
        # Beyond the limit uvloop takes connections and resets them, without a word to anybody.
        now = self.loop.time()
        if now < self._warned_at + WARNING_S:
            return
        self._warned_at = now
        log.warning("%d connections, close to the limit of %d open files: those beyond it will be reset; raise "
                    "LimitNOFILE= in the unit, or ulimit -Hn where zl is started by hand",
                    len(self.connections), self._max_files)  # fmt: skip

    @property
    def expecting(self) -> bool:
        """Say whether a peer may be about to ask, not knowing of a drain: it is to hear that no answer comes."""
        now = self.loop.time()
        if self._n_shaking_hands and self._accepted_at > now - protocol.LAST_CALL_S:
            return True
        return any(conn.is_about_to_ask(now) for conn in self.connections)

    @property
    def sending(self) -> bool:
        """Say whether bytes wait for a peer that has not read what was sent before."""
        return any(conn.is_sending for conn in self.connections)

    @property
    def telling(self) -> bool:
        """Say whether a peer of an ended conversation may not have taken the last words yet."""
        now = self.loop.time()
        return any(conn.is_telling(now) for conn in self.connections)

    def close_connections(self) -> None:
        """End every conversation after what has been queued for it, cancelling what is still in flight."""
        for conn in list(self.connections):
            conn.close()

    def close(self) -> None:
        """Give up the watch; after every connection is gone."""
        self.hangups.close()
