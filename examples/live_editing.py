"""Comment on a text while it is typed: each line of stdin is the text's newest state.

Nothing is sent before a second of quiet, and a further edit cancels the comment that is being written.

    python examples/live_editing.py
"""

from __future__ import annotations

import asyncio
import sys

from zl.client import AsyncClient, Debounce


def show(piece: str | None) -> None:
    """Print a piece of the comment; None begins a new one."""
    print("\n> " if piece is None else piece, end="", flush=True)


async def main() -> None:
    loop = asyncio.get_running_loop()
    async with AsyncClient() as client, Debounce(client, show) as live:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            live.edit(line.strip(), system="Comment on this text in one sentence.", max_tokens=48)
        await live.answer()
    print()


if __name__ == "__main__":
    asyncio.run(main())
