"""A real server on an artifact: the bits of a start without one, no torch in it, constant prompts, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zl.client import Client

pytestmark = pytest.mark.system

PROMPTS = [json.loads(line) for line in (Path(__file__).parent.parent / "data" / "chat.jsonl").read_text().splitlines()]


def answers(address: str) -> list[tuple]:
    with Client(address, timeout=120) as client:
        streams = [
            client.stream(
                p["messages"], system=p["system"], type=p["type"], seed=p["seed"], max_tokens=40, logprobs=True
            )
            for p in PROMPTS[:16]
        ]
        return [
            ([t for c in chunks for t in c.token_ids], [x for c in chunks for x in c.logprobs])
            for chunks in map(list, streams)
        ]


def test_first_use_of_a_configured_prompt_is_constant(artifact_server, plain_server, constant_prompt):
    found = []
    for server in (artifact_server, plain_server):
        with Client(server.unix, timeout=120) as client:
            found.append(client.ask("How high is the Eiger?", system=constant_prompt, seed=5, max_tokens=16))
    warm, cold = found
    assert warm.usage.constant_tokens >= 32
    assert cold.usage.constant_tokens == 0
    assert warm.token_ids == cold.token_ids


def test_tokens_and_logprobs_are_those_of_a_start_without(artifact_server, plain_server):
    packed, plain = answers(artifact_server.unix), answers(plain_server.unix)
    assert packed == plain
    assert sum(len(tokens) for tokens, _ in packed) > 200


def test_both_are_the_same_build(artifact_server, plain_server, artifact):
    ids = set()
    for server in (artifact_server, plain_server):
        with Client(server.unix, timeout=20) as client:
            ids.add(client.hello().build_id)
    assert ids == {json.loads((artifact / "manifest.json").read_text())["build_id"]}


def test_the_server_says_its_phases_and_has_no_torch(artifact_server, plain_server):
    for phase in ("interpreter and imports", "tokenizer", "weights and KV pool", "ready"):
        assert f"  {phase}" in artifact_server.text()
    assert "torch" not in Path(f"/proc/{artifact_server.process.pid}/maps").read_text()
    assert "torch" in Path(f"/proc/{plain_server.process.pid}/maps").read_text()


@pytest.mark.parametrize(
    "flags", [("--dtype", "float32"), ("--device", "cuda"), ("--max-model-len", "99"), ("--cpu-level", "torch")]
)
def test_what_it_was_not_built_for_ends_in_one_line(artifact, tmp_path, flags):
    listen = ("--listen", f"unix:{tmp_path}/zl.sock", "--log-level", "error")
    command = [sys.executable, "-m", "zl", "serve", "--model", str(artifact), *listen, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"zl: {flags[0].strip('-').replace('-', '_')} = ")
    assert "Traceback" not in done.stderr
