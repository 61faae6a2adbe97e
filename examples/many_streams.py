"""Ask many questions at once over one connection, and print each answer when it is whole.

    python examples/many_streams.py 100
"""

from __future__ import annotations

import asyncio
import sys
import time

from zl.client import AsyncClient


async def main(n: int) -> None:
    begun = time.monotonic()
    async with AsyncClient() as client:

        async def ask(number: int) -> int:
            answer = await client.ask(f"Name {number} things that are red.", max_tokens=32, seed=number)
            print(f"{number}: {answer.text!r}")
            return len(answer.token_ids)

        tokens = sum(await asyncio.gather(*(ask(i) for i in range(1, n + 1))))
    print(f"{n} answers, {tokens} tokens, {tokens / (time.monotonic() - begun):.0f} tokens/s")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
