"""Who computes how much of a prompt in a step: the rows that prefill share what the decoding rows leave.

State: none; `Seat` is the engine thread's. Refuses torch, asyncio, net, rows and dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zl.sampling.profiles import GENERIC

if TYPE_CHECKING:
    from zl.rows import Ticket


@dataclass(slots=True, eq=False)
class Seat:
    """What the engine knows of a row it computes."""

    ticket: Ticket
    prompt_len: int
    prefix: Any  # pages.Prefix or None
    program: int = GENERIC  # what samples it: an index in sampling.profiles.PROGRAMS
    decoding: bool = False
    computed: int = 0  # tokens whose KV a launched step has written
    begun: bool = False
    last_step: int = -1  # the newest launched step that touches the row
    gone: bool = False


def share_out(prefill: Sequence[Seat], room: int, each: int | None) -> list[tuple[Seat, int]]:
    """Share a step's prefill tokens among the prompts that wait, oldest first; seats that get none are left out.

    room  tokens that the step can still hold
    each  beside decoding rows: tokens that every waiting prompt adds to what all of them may have, so that one long
          prompt stretches a step little and a burst is not held back; None where nothing decodes

    A prompt leaves half to those behind it. Prefixes are computed once: rows that share one wait while the oldest
    computes it.
    """
    waiting: list[tuple[Seat, int]] = []
    leading: set[int] = set()
    for seat in prefill:
        prefix = seat.prefix
        goal = seat.prompt_len
        if prefix is not None and seat.computed < prefix.n_tokens:
            seat.computed = max(seat.computed, prefix.n_done)
            if not prefix.ready:
                if id(prefix) in leading:
                    continue
                leading.add(id(prefix))
                goal = prefix.n_tokens
        waiting.append((seat, goal - seat.computed))
    if not waiting:
        return []
    budget = room if each is None else min(room, each * len(waiting))
    taken = [0] * len(waiting)
    for i, (_, left) in enumerate(waiting):  # at most half of what is left while others wait: short ones overtake
        bound = budget if i + 1 == len(waiting) else (budget + 1) // 2
        taken[i] = min(left, bound)
        budget -= taken[i]
    for i, (_, left) in enumerate(waiting):  # the rest to the oldest
        take = min(left - taken[i], budget)
        taken[i] += take
        budget -= take
    return [(seat, take) for (seat, _), take in zip(waiting, taken, strict=True) if take]
