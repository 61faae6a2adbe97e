"""transformers as the plain baseline, run inside .venv-transformers: `generate` on a left-padded static batch.

`--mode static` takes whoever waits, up to --streams, into one batch and runs it to its end; who comes later waits.
`--mode continuous` uses the library's own continuous batching. State: the model and the streams; imports torch,
transformers and sse_server only.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import threading
import time
from typing import Any

import torch
from sse_server import Hub, Stream, serve, start_engine
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

_GATHER_S = 0.02


class Engine:
    """The model and its loop, on a thread of its own."""

    def __init__(self, hub: Hub, args: argparse.Namespace):
        torch.set_num_threads(args.threads)
        self._hub = hub
        self._streams = args.streams
        self._tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        attention = {"attn_implementation": "paged|sdpa"} if args.mode == "continuous" else {}
        self._model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, **attention).eval()
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token_id = self._tokenizer.eos_token_id
        self._waiting: queue.SimpleQueue[tuple[dict[str, Any], Stream]] = queue.SimpleQueue()
        self._names: dict[str, Any] = {}
        self._manager: Any = None
        run = self._run_static
        if args.mode == "continuous":
            self._lock = threading.Lock()
            run = self._run_continuous
        start_engine(run, "tf-loop")

    def submit(self, body: dict[str, Any], stream: Stream) -> None:
        """Queue a request; called on the event-loop thread."""
        self._waiting.put((body, stream))

    def _settings(self, body: dict[str, Any], max_new: int) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            temperature=body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0),
            top_k=0,
            repetition_penalty=body.get("repetition_penalty", 1.0),
            max_new_tokens=max_new,
            eos_token_id=None,  # ignore_eos
            pad_token_id=self._tokenizer.pad_token_id,
        )

    def _prompt(self, body: dict[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)

    @torch.inference_mode()
    def _run_static(self) -> None:
        while True:
            taken = [self._waiting.get()]
            time.sleep(_GATHER_S)
            while len(taken) < self._streams and not self._waiting.empty():
                taken.append(self._waiting.get())
            bodies = [body for body, _ in taken]
            batch = self._tokenizer(
                [self._prompt(b) for b in bodies], return_tensors="pt", padding=True, add_special_tokens=False
            )
            lengths = batch["attention_mask"].sum(1).tolist()
            wanted = [body["max_tokens"] for body in bodies]
            followers = [
                (stream, n, length) for (_, stream), n, length in zip(taken, wanted, lengths, strict=True)
            ]
            self._model.generate(
                **batch,
                generation_config=self._settings(bodies[0], max(wanted)),
                streamer=_Fan(self._hub, self._tokenizer, followers),
            )

    def _run_continuous(self) -> None:
        body, stream = self._waiting.get()
        # One set of sampling values holds for a manager; requests of a scenario share theirs.
        self._manager = self._model.init_continuous_batching(generation_config=self._settings(body, 1))
        self._manager.start()
        start_engine(self._deliver, "tf-results")
        while True:
            ids = self._tokenizer(self._prompt(body), add_special_tokens=False)["input_ids"]
            with self._lock:
                name = self._manager.add_request(ids, max_new_tokens=body["max_tokens"], streaming=True)
                self._names[name] = [stream, len(ids), 0]
            body, stream = self._waiting.get()

    def _deliver(self) -> None:
        while True:
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                continue
            with self._lock:
                entry = self._names[result.request_id]
            new = result.generated_tokens[entry[2] :]
            entry[2] += len(new)
            for token in new:
                entry[0].tokens(self._tokenizer.decode([token]))
            if result.is_finished():
                entry[0].end(entry[1], entry[2])
                with self._lock:
                    del self._names[result.request_id]


class _Fan:
    """A streamer that hands each row's token to its own stream."""

    def __init__(self, hub: Hub, tokenizer: Any, followers: list[tuple[Stream, int, int]]):
        self._hub, self._tokenizer, self._followers = hub, tokenizer, followers
        self._n = -1

    def put(self, value: torch.Tensor) -> None:
        """Take one token of each row; the first call carries the prompts."""
        self._n += 1
        if not self._n:
            return
        with self._hub.step():
            for token, (stream, wanted, length) in zip(value.tolist(), self._followers, strict=True):
                if self._n <= wanted:
                    stream.tokens(self._tokenizer.decode([token]))
                if self._n == wanted:
                    stream.end(length, wanted)

    def end(self) -> None:
        """All rows have ended; each stream was told on its own last token."""


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", choices=("static", "continuous"), default="static")
    args = parser.parse_args()
    asyncio.run(serve("127.0.0.1", args.port, lambda hub: Engine(hub, args).submit))


if __name__ == "__main__":
    main()
