"""Does a long prompt stretch the gaps of running streams? `python -m bench.long` measures it in one run.

32 streams run; a 3,500-token prompt arrives; for each stream the largest gap from then on is divided by the stream's
median gap. Exit status 1 where the worst stream is over the limit. State: the server that it starts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench import serve
from bench.drivers import MissingPeerError, Plan, driver, known
from bench.scenarios import SCENARIOS

LIMIT = 3.0


async def run(args: argparse.Namespace) -> list[dict[str, float]]:
    """Start one server, warm it up, measure the rounds; return their figures."""
    scenario = SCENARIOS["long"]
    size = serve.size_of(args, "long")
    logs = serve.CACHE / "bench/logs"
    logs.mkdir(parents=True, exist_ok=True)
    plan = Plan(args.gguf, args.hf_folder, size.streams + 1, scenario.row_tokens(size), args.threads)
    subject = serve.Subject(driver(args.system), plan, logs)
    found = []
    try:
        await subject.start()
        await scenario.run(subject.client, size, args.seed + 9_000)
        for number in range(args.rounds):
            outcome = await scenario.run(subject.client, size, args.seed + number)
            failed = [t.error for t in outcome.traces if t.error]
            if failed:
                raise RuntimeError(f"{len(failed)} of {len(outcome.traces)} requests failed, the first: {failed[0]}")
            found.append(outcome.extra)
    finally:
        await subject.stop()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0: within the limit, 1: not, or not measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.long", description=__doc__)
    parser.add_argument("--system", choices=known(), default="zl")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each running stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=LIMIT, help="largest gap over median gap that is allowed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, default=serve.DEFAULT_GGUF)
    parser.add_argument("--hf-folder", type=Path)
    args = parser.parse_args(argv)
    args.systems, args.per_stream, args.idle = [args.system], 1, 0
    args.arrivals_seconds, args.prompts = 0.0, Path()
    try:
        args.hf_folder = serve.hf_folder(args)
        found = uvloop.run(run(args))
    except (MissingPeerError, RuntimeError, ValueError) as error:
        print(f"bench.long: {error}", file=sys.stderr)
        return 1
    for number, figures in enumerate(found):
        print(
            f"round {number}: worst largest/median gap {figures['worst_stretch']:.2f} of {args.streams} streams "
            f"(median stream {figures['median_stretch']:.2f}), "
            f"long prompt of {figures['long_prompt_tokens']:.0f} tokens "
            f"had its first token after {figures['long_first_s']:.2f} s, "
            f"{figures['running_at_long_first_token']:.0f} streams still running then"
        )
    worst = sorted(figures["worst_stretch"] for figures in found)[len(found) // 2]
    print(f"median of {len(found)} rounds: {worst:.2f}, the limit is {args.limit:g}")
    return 0 if worst <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
