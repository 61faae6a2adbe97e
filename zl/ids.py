"""A prompt's token ids by where they lie: numbers of the server's own, or spans of the berth that a request came in.

State: of each `Ids` the berth, if any, until it is given back. The program reads a berth's ids itself
(`gpu.pinned.RowColumns`): the host looks only at those that name a shared prefix. Refuses torch, asyncio, net and text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zl.errors import InvariantError
from zl.lease import Lease
from zl.shapes import MAX_PIECES, OWN, TOKEN_BYTES


class Ids:
    """The ids of one prompt, in pieces.

    own     int32 [n], copied into the row's own place when it is seated; no more than the prompt has
    pieces  (source, tokens) in the prompt's order; sources as in RowColumns.piece_source
    lease   the berth that pieces lie in, with `arena`, uint8 [n]: the memory that their sources count from
    Raises  InvariantError: more own ids than tokens, or more pieces than a row takes
    """

    __slots__ = ("_arena", "_lease", "_n", "own", "pieces")

    def __init__(
        self,
        own: np.ndarray,
        pieces: Sequence[tuple[int, int]],
        lease: Lease | None = None,
        arena: np.ndarray | None = None,
    ):
        self.own = own
        self.pieces = pieces
        self._lease = lease
        self._arena = arena
        self._n = sum(n for _, n in pieces)
        if len(own) > self._n or len(pieces) > MAX_PIECES:
            raise InvariantError(f"a prompt of {self._n} tokens in {len(pieces)} pieces has {len(own)} ids of its own")

    @classmethod
    def of(cls, ids: np.ndarray | Sequence[int]) -> Ids:
        """Keep ids of the server's own, int32 [n]."""
        return cls(np.asarray(ids, np.int32), [(OWN, len(ids))])

    def __len__(self) -> int:
        return self._n

    def head(self, n: int) -> np.ndarray:
        """Copy the first `n` ids, int32 [n]; not after the berth has been given back, by whomever.

        Raises  InvariantError: the berth has been given back
        """
        parts = []
        for source, length in self.pieces:
            take = min(n, length)
            if source < 0:
                parts.append(self.own[~source : ~source + take])
            elif self._arena is None or not self._held:
                raise InvariantError("ids are read from a berth that has been given back")
            else:
                parts.append(self._arena[source : source + TOKEN_BYTES * take].view("<i4"))
            n -= take
            if not n:
                break
        return np.concatenate(parts) if parts else self.own[:0]

    @property
    def there(self) -> bool:
        """Tell whether the program can still gather them."""
        return self._held or all(source < 0 for source, _ in self.pieces)

    @property
    def _held(self) -> bool:
        return self._lease is not None and not self._lease.ended

    def give_back(self) -> None:
        """Let the berth go: the program has gathered the ids, or never will. No effect the second time."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end()

