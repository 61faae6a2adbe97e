"""What a request's token ids cost on their way to the program: `python -m bench.micro.tokens`.

The question behind it: may the GPU read the ids of a TOKENS request from the berth that they arrived in, not from
the row's prompt column (docs/design.md, "Where token ids lie")? Times are the best of many runs, on one thread.
State: none.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from zl.net import codec
from zl.service import _known
from zl.text.prompt import _unpacked

VOCAB = 49_152


def best_us(work: Callable[[], object], repeats: int = 300) -> float:
    """Time one call, in microseconds."""
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best * 1e6


def measure(n_tokens: int) -> dict[str, float]:
    """Time each thing that happens to `n_tokens` ids between the socket and the prompt column: microseconds by name."""
    rng = random.Random(1)
    packed = codec.pack_tokens([rng.randrange(VOCAB) for _ in range(n_tokens)])
    frame = codec.encode_request(request_id=1, messages=[packed], encoding=codec.Encoding.TOKENS)
    berth = memoryview(bytearray(frame[4:]))
    request = codec.decode_request(berth)
    numbers = _unpacked(request.messages[0], "messages[0]")
    ids = np.array(numbers, np.int32)
    column = np.zeros((256, max(4096, n_tokens)), np.int32)

    def store() -> None:
        column[3, :n_tokens] = ids

    return {
        "fields out of the berth (protobuf)": best_us(lambda: codec.decode_request(berth)),
        "every id against the vocabulary": best_us(lambda: _known(request, VOCAB)),
        "the same, one id at a time": best_us(lambda: codec.check_tokens(request, VOCAB)),
        "ids as numbers, for layout and budgets": best_us(lambda: _unpacked(request.messages[0], "messages[0]")),
        "numbers as one array": best_us(lambda: np.array(numbers, np.int32)),
        "copy into the prompt column": best_us(store),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 512, 4032], help="ids of a request")
    args = parser.parse_args(arguments)
    found = {n: measure(n) for n in args.tokens}
    print(f"{'microseconds, ids of a request:':42}" + "".join(f"{n:>9,}" for n in found))
    for name in next(iter(found.values())):
        print(f"{name:42}" + "".join(f"{times[name]:9.1f}" for times in found.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
