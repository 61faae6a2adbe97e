"""What the host does for a TOKENS request between the socket and its row: `python -m bench.micro.tokens`.

The ids stay in the berth that they arrived in; the program reads them there when the row begins (docs/design.md,
"Where token ids lie"). The last line shows the way not taken: ids as numbers, joined with the template's, and copied.
Times are the best of many runs, on one thread. State: none.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from zl.admission import known
from zl.gpu.arena import Arena
from zl.gpu.pinned import RowColumns
from zl.gpu.weights import open_model
from zl.ids import Ids
from zl.net import codec
from zl.net.native.library import open_code
from zl.pull import locate
from zl.shapes import Shapes
from zl.text.outline import CONTEXT, placed
from zl.text.prompt import PromptBuilder
from zl.text.tokenizer import text_model


def best_us(work: Callable[[], object], repeats: int = 300) -> float:
    """Time one call, in microseconds."""
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best * 1e6


def measure(prompts: PromptBuilder, vocab: int, n_tokens: int) -> dict[str, float]:
    """Time each thing that happens to `n_tokens` ids of one message: microseconds by name."""
    rng = random.Random(1)
    packed = codec.pack_tokens([rng.randrange(vocab) for _ in range(n_tokens)])
    payload = codec.encode_request(request_id=1, messages=[packed], encoding=codec.Encoding.TOKENS)[4:]
    arena, decode = Arena(2), open_code().decode
    assert decode is not None
    berth = arena.acquire()
    assert berth is not None
    lease = arena.lend(berth)
    berth.view[: len(payload)] = payload
    columns = RowColumns(Shapes(), arena=np.frombuffer(arena.memory, np.uint8))
    view = berth.view[: len(payload)]
    request = decode(view)
    assert request is not None
    contents = {0: request.system, 1: request.messages[0], CONTEXT: request.context}
    outline = prompts.outline(0, [n_tokens], 0)
    ids = placed(outline, contents, lease, columns.arena)
    literals = outline.literals

    def whole() -> None:
        found = decode(view)
        assert found is not None
        known(found, vocab)
        made = prompts.outline(0, [len(found.messages[0]) // 4], 0)
        fields = {0: found.system, 1: found.messages[0], CONTEXT: found.context}
        there = placed(made, fields, lease, columns.arena)
        columns.put_prompt(3, there.own, there.pieces)

    def by_numbers() -> None:
        numbers = literals.tolist() + np.frombuffer(request.messages[0], "<i4").tolist()
        copied = Ids.of(np.array(numbers, np.int32))
        columns.put_prompt(3, copied.own, copied.pieces)

    return {
        "fields out of the berth (native)": best_us(lambda: decode(view)),
        "every id against the vocabulary": best_us(lambda: known(request, vocab)),
        "layout, by the lengths alone": best_us(lambda: prompts.outline(0, [n_tokens], 0)),
        "where the pieces lie": best_us(lambda: placed(outline, contents, lease, columns.arena)),
        "the row's columns": best_us(lambda: columns.put_prompt(3, ids.own, ids.pieces)),
        "all of it": best_us(whole),
        "not taken: the ids as numbers": best_us(by_numbers),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 512, 4032], help="ids of a request")
    parser.add_argument("--model", type=Path, default=locate("smollm2-135m-instruct"))
    args = parser.parse_args(arguments)
    text = text_model(open_model(args.model))
    prompts = PromptBuilder(text, Shapes())
    found = {n: measure(prompts, text.vocab_size, n) for n in args.tokens}
    print(f"{'microseconds, ids of a request:':42}" + "".join(f"{n:>9,}" for n in found))
    for name in next(iter(found.values())):
        print(f"{name:42}" + "".join(f"{times[name]:9.1f}" for times in found.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
