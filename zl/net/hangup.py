"""Notice that a half-closed peer has gone for good.

A peer that closes its socket looks at first like one that only stopped sending: both send the same end of stream. After
that a loop stops reading, and would learn of a reset only from a write that fails. Linux reports EPOLLHUP and EPOLLERR
without being asked for any event, so half-closed sockets are watched with an empty event mask: a Unix peer's full close
shows at once, a TCP peer's with the reset that answers the next frame (epoll_ctl(2), EPOLLHUP).

State: one epoll instance and who is watched through it. Refuses torch, text and dispatch.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable


class HangupWatch:
    """Call back once when a watched socket's peer has gone. One per loop; `close` it."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[], None]] = {}
        # The epoll instance is itself readable when one of its sockets has something to report.
        loop.add_reader(self._epoll.fileno(), self._on_ready)

    @property
    def n_watched(self) -> int:
        """Count the sockets that are watched."""
        return len(self._watched)

    def watch(self, fd: int, on_hangup: Callable[[], None]) -> None:
        """Watch a socket until it hangs up or is forgotten."""
        with contextlib.suppress(FileNotFoundError):
            self._epoll.unregister(fd)
        self._watched[fd] = on_hangup
        self._epoll.register(fd, 0)

    def forget(self, fd: int, on_hangup: Callable[[], None]) -> None:
        """Stop watching, unless the number has gone to another socket meanwhile."""
        if self._watched.get(fd) != on_hangup:
            return
        del self._watched[fd]
        with contextlib.suppress(OSError):  # a closed socket has left the epoll set by itself
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop watching everything."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._watched.clear()

    def _on_ready(self) -> None:
        for fd, _ in self._epoll.poll(0):
            on_hangup = self._watched.pop(fd, None)
            self._epoll.unregister(fd)
            if on_hangup is not None:
                on_hangup()
