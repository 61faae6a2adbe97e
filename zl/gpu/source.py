"""What every model source is: canonical tensor names, their shapes, and the hash of the weights.

Names: `embed`, `norm`, `head` (absent when tied) and `layers.{i}.` followed by one of LAYER_NAMES.
Owns no state. Refuses net, text, asyncio.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zl.errors import ModelError
from zl.filehash import stamped_sha256
from zl.shapes import ModelShape


class WeightSource(ABC):
    """An opened model: its shape, its tensors, its tokenizer's data. Tensors stay in the file until asked for.

    shape             sizes of the forward pass
    chat_template     jinja2 source, or None
    tokenizer_fields  GGUF: every `tokenizer.*` field under its full key, as plain python values;
                      folder: {"tokenizer_json": Path, "tokenizer_config": dict}
    names             canonical names of the tensors that are there
    files             the files that hold the weights
    """

    shape: ModelShape
    chat_template: str | None
    tokenizer_fields: Mapping[str, Any]
    names: frozenset[str]
    files: Sequence[Path]

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Give one tensor, dequantised: matrices [out, in], vectors [n]; q and k in half-rotation order.

        The result is a view of the mapped file where the file holds that dtype in that order: read it, never write it.
        Raises KeyError for a name that is not in `names`.
        """

    @abstractmethod
    def blocks(self, name: str) -> tuple[str, np.ndarray] | None:
        """Give a quantised tensor's type and raw rows, uint8 [n_rows, row_bytes], or None where it is not quantised.

        Rows are in half-rotation order: a view of the mapped file, except q and k of a `llama` GGUF (an index, copied).
        """

    @property
    def sha256(self) -> str:
        """Hash the weights: of the file, or of the file hashes in name order. Cached by path, size and time."""
        digests = [stamped_sha256(path) for path in self.files]
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def canonical_shapes(shape: ModelShape, o_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List every tensor that a model of this shape has, with its dimensions in [out, in] order."""
    q, kv, hidden, ffn = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim, shape.hidden, shape.ffn
    yield "embed", (shape.vocab, hidden)
    yield "norm", (hidden,)
    if not shape.tied:
        yield "head", (shape.vocab, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "wq": (q, hidden),
        "wk": (kv, hidden),
        "wv": (kv, hidden),
        "wo": (hidden, q),
        "mlp_norm": (hidden,),
        "w_gate": (ffn, hidden),
        "w_up": (ffn, hidden),
        "w_down": (hidden, ffn),
    }
    if shape.attention_bias:
        layer |= {"bq": (q,), "bk": (kv,), "bv": (kv,)}
        if o_bias:
            layer["bo"] = (hidden,)
    if shape.mlp_bias:
        layer |= {"b_gate": (ffn,), "b_up": (ffn,), "b_down": (hidden,)}
    for i in range(shape.n_layers):
        for name, dims in layer.items():
            yield f"layers.{i}.{name}", dims


def check_tensors(
    path: Path, shape: ModelShape, found: Mapping[str, tuple[int, ...]], file_names: Mapping[str, str]
) -> None:
    """Refuse a model whose tensors are not exactly those that its shape asks for.

    found       canonical name → dimensions [out, in]
    file_names  canonical name → the name in the file, for the message
    Raises      ModelError
    """
    expected = set()
    for name, dims in canonical_shapes(shape, "layers.0.bo" in found):  # lazily: a damaged layer count ends here early
        expected.add(name)
        if name not in found:
            raise ModelError(f"{path}: tensor {file_names.get(name, name)} is missing; download the model again")
        if tuple(found[name]) != dims:
            raise ModelError(
                f"{path}: tensor {file_names.get(name, name)} is {list(found[name])}, its hyper-parameters say "
                f"{list(dims)}; the file is damaged or of an architecture that zl does not serve"
            )
    for name in found:
        if name not in expected:
            raise ModelError(
                f"{path}: tensor {file_names.get(name, name)} has no place in this architecture; "
                "zl serves plain Llama-family models (no experts, no extra norms)"
            )


def check_shape(path: Path, shape: ModelShape) -> ModelShape:
    """Refuse hyper-parameters that no forward pass can use. Raises ModelError."""
    positive = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab", "max_position")
    for field in positive:
        if getattr(shape, field) <= 0:
            raise ModelError(f"{path}: {field} is {getattr(shape, field)}; the file is damaged, download it again")
    if shape.n_heads % shape.n_kv_heads:
        raise ModelError(f"{path}: {shape.n_heads} heads cannot share {shape.n_kv_heads} key/value heads")
    if shape.head_dim % 2:
        raise ModelError(f"{path}: head size {shape.head_dim} is odd, rotary embedding needs an even one")
    if not shape.rms_eps > 0 or not shape.rope_theta > 0:
        raise ModelError(f"{path}: rms epsilon {shape.rms_eps} and rope base {shape.rope_theta} must be above zero")
    return shape
