"""vLLM's own glue, timed inside .venv-vllm at the caller's pace: `NAME N` on stdin, nanoseconds an operation on stdout.

Owns the objects under test. Uses vLLM's request and stream-chunk models and, for the prompt, the tokenizer call that
its renderer makes. Says `ready` first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)


def main(body_file: str, model: str) -> None:
    """Answer until stdin ends."""
    with open(body_file, "rb") as file:
        body = file.read()
    parsed = json.loads(body)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def chunk() -> str:
        choice = ChatCompletionResponseStreamChoice(index=0, delta=DeltaMessage(content=" word"), finish_reason=None)
        chunk = ChatCompletionStreamResponse(
            id="chatcmpl-0123456789abcdef", object="chat.completion.chunk", created=1, choices=[choice], model="model"
        )
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

    operations: dict[str, Callable[[], object]] = {
        "json": lambda: json.loads(body),
        "validate": lambda: ChatCompletionRequest.model_validate(parsed),
        "parse": lambda: ChatCompletionRequest.model_validate(json.loads(body)),
        "prompt": lambda: tokenizer.apply_chat_template(parsed["messages"], add_generation_prompt=True),
        "chunk": chunk,
    }
    print("ready", flush=True)
    for line in sys.stdin:
        name, n = line.split()
        work = operations[name]
        begun = time.perf_counter_ns()
        for _ in range(int(n)):
            work()
        print((time.perf_counter_ns() - begun) / int(n), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
