"""`zl ask`: one question, the answer streamed to stdout as it comes. Owns no state."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zl.cli.connecting import add_connection, add_sampling, connect, options
from zl.errors import ConfigError, ZlError
from zl.streams import standard_input

if TYPE_CHECKING:
    from zl.client import Client, Result

HELP = "ask one question"
DESCRIPTION = """\
Ask a running server one question. The answer goes to stdout as it is generated; with --stats, figures go to stderr.
Without --type, --temperature, --top-p or --seed it is the likeliest answer (temperature 0), the same each time.
"""
EPILOG = """\
examples:
  zl ask "What is the capital of France?"
  zl ask --stats --type creative "Name three rivers."
  zl ask --system "Answer in one word." --connect tcp:127.0.0.1:7433 "Largest planet?"
  zl ask --context notes.txt "What do my notes say about Tuesday?"
  echo "Write a haiku" | zl ask -
"""

_EDGE_TOKENS = 64
"""By so much less than its limit may be left of a text that was cut: tokens merge otherwise there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the question and the flags."""
    parser.add_argument("question", help="the question; - reads it from stdin")
    parser.add_argument("--stats", action="store_true", help="print tokens, times and the seed to stderr")
    add_connection(parser)
    add_sampling(parser)
    parser.add_argument("--context", metavar="FILE", help="text file that the answer should build on")
    parser.add_argument("--deadline-ms", type=int, metavar="N", help="give up when the server needs longer")


def run(args: argparse.Namespace) -> int:
    """Stream the answer; errors are raised."""
    question = standard_input().read().strip() if args.question == "-" else args.question
    if not question:
        raise ConfigError('there is no question: write zl ask "What is the capital of France?"')
    wanted = options(args)
    # One question wants the likeliest answer, the same each time: small models drawn at a profile's temperature often
    # wander off. Whoever says anything about drawing gets what was said.
    if not {"type", "temperature", "top_p", "seed"} & set(wanted):
        wanted["temperature"] = 0.0
    if args.context:
        wanted["context"] = _read(args.context)
    if args.deadline_ms is not None:
        wanted["deadline_ms"] = args.deadline_ms
    with connect(args) as client:
        start = time.monotonic()
        first = last = start
        n_tokens, ending = 0, "\n"
        try:
            with client.stream(question, **wanted) as stream:
                for chunk in stream:
                    last = time.monotonic()
                    first = first if n_tokens else last
                    n_tokens += len(chunk.token_ids)
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
                    ending = chunk.text[-1:] or ending
        finally:
            # The shell's prompt, or our error line, belongs on a line of its own.
            if n_tokens and ending != "\n":
                sys.stdout.write("\n")
                sys.stdout.flush()
        result = stream.result
        if result is not None and result.usage is not None and result.usage.truncated:
            sent = [name for name in ("system", "context") if wanted.get(name)]
            limits = " or ".join(limits_hit(sent, result.usage.prompt_tokens, _model_length(client)))
            print(f"zl: what was sent is longer than the server reads, and was cut: send less, or raise its {limits}",
                  file=sys.stderr)  # fmt: skip
        if args.stats and result is not None:
            print(figures(result, n_tokens, first - start, last - first), file=sys.stderr)
    return 0


def limits_hit(sent: Sequence[str], prompt_tokens: int, max_model_len: int) -> list[str]:
    """Name the server's settings by which a question's prompt may have been cut; the answer says only that it was.

    sent           which of system and context went with the question
    prompt_tokens  what was left of the whole
    max_model_len  of the server; 0: not known
    """
    # The whole is cut to what the answer leaves of the model's length, and that is seven eighths of it or more.
    whole = prompt_tokens >= max_model_len - max_model_len // 8 - _EDGE_TOKENS
    budgets = [f"{name}_tokens" for name in sent]
    return [*budgets, "max_model_len"] if whole or not budgets else budgets


def _model_length(client: Client) -> int:
    try:
        return client.hello().max_model_len
    except ZlError:  # the answer is there: no word of its being cut is worth an error
        return 0


def figures(result: Result, n_tokens: int, first_s: float, rest_s: float) -> str:
    """Describe an answer: `first_s` until the first token, `rest_s` from there to the last, as the client saw them."""
    speed = f", then {(n_tokens - 1) / rest_s:.1f} tokens/s" if n_tokens > 1 and rest_s > 0 else ""
    lines = [f"{n_tokens} tokens, first after {first_s * 1000:.0f} ms{speed}; "
             f"ended by {result.finish_reason.name.lower()}; seed {result.seed}"]  # fmt: skip
    usage = result.usage
    if usage is not None:
        cut = ", cut to the limit" if usage.truncated else ""
        lines.append(
            f"prompt {usage.prompt_tokens} tokens ({usage.constant_tokens} ready before{cut}); server: "
            f"queue {usage.queue_us / 1000:.1f} ms, prefill {usage.prefill_us / 1000:.1f} ms, "
            f"decode {usage.decode_us / 1000:.1f} ms, glue {usage.glue_us / 1000:.1f} ms"
        )
    return "\n".join(lines)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"--context {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--context {path} is not a text file: byte {error.start} is not UTF-8; give one that holds text"
        ) from error
