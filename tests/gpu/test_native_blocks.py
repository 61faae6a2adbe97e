"""Weights kept as the file's blocks give the very bits of the same weights prepacked in bf16."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tests.gpu.native_kit import Bench, Piece, random_weights, tiny
from zl.errors import ShapeError
from zl.gpu.native.build import available_levels, have_compiler
from zl.gpu.pinned import FIRST, SAMPLE
from zl.gpu.weights import open_model

pytestmark = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler or no AVX2: nothing native to test")

BF16 = torch.bfloat16
Blocks = dict[str, tuple[str, np.ndarray]]


def quantised(shape, formats: dict[str, str], seed: int = 0) -> tuple[dict[str, torch.Tensor], Blocks]:
    """Random weights, and blocks of those whose last name has a format; the weights are what the blocks hold."""
    rng = np.random.default_rng(seed)
    weights, blocks = random_weights(shape, BF16, seed), {}
    for name, tensor in weights.items():
        kind = formats.get(name.rsplit(".", 1)[-1])
        if kind is None:
            continue
        rows, cols = tensor.shape
        n = rows * cols // 32
        scale = (rng.uniform(0.02, 0.3, (n, 1)) * rng.choice([-1, 1], (n, 1)) * cols**-0.5).astype(np.float16)
        parts = [scale.view(np.uint8)]
        if kind == "Q4_1":
            parts.append((scale * rng.uniform(-12, 1, (n, 1))).astype(np.float16).view(np.uint8))
        if kind == "Q8_0":
            parts[0] = (scale / np.float16(16)).view(np.uint8)
        parts.append(rng.integers(0, 256, (n, 32 if kind == "Q8_0" else 16), dtype=np.uint8))
        raw = np.concatenate(parts, 1).reshape(rows, -1)
        blocks[name] = (kind, raw)
        values = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
        weights[name] = torch.from_numpy(values).to(BF16)
    return weights, blocks


def results(bench: Bench, n_rows: int, vocab: int) -> list[bytes]:
    """Prefill and decode n_rows rows in one step each, then a mixed step; all logits and the first row's KV."""
    rng, out = np.random.default_rng(7), []
    for row in range(n_rows):
        bench.seat(row, rng.integers(0, vocab, 3 + row % 5).tolist(), room=3)
    lengths = bench.columns.prompt_len[:n_rows].tolist()
    bench.run(*(Piece(row, 0, n, FIRST | SAMPLE) for row, n in enumerate(lengths)))
    out += [a.tobytes() for a in bench.step.logits().values()]
    bench.run(*(Piece(row, n, 1, SAMPLE) for row, n in enumerate(lengths)))
    out += [a.tobytes() for a in bench.step.logits().values()]
    bench.run(*(Piece(r, 0, n, FIRST) if r % 2 else Piece(r, n + 1, 1, SAMPLE) for r, n in enumerate(lengths)))
    out += [a.tobytes() for a in bench.step.logits().values()]
    for layer in range(bench.step.shape.n_layers):
        out += [a.tobytes() for a in bench.step.read_kv(layer, 0, 0, lengths[0] + 2)]
    for row in range(n_rows):
        bench.leave(row)
    return out


Q4 = dict.fromkeys(("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"), "Q4_1")
CASES = {
    "q4_1": (tiny(), {**Q4, "embed": "Q8_0"}),
    "q4_0": (tiny(tied=False), {**dict.fromkeys(Q4, "Q4_0"), "head": "Q4_0"}),
    "q8_0": (tiny(), {**dict.fromkeys(Q4, "Q8_0"), "embed": "Q8_0"}),
    "mixed_kinds": (tiny(tied=False), {**Q4, "wv": "Q8_0", "w_up": "Q4_0", "w_down": "Q8_0", "head": "Q4_1"}),
    "torn_heads": (tiny(head_dim=48, n_heads=6, n_kv_heads=2), {**Q4, "embed": "Q4_1"}),
    "biases": (tiny(attention_bias=True, mlp_bias=True, vocab=333), {**Q4, "embed": "Q8_0"}),
}


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("case", CASES)
def test_blocks_and_prepacked_weights_give_the_same_bits(case: str, level: str) -> None:
    shape, formats = CASES[case]
    weights, blocks = quantised(shape, formats)
    for n_rows in (1, 2, 7, 16, 17, 33, 70):
        found = []
        for source in (None, blocks.get):
            sizes = {"rows": 80, "n_pages": 160, "step_tokens": 512, "threads": 2}
            with Bench(shape, weights, **sizes, level=level, blocks=source) as bench:
                found.append(results(bench, n_rows, shape.vocab))
        assert found[0] == found[1]


def test_the_embedded_model_gives_the_same_bits_from_its_blocks(gguf_path) -> None:
    source = open_model(gguf_path)
    weights = {name: source.tensor(name, BF16) for name in source.names}
    found = []
    for blocks in (None, source.blocks):
        with Bench(source.shape, weights, rows=20, n_pages=40, step_tokens=128, threads=2, blocks=blocks) as bench:
            found.append([results(bench, n_rows, source.shape.vocab) for n_rows in (1, 3, 16, 20)])
    assert found[0] == found[1]


def test_blocks_of_a_wrong_size_are_named() -> None:
    shape = tiny()
    weights, blocks = quantised(shape, Q4)
    kind, raw = blocks["layers.1.wo"]
    blocks["layers.1.wo"] = (kind, raw[:-1])
    with pytest.raises(ShapeError, match=r"layers\.1\.wo"):
        Bench(shape, weights, blocks=blocks.get)
