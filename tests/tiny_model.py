"""A tiny Llama in a Hugging Face folder: real tokenizer and template, random weights; all about it takes moments."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROLS = ("<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "vocab_size": 288,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 257, "eos_token_id": 258, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
}  # fmt: skip


def write_tiny(folder: Path, *, seed: int = 0, bias: bool = False) -> Path:
    """Write the model; `bias` gives it biases on q, k, v and in the MLP."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROLS])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = CONFIG | ({"attention_bias": True, "mlp_bias": True} if bias else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(seed, bias), folder / "model.safetensors")
    return folder


def _tensors(seed: int, bias: bool) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, ffn = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    out = {"model.embed_tokens.weight": torch.randn(CONFIG["vocab_size"], hidden, generator=g),
           "model.norm.weight": torch.ones(hidden)}  # fmt: skip
    matrices = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=g)
        for name, size in matrices.items():
            out[f"{at}{name}.weight"] = torch.randn(*size, generator=g) * size[1] ** -0.5
            if bias:
                out[f"{at}{name}.bias"] = 0.1 * torch.randn(size[0], generator=g)
    # Norms keep float32 values that bfloat16 has not: who rounds them is found out.
    return {name: t if "norm" in name else t.to(torch.bfloat16).contiguous() for name, t in out.items()}
