"""The whole server in a process of its own, over a socket: cold start and first tokens of many streams.

The model is random weights in real sizes beside a byte-level tokenizer made here: no network and no model file. State:
the server process, ended before `socket` returns.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu.report import Report
from bench.procs import Server
from tests.tiny_model import CONFIG, write_tiny
from zl.client import Client, ConnectionFailed
from zl.tools import load, prompts
from zl.tools.traces import summarise

PATIENCE_S = 120.0

BILLION: dict[str, int] = {
    "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip
"""Llama-3.2-1B but for the vocabulary, which is the tokenizer's 288: 0.97 billion parameters."""

SMALL: dict[str, int] = {
    "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "intermediate_size": 256, "max_position_embeddings": 1024,
}  # fmt: skip


def write_model(folder: Path, sizes: dict[str, int]) -> int:
    """Write a model folder, return its weights' bytes. Weights repeat one random block: only their size counts."""
    write_tiny(folder)
    config: dict[str, Any] = CONFIG | sizes
    (folder / "config.json").write_text(json.dumps(config))
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).bfloat16()

    def matrix(n_out: int, n_in: int) -> torch.Tensor:
        n = n_out * n_in
        return (block.repeat(-(-n // block.numel()))[:n] * n_in**-0.5).view(n_out, n_in)

    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * hidden**0.5,
               "model.norm.weight": torch.ones(hidden).bfloat16()}  # fmt: skip
    shapes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(hidden).bfloat16()
        for name, size in shapes.items():
            tensors[f"{at}{name}.weight"] = matrix(*size)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return (folder / "model.safetensors").stat().st_size


def socket(report: Report, *, dry: bool, streams: int, rounds: int, tokens: int, words: int) -> None:
    """Start `zl serve`, time its first token from exec on, then run `streams` streams of `rounds` requests each."""
    device, rows = ("cpu", 8) if dry else ("cuda", max(128, streams))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        begun = time.perf_counter()
        size = write_model(folder / "model", SMALL if dry else BILLION)
        report.say(f"service: wrote {size / 1e9:.2f} GB of random weights in {time.perf_counter() - begun:.1f} s")
        address = f"unix:{folder / 'zl.sock'}"
        command = [
            sys.executable, "-m", "zl", "serve", "--model", str(folder / "model"), "--listen", address, "--metrics",
            "off", "--device", device, "--artifact", "off", "--max-rows", str(rows), "--max-model-len", "1024",
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_INTERPRET")}
        server = Server("zl", command, environment, folder / "zl.log")
        try:
            cold = _first_answer(server, address)
            lines = [line for line in server.log.read_text().splitlines() if "program:" in line]
            said = lines[-1].partition("program: ")[2] if lines else "no program named in its log"
            report.time(
                "service", "cold start", f"{cold:.1f} s from exec to the first token over the socket; {said}",
                seconds=cold, weight_bytes=size,
            )  # fmt: skip
            asked = prompts.burst(streams * rounds, tokens, 1, words=words)
            traces = asyncio.run(_drive(address, asked, streams))
        finally:
            server.stop()
    found = summarise(traces)
    # All first requests come at once: that burst is no stream's steady state (bench/gpu/timings.py leaves it out too).
    first = summarise(sorted(traces, key=lambda trace: trace.sent)[streams:])["first_s"]
    share = 100 * first["sd"] / first["mean"]
    complete = found["failed"] == 0 and found["tokens"] == streams * rounds * tokens
    report.prove(
        "service", f"{streams} streams over a socket", complete,
        f"{found['requests']} requests, {found['failed']} failed, {found['tokens']} tokens"
        + (f"; first error {found['errors'][0]}" if found["errors"] else ""),
    )  # fmt: skip
    text = (
        f"first token {first['mean'] * 1e3:.1f} ms, sd {first['sd'] * 1e3:.1f} ms ({share:.0f}% of the mean), p99 "
        f"{first['p99'] * 1e3:.1f} ms; {found['tokens_per_s']:,.0f} tokens/s"
    )
    if not dry:
        text += f" (goal 11%: {'met' if share <= 11 else 'missed'})"
    figures = {f"first_{name}_s": value for name, value in first.items() if name != "n"}
    report.time("service", f"{streams} streams over a socket", text, **figures, tokens_per_s=found["tokens_per_s"])


def _first_answer(server: Server, address: str) -> float:
    while True:
        server.check()
        try:
            with Client(address, timeout=PATIENCE_S) as client:
                next(iter(client.stream("What is a cold start?", max_tokens=4, ignore_eos=True)))
                return time.perf_counter() - server.started
        except ConnectionFailed:
            if time.perf_counter() - server.started > PATIENCE_S:
                raise
            time.sleep(0.02)


async def _drive(address: str, asked: list[prompts.Prompt], streams: int) -> list[Any]:
    driver = load.Streams(address)
    try:
        return await load.burst(driver, asked, streams)
    finally:
        await driver.close()
