"""A running server whose packed weights are damaged from outside, through /proc: caught, served, mended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.system.conftest import ServerProcess, serving
from zl.client import Client
from zl.gpu.weights import open_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

BEAT_S = 1.0
QUESTIONS = ["What is the capital of France?", "Name three primary colours.", "Write a line about the sea."]


@pytest.fixture(scope="module")
def watched(tmp_path_factory, gguf_path) -> Iterator[ServerProcess]:
    flags = ("--model", str(gguf_path), "--heartbeat-s", str(BEAT_S), "--max-rows", "16", "--kv-memory", "256MiB")
    yield from serving(tmp_path_factory.mktemp("damage"), *flags)


def anonymous_places(pid: int, wanted: bytes) -> list[int]:
    """Find bytes in a process's writable anonymous memory: their addresses."""
    found, step = [], 64 << 20
    with open(f"/proc/{pid}/mem", "rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, access, _, _, inode, *_ = line.split(None, 5)
            if inode != "0" or not access.startswith("rw"):
                continue
            at, end = (int(edge, 16) for edge in span.split("-"))
            while at < end:
                memory.seek(at)
                try:
                    part = memory.read(min(step + len(wanted), end - at))
                except OSError:
                    break
                i = part.find(wanted)
                while i >= 0 and i < step:
                    found.append(at + i)
                    i = part.find(wanted, i + 1)
                at += step
    return found


def ask_all(address: str, tokens: int) -> list[str]:
    with Client(address, timeout=120) as client:
        return [client.ask(q, temperature=0.0, max_tokens=tokens).text for q in QUESTIONS]


def test_damaged_weights_fail_no_request_and_the_program_comes_back(watched, gguf_path):
    before = ask_all(watched.unix, 24)
    norm = open_model(gguf_path).tensor("layers.3.attn_norm", torch.float32).numpy()
    places = anonymous_places(watched.process.pid, norm.tobytes())
    assert len(places) == 1

    failures: list[BaseException] = []
    answered = []
    stop = threading.Event()

    def keep_asking() -> None:
        try:
            with Client(watched.unix, timeout=120) as client:
                while not stop.is_set():
                    answered.append(client.ask(QUESTIONS[0], max_tokens=40, ignore_eos=True).usage.completion_tokens)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=keep_asking) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while (figures := watched.figures())['zl_heartbeats_total{result="ok"}'] < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert figures['zl_heartbeats_total{result="ok"}'] >= 1
    assert figures["zl_program_retirements_total"] == 0
    with open(f"/proc/{watched.process.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(places[0])
        memory.write(np.float32(-3.5 * norm[0] + 0.25).tobytes())
    deadline = time.monotonic() + 60
    while watched.figures()['zl_program_captures_total{result="ok"}'] < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert set(answered) == {40}
    figures = watched.figures()
    assert figures["zl_program_retirements_total"] == figures['zl_heartbeats_total{result="failed"}'] == 1
    assert figures['zl_program_captures_total{result="ok"}'] == 2
    assert figures["zl_fallback_steps_total"] >= 1
    assert "program retired" in watched.text()
    assert places[0] in anonymous_places(watched.process.pid, norm.tobytes())  # others: what the fallback has freed
    assert ask_all(watched.unix, 24) == before
