"""llama.cpp by its low-level interface, one sequence a stream, continuous batching: run inside .venv-llamacpp.

Its Python server answers one request at a time; this drives the same library the way llama.cpp's own server does: every
decode carries one token of each running stream and the prompts of new ones, up to a batch. Sampling is the library's
own chain in the order that llama.cpp uses, with its usual top-k of 40 in front (without it top-p sorts the vocabulary)
and its usual penalty window of 64 tokens: both are cheaper than what the others do.
State: the model, its context and the streams. Imports llama_cpp and sse_server only.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import ctypes
import queue
from dataclasses import dataclass, field
from typing import Any

import llama_cpp as ll
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from sse_server import Hub, Stream, serve, start_engine

_PIECE_BYTES = 256


@dataclass
class Seat:
    """One sequence of the context and the stream that uses it."""

    seq: int
    stream: Stream
    prompt: list[int]
    max_tokens: int
    sampler: Any
    n_prefilled: int = 0
    n_past: int = 0
    n_new: int = 0
    last: int = 0
    output: int = -1  # index of its logits in the batch being decoded
    utf8: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Engine:
    """The model and its loop, on a thread of its own."""

    def __init__(self, hub: Hub, args: argparse.Namespace):
        self._hub = hub
        ll.llama_backend_init()
        model_params = ll.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = ll.llama_model_load_from_file(args.model.encode(), model_params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {args.model}")
        params = ll.llama_context_default_params()
        params.n_seq_max = args.streams
        params.n_ctx = args.streams * args.ctx
        params.n_batch = max(args.batch, args.streams)
        params.n_ubatch = args.ubatch
        params.n_threads = params.n_threads_batch = args.threads
        params.kv_unified = False
        self._n_batch = params.n_batch
        self._ctx_len = args.ctx
        self._ctx = ll.llama_init_from_model(self._model, params)
        if not self._ctx:
            raise SystemExit("llama.cpp cannot make a context; fewer --streams or a smaller --ctx need less memory")
        self._vocab = ll.llama_model_get_vocab(self._model)
        self._memory = ll.llama_get_memory(self._ctx)
        self._batch = ll.llama_batch_init(self._n_batch, 0, 1)
        n_vocab = ll.llama_vocab_n_tokens(self._vocab)
        ends = [t for t in range(n_vocab) if ll.llama_vocab_is_eog(self._vocab, t)]
        self._never = (ll.llama_logit_bias * len(ends))(*[ll.llama_logit_bias(t, float("-inf")) for t in ends])
        self._n_vocab = n_vocab
        self._render = Jinja2ChatFormatter(self._meta("tokenizer.chat_template"), eos_token="", bos_token="")
        self._waiting: queue.SimpleQueue[tuple[dict[str, Any], Stream]] = queue.SimpleQueue()
        self._free = list(range(args.streams))
        self._seats: list[Seat] = []
        self._pieces: dict[int, bytes] = {}
        start_engine(self._run, "llama-loop")

    def submit(self, body: dict[str, Any], stream: Stream) -> None:
        """Queue a request; called on the event-loop thread."""
        self._waiting.put((body, stream))

    def _meta(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(65_536)
        if ll.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer)) < 0:
            raise SystemExit(f"the model file has no {key}")
        return buffer.value.decode()

    def _run(self) -> None:
        backlog: list[tuple[dict[str, Any], Stream]] = []
        while True:
            if not self._seats and not backlog:
                backlog.append(self._waiting.get())
            while not self._waiting.empty():
                backlog.append(self._waiting.get())
            while backlog and self._free:
                self._seat(*backlog.pop(0))
            if self._seats:
                self._step()

    def _seat(self, body: dict[str, Any], stream: Stream) -> None:
        text = self._render(messages=body["messages"]).prompt.encode()
        room = (ll.llama_token * (len(text) + 16))()
        n = ll.llama_tokenize(self._vocab, text, len(text), room, len(room), False, True)
        if n + body["max_tokens"] > self._ctx_len:
            stream.fail(f"{n} + {body['max_tokens']} tokens do not fit --ctx {self._ctx_len}")
            return
        sampler = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
        for part in (
            ll.llama_sampler_init_logit_bias(self._n_vocab, len(self._never), self._never),
            ll.llama_sampler_init_penalties(self._n_vocab, 64, body.get("repeat_penalty", 1.0), 0.0, 0.0),
            ll.llama_sampler_init_top_k(40),
            ll.llama_sampler_init_top_p(body.get("top_p", 1.0), 1),
            ll.llama_sampler_init_temp(body.get("temperature", 1.0)),
            ll.llama_sampler_init_dist(0xFFFFFFFF),
        ):
            ll.llama_sampler_chain_add(sampler, part)
        self._seats.append(Seat(self._free.pop(), stream, list(room[:n]), body["max_tokens"], sampler))

    def _step(self) -> None:
        n = 0
        for seat in self._seats:
            seat.output = -1
            if seat.n_prefilled == len(seat.prompt):
                n = self._put(n, seat, seat.last, True)
        for seat in self._seats:
            while seat.n_prefilled < len(seat.prompt) and n < self._n_batch:
                seat.n_prefilled += 1
                n = self._put(n, seat, seat.prompt[seat.n_prefilled - 1], seat.n_prefilled == len(seat.prompt))
        self._batch.n_tokens = n
        code = ll.llama_decode(self._ctx, self._batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        with self._hub.step():
            for seat in [s for s in self._seats if s.output >= 0]:
                self._take(seat)

    def _put(self, n: int, seat: Seat, token: int, wants_logits: bool) -> int:
        batch = self._batch
        batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, seat.n_past, 1
        batch.seq_id[n][0], batch.logits[n] = seat.seq, wants_logits
        seat.n_past += 1
        if wants_logits:
            seat.output = n
        return n + 1

    def _take(self, seat: Seat) -> None:
        seat.last = ll.llama_sampler_sample(seat.sampler, self._ctx, seat.output)
        seat.n_new += 1
        seat.stream.tokens(seat.utf8.decode(self._piece(seat.last)))
        if seat.n_new == seat.max_tokens or seat.stream.gone:
            seat.stream.end(len(seat.prompt), seat.n_new)
            ll.llama_memory_seq_rm(self._memory, seat.seq, -1, -1)
            ll.llama_sampler_free(seat.sampler)
            self._free.append(seat.seq)
            self._seats.remove(seat)

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            buffer = ctypes.create_string_buffer(_PIECE_BYTES)
            n = ll.llama_token_to_piece(self._vocab, token, buffer, _PIECE_BYTES, 0, False)
            self._pieces[token] = buffer.raw[: max(n, 0)]
        return self._pieces[token]


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--ctx", type=int, default=512, help="tokens of one sequence")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    asyncio.run(serve("127.0.0.1", args.port, lambda hub: Engine(hub, args).submit))


if __name__ == "__main__":
    main()
