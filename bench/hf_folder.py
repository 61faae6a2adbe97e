"""Write a GGUF as a bf16 Hugging Face folder, for peers that read no GGUF: python -m bench.hf_folder GGUF OUT.

Weights go through zl's own reader, the tokenizer through transformers' GGUF conversion. Needs the test extras.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from zl.errors import ModelError
from zl.gpu.hf_folder import stored_name
from zl.gpu.weights import WeightSource, open_model


def write_hf_folder(gguf: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Convert one GGUF file; `out` is made where it is missing, files in it are replaced. Returns `out`.

    Raises ModelError for a file that zl cannot read, and for rope factors that no config.json can say.
    """
    from transformers import AutoTokenizer

    source = open_model(gguf)
    config = _config(source, dtype)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {stored_name(name): source.tensor(name, dtype).contiguous() for name in sorted(source.names)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    return out


def _config(source: WeightSource, dtype: torch.dtype) -> dict[str, Any]:
    shape = source.shape
    if shape.rope_factors is not None:
        raise ModelError(f"{shape.name}: its rope factors have no place in config.json; serve the GGUF file itself")
    if shape.attention_bias and "layers.0.bo" not in source.names:
        raise ModelError(f"{shape.name}: biases on q, k and v only; this script writes plain Llama folders")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": shape.n_layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if shape.bos_id is not None:
        config["bos_token_id"] = shape.bos_id
    if shape.eos_ids:
        config["eos_token_id"] = shape.eos_ids[0] if len(shape.eos_ids) == 1 else list(shape.eos_ids)
    return config


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, help="the GGUF file to read")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    try:
        print(write_hf_folder(arguments.gguf, arguments.out, getattr(torch, arguments.dtype)))
    except ModelError as error:
        raise SystemExit(f"hf_folder: {error}") from None


if __name__ == "__main__":
    main()
