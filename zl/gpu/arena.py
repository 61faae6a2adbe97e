"""The arena: host memory that payloads land in, one page-aligned anonymous mmap cut into fixed berths.

State: the mapping, the free list, and the queue of those who wait for a berth. One thread (the event loop) uses it.
Registration with a device is a callable given by constructor, so that CUDA and CPU take the same path. Refuses torch,
numpy, asyncio and everything of zl but shapes and errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable

from zl.errors import CapacityError, InvariantError
from zl.shapes import MAX_FRAME


def _no_register(_address: int, _n_bytes: int) -> None:
    """Stand in for the device's registration where there is no device."""


def _no_unregister(_address: int) -> None:
    """Stand in for the device's deregistration where there is no device."""


class Berth:
    """One frame's place in the arena: `view` is writable, `max_frame` bytes long and lives as long as the arena."""

    __slots__ = ("address", "held", "index", "view")

    def __init__(self, index: int, view: memoryview, address: int):
        self.index = index
        self.view = view
        self.address = address
        self.held = False


class Lease:
    """A berth that outlives its frame: what arrived in it stays in place until `end`.

    Whoever holds one needs no other berth to come to its end, so waiting for berths cannot go round in a circle.
    """

    __slots__ = ("_arena", "_berth")

    def __init__(self, arena: Arena, berth: Berth):
        self._arena = arena
        self._berth: Berth | None = berth

    @property
    def ended(self) -> bool:
        """Tell whether the berth has been given back."""
        return self._berth is None

    def offset(self, part: memoryview) -> int:
        """Return the byte of the arena that a view of the berth begins at.

        Raises  InvariantError: the view is not of this berth, or the lease has ended
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(part))
        berth = self._berth
        if berth is None or not 0 <= address - berth.address <= len(berth.view) - len(part):
            raise InvariantError("arena: a view that is not of the leased berth")
        return address - self._arena.address

    def end(self) -> None:
        """Give the berth back; no effect the second time."""
        berth, self._berth = self._berth, None
        if berth is not None:
            self._arena.take_back(berth)


class Arena:
    """Hand out berths and take them back; whoever finds none free waits its turn, first come first served.

    n_berths    frames that can be on their way in at the same time
    max_frame   bytes of one berth's view; berths start on page boundaries
    register    called once with (address, n_bytes) when the memory has been touched, e.g. cudaHostRegister
    unregister  called once with (address) before the memory is given back
    Raises      CapacityError: the memory cannot be mapped
    """

    def __init__(
        self,
        n_berths: int,
        max_frame: int = MAX_FRAME,
        *,
        register: Callable[[int, int], None] = _no_register,
        unregister: Callable[[int], None] = _no_unregister,
    ):
        if n_berths < 1 or max_frame < 1:
            raise CapacityError(f"arena of {n_berths} berths of {max_frame} bytes: both must be at least 1")
        page = mmap.PAGESIZE
        stride = -(-max_frame // page) * page
        self.n_berths = n_berths
        self.max_frame = max_frame
        self.n_bytes = n_berths * stride
        try:
            self._map = mmap.mmap(-1, self.n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"arena of {n_berths} berths: {self.n_bytes} bytes cannot be mapped ({error}); use fewer berths"
            ) from None
        with contextlib.suppress(OSError, AttributeError):  # a kernel without transparent huge pages still serves
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        # One write a page, now: a page fault while serving would stall the loop, and pinning wants resident pages.
        self._view[::page] = bytes(self.n_bytes // page)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor  # an export left behind would keep the mapping from closing
        self._unregister = unregister
        register(self.address, self.n_bytes)
        self._berths = tuple(
            Berth(i, self._view[i * stride : i * stride + max_frame], self.address + i * stride)
            for i in range(n_berths)
        )
        self._free = list(reversed(self._berths))  # a stack: the berth used last is the warmest in the cache
        self._waiters: OrderedDict[Hashable, Callable[[Berth], None]] = OrderedDict()
        self._n_lent = 0
        self._closed = False

    @property
    def memory(self) -> memoryview:
        """Show all of the arena, writable bytes; a view of it that lives keeps `close` from unmapping."""
        return self._view

    @property
    def in_use(self) -> int:
        """Count the berths that are held."""
        return self.n_berths - len(self._free)

    @property
    def waiting(self) -> int:
        """Count those who wait for a berth."""
        return len(self._waiters)

    def acquire(self) -> Berth | None:
        """Take a free berth; None when all are held: then `wait`."""
        if not self._free:
            return None
        berth = self._free.pop()
        berth.held = True
        return berth

    def wait(self, owner: Hashable, on_free: Callable[[Berth], None]) -> None:
        """Queue for a berth: `on_free` gets one, already held, when the turn comes. One place in the queue an owner.

        Raises  InvariantError: a berth is free, or the owner waits already
        """
        if self._free or owner in self._waiters:
            raise InvariantError("arena: waiting with a berth free, or twice for one owner")
        self._waiters[owner] = on_free

    def forget(self, owner: Hashable) -> None:
        """Leave the queue; no effect on one who is not in it."""
        self._waiters.pop(owner, None)

    def release(self, berth: Berth) -> None:
        """Give a berth back; it goes straight to the one who waits longest.

        Raises  InvariantError: it is not held, or not of this arena
        """
        if not berth.held or self._berths[berth.index] is not berth:
            raise InvariantError(f"arena: berth {berth.index} released without being held here")
        if self._waiters:
            _, on_free = self._waiters.popitem(last=False)
            on_free(berth)
            return
        berth.held = False
        self._free.append(berth)

    @property
    def lent(self) -> int:
        """Count the berths that outlive their frames."""
        return self._n_lent

    def lend(self, berth: Berth) -> Lease | None:
        """Lend a held berth beyond its frame; None where that cannot be: then copy what is needed and `release` it.

        At most half of the berths are lent, so that frames still come in, those that end a request among them.
        """
        if 2 * (self._n_lent + 1) > self.n_berths or sys.byteorder != "little":  # ids are read as they travel
            return None
        self._n_lent += 1
        return Lease(self, berth)

    def take_back(self, berth: Berth) -> None:
        """Take a lent berth back; as `release`."""
        self._n_lent -= 1
        self.release(berth)

    def check(self) -> None:
        """Recount the books from nothing.

        Raises  InvariantError: they do not balance
        """
        free = {berth.index for berth in self._free}
        held = {berth.index for berth in self._berths if berth.held}
        if len(free) != len(self._free) or free & held or len(free) + len(held) != self.n_berths:
            raise InvariantError(f"arena: {len(self._free)} on the free list, {len(held)} held, of {self.n_berths}")
        if not 0 <= self._n_lent <= min(len(held), self.n_berths // 2):
            raise InvariantError(f"arena: {self._n_lent} lent, {len(held)} held, of {self.n_berths}")
        if self._free and self._waiters:
            raise InvariantError(f"arena: {len(self._waiters)} wait while {len(self._free)} berths are free")

    def close(self) -> None:
        """Unregister and unmap; no effect the second time.

        Raises  InvariantError: a berth is still held
        """
        if self._closed:
            return
        if self.in_use:
            raise InvariantError(f"arena: closed with {self.in_use} berths held")
        self._closed = True
        self._unregister(self.address)
        for berth in self._berths:
            berth.view.release()
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            raise InvariantError("arena: closed while something looks into it; it is unmapped with that") from None
