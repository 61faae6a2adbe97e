"""The peer in the same run: transformers with a static cache and torch.compile, decoding in the same shape.

Its step is forward pass and argmax; zl's has penalty, temperature, top-p, draw, logprob and stop check too. Weights are
random and the cache is empty but long: neither changes how long a step takes. State: none.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.gpu.report import Report
from zl.shapes import ModelShape


def config_of(shape: ModelShape) -> Any:
    """Make the transformers configuration of a shape."""
    from transformers import LlamaConfig, Qwen2Config

    common = {
        "num_hidden_layers": shape.n_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": shape.tied,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if shape.attention_bias:
        return Qwen2Config(**common)
    return LlamaConfig(head_dim=shape.head_dim, **common)


class Peer:
    """A model with random weights and a compiled decode step."""

    def __init__(self, shape: ModelShape, device: str):
        from transformers import LlamaForCausalLM, Qwen2ForCausalLM

        self.shape, self.device = shape, device
        self.config = config_of(shape)
        kept = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                kind = Qwen2ForCausalLM if shape.attention_bias else LlamaForCausalLM
                self.model = kind(self.config).eval()
        finally:
            torch.set_default_dtype(kept)
        options: dict[str, Any] = {"mode": "reduce-overhead"} if device != "cpu" else {"backend": "eager"}
        self.forward = torch.compile(self.model.forward, fullgraph=device != "cpu", dynamic=False, **options)

    @torch.inference_mode()
    def decode(self, rows: int, context: int, n_steps: int) -> tuple[float, float]:
        """Return seconds (for the first step, which compiles; for a later one, the median)."""
        from transformers import StaticCache

        cache = StaticCache(config=self.config, max_cache_len=context + n_steps + 8)
        ids = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        times = []
        for i in range(n_steps + 4):
            place = torch.tensor([context + i], device=self.device)
            self._settle()
            begun = time.perf_counter()
            if self.device != "cpu":
                torch.compiler.cudagraph_mark_step_begin()
            out = self.forward(
                input_ids=ids, past_key_values=cache, cache_position=place, position_ids=place[None].expand(rows, 1),
                use_cache=True,
            )  # fmt: skip
            ids = out.logits[:, -1:].argmax(-1)
            self._settle()
            times.append(time.perf_counter() - begun)
        return times[0], statistics.median(times[4:])

    def _settle(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()  # sync


def decode(report: Report, shape: ModelShape, device: str, rows: Sequence[int], context: int, n_steps: int) -> None:
    """Time the peer's decode steps, beside zl's of the same run where there are any."""
    try:
        import transformers
    except ImportError as missing:
        report.skip(shape.name, "peer: transformers", f"not installed ({missing}); pip install '.[test]'")
        return
    name = f"transformers {transformers.__version__}, static cache, torch.compile"
    peer = Peer(shape, device)
    for n in rows:
        try:
            compiled, step = peer.decode(n, context, n_steps)
        except Exception as failure:  # the peer's, which proves nothing about zl
            report.skip(shape.name, f"peer decode, {n} rows", f"{name}: {type(failure).__name__}: {failure}"[:300])
            continue
        ours = report.figure(shape.name, f"decode, {n} rows, context {context}", "ahead_s")
        text = f"{step * 1e3:.3f} ms a step, {n / step:,.0f} tokens/s, first step {compiled:.0f} s; {name}"
        if ours:
            text += f"; zl in this run {ours * 1e3:.3f} ms, {step / ours:.2f} times the peer's speed"
        report.time(
            shape.name, f"peer decode, {n} rows, context {context}", text, step_s=step, compile_s=compiled,
            tokens_per_s=n / step,
        )  # fmt: skip
    del peer
    gc.collect()
    if device != "cpu":
        torch._dynamo.reset()
        torch.cuda.empty_cache()
