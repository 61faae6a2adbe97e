"""Debug mode: what a captured program points at must stay where it was. State: the addresses at capture.

A captured graph holds addresses, not names: an array that is bound anew afterwards is silently never read again.
Refuses torch, rows, net and asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zl.errors import InvariantError


class Addresses:
    """Remember every address once; `check` compares them with where things are now.

    listed  gives (name, address) of everything that the program reads or writes
    """

    def __init__(self, listed: Callable[[], Iterable[tuple[str, int]]]):
        self._listed = listed
        self._known = dict(listed())

    def __len__(self) -> int:
        return len(self._known)

    def check(self) -> None:
        """Raise InvariantError, with names, if anything moved, vanished or came since capture."""
        now = dict(self._listed())
        if now == self._known:
            return
        moved = sorted(name for name in now.keys() | self._known.keys() if now.get(name) != self._known.get(name))
        raise InvariantError(f"moved since capture, so the captured program misses it: {', '.join(moved[:5])}")
