"""Models by transformers, the oracle that we did not write, and files of them in both formats that zl reads."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel, Qwen2Config

transformers.logging.disable_progress_bar()

TINY = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,  # large enough that attention and gates are far from uniform
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load_gguf(path: Path) -> PreTrainedModel:
    """Read a GGUF file by transformers' loader, in float32, for inference."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def tiny_llama(seed: int = 0, kind: str = "llama", **overrides: Any) -> PreTrainedModel:
    """Make a small random model, float32, norms and biases random too; `overrides` are fields of its configuration."""
    config: Any = (Qwen2Config if kind == "qwen2" else LlamaConfig)(**(TINY | overrides))
    with seeded(seed):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter.data, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a fixed seed inside, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Compute all positions' logits of one sequence, f32 [len, vocab]."""
    return model(torch.tensor([ids])).logits[0].float()


@torch.inference_mode()
def oracle_greedy(model: PreTrainedModel, ids: list[int], n_tokens: int) -> list[int]:
    """Continue greedily for `n_tokens`, passing over end tokens, by the plain cached forward."""
    out: list[int] = []
    step, cache = torch.tensor([ids]), DynamicCache(config=model.config)
    # transformers 5.24 renamed the argument and warns about the old name, which 4.57 needs.
    keyword = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    for _ in range(n_tokens):
        result = model(step, use_cache=True, **{keyword: cache})
        out.append(int(result.logits[0, -1].argmax()))
        step = torch.tensor([[out[-1]]])
    return out


def save_hf(model: PreTrainedModel, folder: Path, **kwargs: Any) -> Path:
    """Write a Hugging Face folder by transformers' save_pretrained."""
    model.save_pretrained(folder, **kwargs)
    return folder


def permute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Put q or k rows into the order of `llama` GGUF files: pair members side by side."""
    half = rows.shape[0] // n_heads // 2
    out = np.empty_like(rows)
    for head in range(n_heads):
        for i in range(half):
            for member in range(2):
                out[head * half * 2 + 2 * i + member] = rows[head * half * 2 + member * half + i]
    return out


def pack(values: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """Quantise f32 [rows, n] to raw blocks [rows, row_bytes] (or plain F32, F16).

    K-quants, which the library cannot write, get random codes and scales of the size of `values`: any bytes are valid.
    """
    qtype = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return gguf.quantize(values, qtype)
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (values.shape[0], values.shape[1] // block, size), np.uint8)
    scale = np.float16(values.std() / 1000 if kind == "Q6_K" else values.std() / 300)
    at = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (size - 2,)}[kind]  # d and dmin, or d alone
    for i in at:
        blocks[..., i : i + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(values.shape[0], -1)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: str = "F32",
    arch: str = "llama",
    fields: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    leave_out: str = "",
) -> Path:
    """Write a model as a GGUF file by the gguf library; matrices of type `kind`, vectors F32.

    fields     more metadata (numbers and texts), or other values for what is there
    extra      more tensors, f32
    leave_out  a GGUF tensor name that is not written
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    meta: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.eos_token_id": 2,
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (meta | dict(fields or {})).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for seed, (name, tensor) in enumerate(gguf_tensors(model, arch).items()):
        if name == leave_out:
            continue
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, pack(tensor, kind, seed), raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: PreTrainedModel, arch: str = "llama") -> dict[str, np.ndarray]:
    """List a model's tensors, f32, under their GGUF names and in GGUF row order."""
    config = model.config
    out: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        stem, kind = name.removeprefix("model.").rsplit(".", 1)
        if stem == "lm_head":
            if not config.tie_word_embeddings:
                out["output.weight"] = values
        elif stem in ("embed_tokens", "norm"):
            out["token_embd.weight" if stem == "embed_tokens" else "output_norm.weight"] = values
        else:
            _, layer, rest = stem.split(".", 2)
            if arch == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
                n_heads = config.num_attention_heads if "q_proj" in rest else config.num_key_value_heads
                values = permute(values, n_heads)
            out[f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"] = values
    return out
