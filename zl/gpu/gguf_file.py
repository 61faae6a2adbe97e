"""A GGUF file as a WeightSource: hyper-parameters, tensors, tokenizer fields and chat template from one mapped file.

Owns the mapping. Refuses net, text, asyncio. Block formats are unpacked by the `gguf` library's numpy code.
Sources: field names, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the row order of q and k,
`LlamaModel.permute` in https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from zl.errors import ModelError
from zl.gpu.gguf_header import TensorPlace, read_header
from zl.gpu.source import WeightSource, check_shape, check_tensors
from zl.shapes import ModelShape

ARCHITECTURES = ("llama", "qwen2")
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_TYPES = {int(kind): kind for kind in gguf.GGMLQuantizationType if kind.name in (*QUANTISED, *PLAIN)}
_TOP = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "head"}
_LAYER = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "wq",
    "attn_k.weight": "wk",
    "attn_v.weight": "wv",
    "attn_output.weight": "wo",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "w_gate",
    "ffn_up.weight": "w_up",
    "ffn_down.weight": "w_down",
    "attn_q.bias": "bq",
    "attn_k.bias": "bk",
    "attn_v.bias": "bv",
    "attn_output.bias": "bo",
    "ffn_gate.bias": "b_gate",
    "ffn_up.bias": "b_up",
    "ffn_down.bias": "b_down",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_ROPE_FACTORS = "rope_freqs.weight"
_SLAB = 1 << 22  # elements unpacked at a time: the float32 copy of a large matrix never exists whole beside its result


class GgufSource(WeightSource):
    """One GGUF file of a Llama-family model. Raises ModelError when opened on anything else."""

    def __init__(self, path: Path):
        self.path = path
        self.files = (path,)
        header = read_header(path)
        self._data, self._fields = header.data, header.fields
        self._arch = self._architecture()
        self._places: dict[str, TensorPlace] = {}
        for place in header.tensors.values():
            self._check_place(place)
            self._places[_canonical(place.name)] = place
        factors = self._places.pop(_ROPE_FACTORS, None)
        self.shape = check_shape(path, self._read_shape(factors))
        dims = {name: place.dims for name, place in self._places.items()}
        gguf_names = {name: f"{name} (GGUF {place.name})" for name, place in self._places.items()}
        check_tensors(path, self.shape, dims, gguf_names)
        self.names = frozenset(self._places)
        template = self._fields.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        self.tokenizer_fields = {key: value for key, value in self._fields.items() if key.startswith("tokenizer.")}

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource. Quantised tensors are unpacked to float32 and rounded once to `dtype`."""
        place = self._places[name]
        kind = _TYPES[place.type_id]
        order = self._row_order(name)
        if kind.name in PLAIN:
            stored = PLAIN[kind.name]
            width = np.int16 if stored is torch.bfloat16 else np.dtype(str(stored).removeprefix("torch."))
            values = torch.from_numpy(self._raw(place).view(width)).view(stored).view(place.dims)
            return (values if order is None else values[torch.from_numpy(order)]).to(dtype)
        rows = self._rows(place)
        out = torch.empty(place.dims, dtype=dtype).view(len(rows), -1)
        step = max(1, _SLAB // out.shape[1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step] if order is None else rows[order[start : start + step]]
            out[start : start + step] = torch.from_numpy(gguf.dequantize(part, kind))
        return out.view(place.dims)

    def blocks(self, name: str) -> tuple[str, np.ndarray] | None:
        """See WeightSource."""
        place = self._places[name]
        kind = _TYPES[place.type_id]
        if kind.name in PLAIN:
            return None
        order = self._row_order(name)
        rows = self._rows(place)
        return kind.name, rows if order is None else rows[order]

    def _row_order(self, name: str) -> np.ndarray | None:
        """Index the file's rows so that q and k come in half-rotation order; None where they already are.

        `llama` files keep each head's rotation pairs side by side (0, half, 1, half + 1, …).
        """
        if self._arch != "llama":
            return None
        last = name.rsplit(".", 1)[-1]
        if last not in ("wq", "bq", "wk", "bk"):
            return None
        n_heads = self.shape.n_heads if last in ("wq", "bq") else self.shape.n_kv_heads
        n_rows = n_heads * self.shape.head_dim
        return np.arange(n_rows).reshape(n_heads, self.shape.head_dim // 2, 2).swapaxes(1, 2).reshape(n_rows)

    def _raw(self, place: TensorPlace) -> np.ndarray:
        return self._data[place.offset : place.offset + _n_bytes(place)]

    def _rows(self, place: TensorPlace) -> np.ndarray:
        n_rows = int(np.prod(place.dims[:-1], dtype=np.int64))
        return self._raw(place).reshape(n_rows, -1)

    def _check_place(self, place: TensorPlace) -> None:
        kind = _TYPES.get(place.type_id)
        if kind is None:
            known = {int(k): k.name for k in gguf.GGMLQuantizationType}
            raise ModelError(
                f"{self.path}: tensor {place.name} is of type {known.get(place.type_id, place.type_id)}; zl reads "
                f"{', '.join((*PLAIN, *QUANTISED))}: take another quantisation of the model"
            )
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if place.dims[-1] % block:
            raise ModelError(
                f"{self.path}: tensor {place.name} has rows of {place.dims[-1]}, not whole {kind.name} blocks; "
                "the file is damaged, download it again"
            )
        end = place.offset + _n_bytes(place)
        if end > len(self._data):
            raise ModelError(
                f"{self.path}: cut short: tensor {place.name} ends at byte {end}, the file has {len(self._data)}; "
                "download it again"
            )

    def _architecture(self) -> str:
        arch = self._fields.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise ModelError(
                f"{self.path}: architecture {arch!r} is not supported; "
                f"zl serves GGUF files of {' and '.join(ARCHITECTURES)}"
            )
        if self._number("split.count", 1) > 1:
            raise ModelError(f"{self.path}: one part of a split model; join the parts with `llama-gguf-split --merge`")
        return str(arch)

    def _number(self, key: str, default: float | None = None) -> Any:
        value = self._fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            problem = "is missing" if value is None else f"is {str(value)[:40]!r}, not a number"
            raise ModelError(f"{self.path}: field {key} {problem}; zl needs it to serve the model")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if not isinstance(value, int):
            raise ModelError(f"{self.path}: field {key} is {value}, not a whole number; the file is damaged")
        return value

    def _read_shape(self, factors: TensorPlace | None) -> ModelShape:
        arch, places = self._arch, self._places
        n_heads = self._integer(f"{arch}.attention.head_count")
        hidden = self._integer(f"{arch}.embedding_length")
        head_dim = self._integer(f"{arch}.attention.key_length", hidden // n_heads if n_heads else 0)
        for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
            if self._number(key, head_dim) != head_dim:
                raise ModelError(f"{self.path}: {key} is {self._fields[key]}, zl serves only the head size, {head_dim}")
        if self._number(f"{arch}.expert_count", 0):
            raise ModelError(f"{self.path}: a mixture of experts; zl serves dense models")
        if "embed" not in places:
            raise ModelError(f"{self.path}: tensor token_embd.weight is missing; download the model again")
        ids = [self._fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        bos = self._fields.get("tokenizer.ggml.bos_token_id")
        name = self._fields.get("general.name")
        return ModelShape(
            name=name if isinstance(name, str) and name else self.path.stem,
            n_layers=self._integer(f"{arch}.block_count"),
            hidden=hidden,
            n_heads=n_heads,
            n_kv_heads=self._integer(f"{arch}.attention.head_count_kv", n_heads),
            head_dim=head_dim,
            ffn=self._integer(f"{arch}.feed_forward_length"),
            vocab=places["embed"].dims[0],
            max_position=self._integer(f"{arch}.context_length"),
            rms_eps=self._number(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_theta=self._number(f"{arch}.rope.freq_base", 10_000.0),
            tied="head" not in places,
            attention_bias=any(f"layers.0.{b}" in places for b in ("bq", "bk", "bv", "bo")),
            mlp_bias=any(f"layers.0.{b}" in places for b in ("b_gate", "b_up", "b_down")),
            eos_ids=tuple(sorted({i for i in ids if isinstance(i, int)})),
            bos_id=bos if isinstance(bos, int) else None,
            rope_factors=self._rope_factors(factors, head_dim),
        )

    def _rope_factors(self, place: TensorPlace | None, head_dim: int) -> tuple[float, ...] | None:
        """Join the two ways in which a file stretches the frequencies: a tensor of divisors, and linear scaling."""
        arch = self._arch
        kind = self._fields.get(f"{arch}.rope.scaling.type", "none")
        linear = 1.0
        if kind == "linear":
            linear = self._number(f"{arch}.rope.scaling.factor")
        elif kind == "none":
            linear = self._number(f"{arch}.rope.scale_linear", 1.0)  # how files of 2023 spelt it
        else:
            raise ModelError(f"{self.path}: rope scaling {kind!r} is not supported; zl serves none, linear, Llama 3's")
        if not linear > 0:
            raise ModelError(f"{self.path}: linear rope scaling by {linear}; the factor must be above zero")
        divisors = np.ones(head_dim // 2, np.float32)
        if place is not None:
            if _TYPES[place.type_id].name != "F32" or place.dims != (head_dim // 2,):
                raise ModelError(f"{self.path}: tensor {_ROPE_FACTORS} must be F32 [{head_dim // 2}]")
            divisors = self._raw(place).view(np.float32)
        divisors = divisors * np.float32(linear)
        return None if bool((divisors == 1).all()) else tuple(divisors.tolist())


def _canonical(name: str) -> str:
    """Translate a GGUF tensor name; one that is unknown stays as it is, for the check to refuse."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"layers.{int(match[1])}.{_LAYER[match[2]]}"
    return name


def _n_bytes(place: TensorPlace) -> int:
    block, size = gguf.GGML_QUANT_SIZES[_TYPES[place.type_id]]
    n = 1
    for dim in place.dims:  # Python integers: a made-up size must not wrap around
        n *= dim
    return n // block * size
