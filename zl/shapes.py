"""Every build-time size: wire limits, page and row counts, the shape of a model.

Owns no state. Imports nothing but the standard library; torch and the environment never enter here.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 32
"""Tokens in one KV page."""

MAX_ROWS = 256
"""Batch seats in the widest build."""

TOKEN_BUCKETS = (16, 64, 256)
"""Step sizes in tokens below the widest, which is the build's `step_tokens`: the tiles of `linear` change at 16, 64."""

MAX_THREADS = 256
"""Compute threads of the CPU program: kMaxThreads of its threads.hpp."""

INT8_MODEL_LEN = 65_536
"""Longest rows over int8 keys and values: 255 * 127 * 65,536 is the largest sum of weights that an int32 holds."""

HEADER_BYTES = 4
MAX_FRAME = 262_144
MAX_MESSAGES = 16
MANY_MESSAGES = 64
"""Most turns where the policy allows more than the wire's 16."""
MAX_PIECES = 2 * (MANY_MESSAGES + 2) + 1
"""Most pieces of a prompt whose ids are read where they lie: turns, system prompt and context, each with template text
before it, and some after all. A prompt of more, which many cuts make, is copied."""

TOKEN_BYTES = 4
"""Token ids travel as little-endian int32, and lie in memory as int32."""

OWN = -1
"""Source of a piece that begins at the first of its row's own ids: ~0 (`gpu.pinned.RowColumns`)."""

MAX_STOPS = 4
MAX_STOP_BYTES = 64

SYSTEM_TOKENS = 512
CONTEXT_TOKENS = 512
MAX_TOKENS = 2_048
DEFAULT_TOKENS = 256
MODEL_LEN = 4_096


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling, the parameters of `rope_type: llama3` in transformers."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide a Llama-family forward pass."""

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_position: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied: bool = True
    attention_bias: bool = False  # biases on q, k and v (Qwen2 style) and on o where the file has one
    mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    rope_factors: tuple[float, ...] | None = None  # divisors of the inverse frequencies, one a pair: GGUF, or linear


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes one build is made for; every buffer is allocated from these."""

    max_rows: int = MAX_ROWS
    max_model_len: int = MODEL_LEN
    max_tokens: int = MAX_TOKENS
    default_tokens: int = DEFAULT_TOKENS
    system_tokens: int = SYSTEM_TOKENS
    context_tokens: int = CONTEXT_TOKENS
    step_tokens: int = 512  # most tokens one step computes, decode rows and prefill chunks together
    n_pages: int = 0

    @property
    def pages_per_row(self) -> int:
        """Width of a page table row."""
        return pages_for(self.max_model_len)


def pages_for(n_tokens: int) -> int:
    """Count the pages that hold `n_tokens` tokens."""
    return -(-n_tokens // PAGE)
