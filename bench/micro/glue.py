"""What zl does around the model, an operation at a time, beside the same work in vLLM: `python -m bench.micro.glue`.

vLLM's side runs in its own environment and process (bench/peers/vllm_glue.py); the two take turns. Without that
environment only zl is measured. State: the child process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.drivers.base import ROOT, MissingPeerError, environment, python_of
from bench.serve import CACHE, DEFAULT_GGUF
from bench.stats import ratios
from zl.admission import Admission
from zl.dispatch import Dispatcher
from zl.gpu.loop import StepResult
from zl.gpu.pinned import RowColumns
from zl.gpu.weights import open_model
from zl.health import Health
from zl.net import codec, rules, schema_pb2
from zl.net.native.library import open_code
from zl.pages import PageBooks
from zl.policy import Policy
from zl.rows import Rows, Ticket
from zl.service import Service
from zl.shapes import Shapes
from zl.text.detok import TokenTable
from zl.text.prompt import PromptBuilder
from zl.text.tokenizer import text_model
from zl.tools.prompts import SYSTEM, Prompt, text
from zl.tools.traces import describe

N_ROWS = 128
REQUEST_BYTES = 1_600
N_PAGES = 4_096


class Sink:
    """A connection that joins what a step queued, as the real one does, and writes it nowhere."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []

    def queue(self, data: bytes) -> None:
        """Keep one frame until the flush."""
        self._frames.append(data)

    def flush(self) -> bytes:
        """Join what is in line."""
        joined = b"".join(self._frames)
        self._frames.clear()
        return joined

    def finished(self, request_id: int) -> None:
        """Nothing is kept by id."""


class Glue:
    """zl's real parts with no engine behind: prompts, dispatcher, service."""

    def __init__(self, gguf: Path, prompt: Prompt):
        source = open_model(gguf)
        words = text_model(source)
        shapes = Shapes(n_pages=N_PAGES)
        self._tickets: list[Ticket] = []
        self.prompts = PromptBuilder(words, shapes)
        dispatcher = Dispatcher(shapes, Rows(shapes.max_rows), PageBooks(N_PAGES), RowColumns(shapes), self._seated)
        self._decode, self._encode_token = wire = open_code()
        self.service = Service(
            admission=Admission(
                prompts=self.prompts, tokens=TokenTable(words), vocab_size=words.vocab_size, policy=Policy(shapes),
                dispatcher=dispatcher,
            ),
            dispatcher=dispatcher, info=b"", call_at=lambda _when, _what: None, offload=lambda work, then: then(work()),
            health=Health(time.monotonic), engine_nudge=lambda: None, encode_token=wire.encode_token,
        )  # fmt: skip
        self.payload = payload_of(prompt)
        self.request = codec.decode_request(self.payload)
        self.request.max_tokens = 1 << 10
        self._token = next(i for i, piece in enumerate(TokenTable(words).pieces) if piece == b" word")
        self._n = 0

    def _seated(self, ticket: Ticket, _prefix: Any, _prompt_len: int, _program: int) -> None:
        self._tickets.append(ticket)

    def parse(self) -> None:
        """Payload to checked request, as `net.session` has it done."""
        if self._decode(self.payload) is None:
            raise RuntimeError("the native decoder left a valid request to protobuf")

    def parse_by_codec(self) -> None:
        """Payload to checked request, without native code: what is not an ordinary valid request."""
        rules.check_request(codec.decode_request(self.payload))

    def parse_bytes_only(self) -> None:
        """Payload to message object, fields not read."""
        schema_pb2.Request.FromString(self.payload)

    def prompt(self) -> None:
        """Text to prompt tokens, user text that was never seen."""
        self._n += 1
        turn = b"%d " % self._n + self.request.messages[0]
        self.prompts.build(self.request.system, [turn])

    def admit(self) -> None:
        """Request to seated row with its columns written, its prompt included; then end and free it again."""
        sink = Sink()
        self._n += 1
        self.request.request_id = self._n
        self.service.submit(sink, self.request)
        self.service.closed(sink)
        self.service.on_step(StepResult([], [], [], [], [], [self._tickets.pop()]))

    def encode(self) -> None:
        """One token to its frame."""
        self._encode_token(7, self._token, b" word", None, None)

    def encode_by_codec(self) -> None:
        """One token to its frame, without native code."""
        codec.encode_token(7, self._token, b" word", None, None)

    def deliver(self) -> Callable[[], None]:
        """Give a step of N_ROWS rows, each on its own connection: tokens to bytes, frames, joined writes."""
        self._tickets.clear()
        for i in range(N_ROWS):
            self.request.request_id = i
            self.service.submit(Sink(), self.request)
        tickets = list(self._tickets)
        self._tickets.clear()
        step = StepResult(tickets, [self._token] * N_ROWS, [0.0] * N_ROWS, [0] * N_ROWS, [], [])
        return lambda: self.service.on_step(step)


def payload_of(prompt: Prompt) -> bytes:
    """Make the payload of a request as a client with its own sampling settings sends it."""
    request = schema_pb2.Request(
        request_id=1, system_prompt=prompt.system.encode(), messages=[m.encode() for m in prompt.messages],
        temperature=700_000, top_p=950_000, repetition_penalty=1_100_000, max_tokens=prompt.max_tokens,
        ignore_eos=True, seed=1,
    )  # fmt: skip
    return request.SerializeToString()


def body_of(prompt: Prompt) -> bytes:
    """Make the same request for OpenAI's API."""
    return json.dumps(
        {
            "model": "model", "messages": prompt.chat(), "max_tokens": prompt.max_tokens, "temperature": 0.7,
            "top_p": 0.95, "repetition_penalty": 1.1, "stream": True, "ignore_eos": True, "seed": 1,
        }
    ).encode()  # fmt: skip


class Peer:
    """vLLM's side, in its own process."""

    def __init__(self, body: bytes, model: Path):
        python = python_of(".venv-vllm")
        self._file = tempfile.NamedTemporaryFile(suffix=".json")  # noqa: SIM115 (lives as long as the child)
        self._file.write(body)
        self._file.flush()
        self._child = subprocess.Popen(
            [python, str(ROOT / "bench/peers/vllm_glue.py"), self._file.name, str(model)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment(1, VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR"),
        )  # fmt: skip
        while True:  # vLLM's import may print lines of its own
            said = self._read()
            if said == "ready":
                return

    def _read(self) -> str:
        assert self._child.stdout is not None
        said = self._child.stdout.readline()
        if not said:
            raise RuntimeError(f"vllm_glue ended with status {self._child.wait()}; run it by hand to see why")
        return said.strip()

    def time_ns(self, name: str, n: int) -> float:
        """Have it do n operations; return nanoseconds an operation."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{name} {n}\n")
        self._child.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()
        self._file.close()


def time_ns(work: Callable[[], object], n: int) -> float:
    """Do n operations; return nanoseconds an operation."""
    begun = time.perf_counter_ns()
    for _ in range(n):
        work()
    return (time.perf_counter_ns() - begun) / n


PAIRS = (
    # what, zl's operation, vLLM's, operations a round, divide zl's by
    ("parse and validate a request", "parse", "parse", 5_000, 1),
    ("… without native code (protobuf, checks in Python)", "parse_by_codec", "parse", 2_000, 1),
    ("… the parser alone (protobuf, json)", "parse_bytes_only", "json", 5_000, 1),
    ("prompt tokens of 60 new words", "prompt", "prompt", 500, 1),
    ("request to seated row, prompt included", "admit", None, 500, 1),
    ("one token to its frame", "encode", "chunk", 5_000, 1),
    ("… without native code (protobuf)", "encode_by_codec", "chunk", 5_000, 1),
    ("one token delivered, 128 rows a step", "deliver", None, 200, N_ROWS),
)


def measure(glue: Glue, peer: Peer | None, rounds: int) -> list[dict[str, Any]]:
    """Time each pair in turns; nanoseconds, one entry a round."""
    found = []
    for what, ours, theirs, n, share in PAIRS:
        work = glue.deliver() if ours == "deliver" else getattr(glue, ours)
        time_ns(work, max(10, n // 10))
        if peer is not None and theirs is not None:
            peer.time_ns(theirs, max(10, n // 10))
        entry: dict[str, Any] = {"what": what, "zl_ns": [], "vllm_ns": []}
        for _ in range(rounds):
            entry["zl_ns"].append(time_ns(work, n) / share)
            if peer is not None and theirs is not None:
                entry["vllm_ns"].append(peer.time_ns(theirs, n))
        found.append(entry)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Make the Markdown table."""
    lines = ["| | zl, µs | vLLM, µs | times cheaper (min to max) |", "|---|---:|---:|---:|"]
    for entry in found:
        ours, theirs = entry["zl_ns"], entry["vllm_ns"]
        peer, times = "", ""
        if theirs:
            ratio = ratios(theirs, ours)
            peer = f"{statistics.median(theirs) / 1e3:.2f}"
            times = f"{ratio['median']:.1f} ({ratio['min']:.1f} to {ratio['max']:.1f})"
        lines.append(f"| {entry['what']} | {statistics.median(ours) / 1e3:.2f} | {peer} | {times} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table, or all figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.micro.glue", description=__doc__)
    parser.add_argument("--gguf", type=Path, default=DEFAULT_GGUF)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = (REQUEST_BYTES - 300) * 10 // 55
    big = Prompt(SYSTEM, (text(words, 1),), 64)
    glue = Glue(args.gguf, big)
    small = Prompt(SYSTEM, (text(60, 2),), 64)
    glue.request = codec.decode_request(payload_of(small))
    peer = None
    try:
        # Parsing is timed on a request of about 1.6 KB, the prompt on 60 words: vLLM gets the same bytes of each kind.
        peer = Peer(body_of(big), CACHE / "bench" / f"{args.gguf.stem}-bf16")
    except (MissingPeerError, RuntimeError) as error:
        print(f"zl alone: {error}", file=sys.stderr)
    try:
        found = measure(glue, peer, args.rounds)
    finally:
        if peer is not None:
            peer.close()
    print(f"request of {len(glue.payload)} bytes as a frame, {len(body_of(big))} bytes as JSON")
    print(table(found))
    if args.json:
        figures = [entry | {"zl": describe(entry["zl_ns"]), "vllm": describe(entry["vllm_ns"])} for entry in found]
        args.json.write_text(json.dumps({"numpy": np.__version__, "figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
