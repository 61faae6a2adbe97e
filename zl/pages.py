"""Page books: which KV page belongs to whom, and the constant pages that rows share.

State: the free list, an owner flag a page, the prefixes by their tokens; the event-loop thread alone writes them.
A `Prefix` is also read and advanced by the engine thread, in the field that says so. Refuses torch, asyncio and net.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from zl.errors import CapacityError, InvariantError
from zl.shapes import PAGE, pages_for


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens that start several prompts alike, and the constant pages that hold their KV.

    pages     int32 [n_tokens / PAGE]
    n_tokens  a multiple of PAGE
    n_done    tokens whose KV a launched step has computed: written by the engine thread only
    refs      rows that have these pages in their table: written by the event-loop thread only
    """

    key: bytes
    pages: np.ndarray
    n_tokens: int
    n_done: int = 0
    refs: int = 0
    pinned: bool = False

    @property
    def ready(self) -> bool:
        """Tell whether every token of the prefix has been computed."""
        return self.n_done >= self.n_tokens


class PageBooks:
    """Hand out pages, whole requests at a time (PagedAttention, arXiv:2309.06180, section 4.3, without preemption)."""

    def __init__(self, n_pages: int, *, max_prefixes: int = 64):
        self.n_pages = n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._owned = np.zeros(n_pages, np.bool_)
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()
        self._max_prefixes = max_prefixes
        self._dropped: list[Prefix] = []  # prefixes that rows still refer to and no new row may find
        self._distrusted = False  # set on the engine thread, seen by the next look-up
        self._idle_pages = 0  # pages of prefixes that no row refers to: evictable
        self.evictions = 0

    @property
    def n_free(self) -> int:
        """Count pages nobody owns."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Count pages that rows hold or share; constant pages that no row refers to do not count."""
        idle = sum(len(p.pages) for p in list(self._prefixes.values()) if p.refs == 0)
        return self.n_pages - len(self._free) - idle

    @property
    def constant(self) -> int:
        """Count constant pages, shared or idle; any thread: each copy is made in one go."""
        return sum(len(p.pages) for p in [*list(self._prefixes.values()), *list(self._dropped)])

    def available(self) -> int:
        """Count pages that could be handed out now, evicting idle prefixes."""
        return len(self._free) + self._idle_pages

    def take(self, n: int) -> np.ndarray:
        """Reserve `n` pages: int32 [n]. Evicts idle prefixes, oldest first; CapacityError where there are too few."""
        if n > self.available():
            raise CapacityError(f"{n} pages asked for, {self.available()} of {self.n_pages} are free")
        while n > len(self._free):
            self._evict()
        pages = np.array([self._free.pop() for _ in range(n)], np.int32)
        self._owned[pages] = True
        return pages

    def give(self, pages: np.ndarray) -> None:
        """Return pages that no step in flight can touch."""
        if len(pages) and not self._owned[pages].all():
            raise InvariantError(f"pages {pages[~self._owned[pages]].tolist()} are given back twice")
        self._owned[pages] = False
        self._free.extend(pages.tolist())

    def find_prefix(self, tokens: np.ndarray) -> Prefix | None:
        """Find the constant prefix of exactly these tokens (int32, whole pages)."""
        if self._distrusted:
            self._forget()
        return self._prefixes.get(tokens.tobytes())

    def new_prefix(self, tokens: np.ndarray) -> Prefix | None:
        """Open a prefix over fresh pages with one reference; None where the number of prefixes is at its bound."""
        if len(tokens) % PAGE or not len(tokens):
            raise InvariantError(f"a prefix holds whole pages, not {len(tokens)} tokens")
        while len(self._prefixes) >= self._max_prefixes:
            if not any(p.refs == 0 and not p.pinned for p in self._prefixes.values()):
                return None
            self._evict()
        prefix = Prefix(tokens.tobytes(), self.take(pages_for(len(tokens))), len(tokens), refs=1)
        self._prefixes[prefix.key] = prefix
        return prefix

    def share(self, prefix: Prefix) -> None:
        """Add a reference and make the prefix the youngest."""
        if prefix.refs == 0 and not prefix.pinned:
            self._idle_pages -= len(prefix.pages)
        prefix.refs += 1
        self._prefixes.move_to_end(prefix.key)

    def unshare(self, prefix: Prefix) -> None:
        """Drop a reference; a prefix that nobody finished computing goes with its last one."""
        if prefix.refs <= 0:
            raise InvariantError(f"prefix of {prefix.n_tokens} tokens has no reference left to drop")
        prefix.refs -= 1
        if prefix.refs == 0 and prefix in self._dropped:
            self._dropped.remove(prefix)
            self.give(prefix.pages)
        elif prefix.refs == 0 and not prefix.pinned:
            self._idle_pages += len(prefix.pages)
            if not prefix.ready:
                self._drop(prefix)

    def pin(self, prefix: Prefix) -> None:
        """Keep the prefix for good: the configured system prompts."""
        if prefix.refs == 0 and not prefix.pinned:
            self._idle_pages -= len(prefix.pages)
        prefix.pinned = True

    def distrust(self) -> None:
        """Let no new row find what constant pages hold now: a damaged program may have computed it. Any thread."""
        self._distrusted = True

    def _forget(self) -> None:
        """Drop every prefix: idle ones at once, others with their last row."""
        self._distrusted = False
        for prefix in list(self._prefixes.values()):
            if prefix.refs:
                del self._prefixes[prefix.key]
                self._dropped.append(prefix)
            else:
                self._idle_pages += len(prefix.pages) if prefix.pinned else 0
                self._drop(prefix)

    def _evict(self) -> None:
        for prefix in self._prefixes.values():
            if prefix.refs == 0 and not prefix.pinned:
                self._drop(prefix)
                self.evictions += 1
                return
        raise InvariantError("no idle prefix left to evict, though the books say so")

    def _drop(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.key]
        self._idle_pages -= len(prefix.pages)
        self.give(prefix.pages)

    def check(self, held: list[np.ndarray]) -> None:
        """Recount from nothing; raise InvariantError where a page is lost or shared. `held`: the pages of each row."""
        owners = np.zeros(self.n_pages, np.int64)
        np.add.at(owners, np.array(self._free, np.int64), 1)
        for pages in [*held, *(p.pages for p in [*self._prefixes.values(), *self._dropped])]:
            np.add.at(owners, pages, 1)
        if (owners != 1).any():
            wrong = np.flatnonzero(owners != 1)
            raise InvariantError(f"pages {wrong[:8].tolist()} have {owners[wrong[:8]].tolist()} owners, each needs one")
        idle = sum(len(p.pages) for p in self._prefixes.values() if p.refs == 0 and not p.pinned)
        if idle != self._idle_pages:
            raise InvariantError(f"{idle} constant pages are idle, the books say {self._idle_pages}")
