"""A Hugging Face folder as a WeightSource: config.json and safetensors, mapped and never read into a second copy.

Owns the open maps. Refuses net, text, asyncio, pickled weights and code from the folder.
Source: the keys of config.json, transformers `LlamaConfig` (4.x `rope_scaling`, 5.x `rope_parameters`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from zl.errors import ModelError
from zl.gpu.source import WeightSource, check_shape, check_tensors
from zl.shapes import ModelShape, RopeScaling

MODEL_TYPES = ("llama", "mistral", "qwen2")

_DTYPES = ("F32", "F16", "BF16")
_TOP = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "wq",
    "self_attn.k_proj.weight": "wk",
    "self_attn.v_proj.weight": "wv",
    "self_attn.o_proj.weight": "wo",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "w_gate",
    "mlp.up_proj.weight": "w_up",
    "mlp.down_proj.weight": "w_down",
    "self_attn.q_proj.bias": "bq",
    "self_attn.k_proj.bias": "bk",
    "self_attn.v_proj.bias": "bv",
    "self_attn.o_proj.bias": "bo",
    "mlp.gate_proj.bias": "b_gate",
    "mlp.up_proj.bias": "b_up",
    "mlp.down_proj.bias": "b_down",
}
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_DERIVED = "rotary_emb.inv_freq"  # computed from the configuration; old checkpoints also store it


class HfSource(WeightSource):
    """One folder with config.json and *.safetensors. Raises ModelError when opened on anything else."""

    def __init__(self, path: Path):
        self.path = path
        config = _read_json(path / "config.json", required=True)
        generation = _read_json(path / "generation_config.json")
        self.shape = check_shape(path, _read_shape(path, config, generation))
        self.files = tuple(_weight_files(path))
        self._handles: dict[str, Any] = {}
        self._file_names: dict[str, str] = {}
        dims: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            self._index(file, dims)
        check_tensors(path, self.shape, dims, self._file_names)
        self.names = frozenset(dims)
        tokenizer_config = _read_json(path / "tokenizer_config.json")
        self.tokenizer_fields = {
            "tokenizer_json": path / "tokenizer.json",  # whether it is there or not: who needs it says so
            "tokenizer_config": tokenizer_config,
        }
        self.chat_template = _chat_template(path, tokenizer_config)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource. In the stored dtype the result lies in the mapped file itself."""
        stored: torch.Tensor = self._handles[name].get_tensor(self._file_names[name])
        return stored.to(dtype)

    def blocks(self, name: str) -> tuple[str, np.ndarray] | None:
        """See WeightSource: a folder's tensors are never quantised."""
        if name not in self.names:
            raise KeyError(name)
        return None

    def _index(self, file: Path, dims: dict[str, tuple[int, ...]]) -> None:
        try:
            handle = safe_open(str(file), framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file}: damaged or cut short ({str(error)[:120]}); download it again") from None
        for stored in handle.keys():  # noqa: SIM118 (not a mapping)
            if stored.endswith(_DERIVED):
                continue
            name = _canonical(stored)
            if name == "head" and self.shape.tied:
                continue  # the configuration says that the head is the embedding; transformers ignores the copy too
            piece = handle.get_slice(stored)
            if piece.get_dtype() not in _DTYPES:
                raise ModelError(
                    f"{file}: tensor {stored} is {piece.get_dtype()}; zl reads {', '.join(_DTYPES)} from safetensors"
                )
            if name in dims:
                raise ModelError(f"{file}: tensor {stored} is in two files of the folder; remove the surplus file")
            dims[name] = tuple(piece.get_shape())
            self._handles[name], self._file_names[name] = handle, stored


def _canonical(stored: str) -> str:
    """Translate a checkpoint's tensor name; one that is unknown stays as it is, for the check to refuse."""
    if stored in _TOP:
        return _TOP[stored]
    match = _BLOCK.fullmatch(stored)
    if match and match[2] in _LAYER:
        return f"layers.{int(match[1])}.{_LAYER[match[2]]}"
    return stored


def stored_name(name: str) -> str:
    """Translate a canonical name to the checkpoint's: the way back, for writers of folders. Raises KeyError."""
    if name in _TOP.values():
        return next(stored for stored, canonical in _TOP.items() if canonical == name)
    _, layer, last = name.split(".")
    return f"model.layers.{layer}." + {canonical: stored for stored, canonical in _LAYER.items()}[last]


def _read_json(file: Path, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(f"{file}: missing; give a Hugging Face folder (config.json and *.safetensors)") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); check its permissions") from None
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: not a JSON object; download it again")
    return value


def _weight_files(path: Path) -> list[Path]:
    """Find the weights as transformers does: one model.safetensors, or the files that the index names."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{path}: no model.safetensors and no index; zl reads safetensors only, never pickled weights")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no weight_map; download it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index}: {name!r} leads out of the folder; download the model again")
        if not (path / name).is_file():
            raise ModelError(f"{path / name}: missing, the index names it; download it again")
    return [path / name for name in names]


def _read_shape(path: Path, config: dict[str, Any], generation: dict[str, Any]) -> ModelShape:
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"{path}: model type {kind!r} is not supported; zl serves folders of {', '.join(MODEL_TYPES)}")
    _refuse_variants(path, config)
    n_heads, hidden = _integer(path, config, "num_attention_heads"), _integer(path, config, "hidden_size")
    theta, scaling, factor = _rope(path, config)
    head_dim = _integer(path, config, "head_dim", hidden // n_heads if n_heads else 0)
    bos = config.get("bos_token_id", generation.get("bos_token_id"))
    return ModelShape(
        name=Path(str(config.get("_name_or_path") or path.resolve())).name or path.resolve().name,
        n_layers=_integer(path, config, "num_hidden_layers"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=_integer(path, config, "num_key_value_heads", n_heads),
        head_dim=head_dim,
        ffn=_integer(path, config, "intermediate_size"),
        vocab=_integer(path, config, "vocab_size"),
        max_position=_integer(path, config, "max_position_embeddings"),
        rms_eps=_number(path, config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_ids=tuple(sorted({*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))})),
        bos_id=bos if isinstance(bos, int) else None,
        rope_factors=None if factor == 1.0 else (factor,) * (head_dim // 2),
    )


def _refuse_variants(path: Path, config: dict[str, Any]) -> None:
    """Refuse what changes the forward pass and what zl does not compute: better no model than a wrong one."""
    if config.get("quantization_config"):
        raise ModelError(f"{path}: a quantised checkpoint (quantization_config); use the plain one or a GGUF file")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act {config['hidden_act']!r}; zl serves silu")
    if config.get("sliding_window") is not None and config.get("use_sliding_window", config["model_type"] == "mistral"):
        raise ModelError(f"{path}: sliding-window attention is not supported; zl serves full attention")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ModelError(f"{path}: layer_types other than full_attention are not supported")


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """Read base, Llama-3 scaling and the linear factor from either spelling."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{path}: {key} in config.json is not an object; download it again")
    rope: dict[str, Any] = new or old or {}
    theta = _number(path, rope, "rope_theta", _number(path, config, "rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    for partial in (rope.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise ModelError(f"{path}: partial_rotary_factor {partial}; zl rotates whole heads")
    if kind == "default":
        return theta, None, 1.0
    if kind == "linear":
        factor = _number(path, rope, "factor")
        if not factor > 0:
            raise ModelError(f"{path}: linear rope scaling by {factor}; the factor must be above zero")
        return theta, None, factor
    if kind == "llama3":
        original = _integer(path, rope, "original_max_position_embeddings", config.get("max_position_embeddings"))
        low, high = _number(path, rope, "low_freq_factor"), _number(path, rope, "high_freq_factor")
        factor = _number(path, rope, "factor")
        if not (factor > 0 and 0 < low < high and original > 0):
            raise ModelError(f"{path}: llama3 rope scaling needs factor > 0 and 0 < low_freq_factor < high_freq_factor")
        return theta, RopeScaling(factor, low, high, original), 1.0
    raise ModelError(f"{path}: rope scaling {kind!r} is not supported; zl serves default, linear and llama3")


def _number(path: Path, config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{path}: {key} in config.json is {value!r}, not a number; download it again")
    return float(value)


def _integer(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{path}: {key} in config.json is {value!r}, not a whole number; download it again")
    return value


def _ids(value: Any) -> list[int]:
    """Read a token id that may be one number, several, or absent."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Find the chat template: its own file first, as transformers does; of several named ones, `default`."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None
