"""What the CUDA program takes of the device, decided from shapes alone: buckets, and the bytes of each kind.

The numbers are those that `gpu.cuda_step` allocates (a test compares them), but for programs, which are an estimate.
State: none. Refuses triton, cuda, rows, net and asyncio: the plan is made, and tested, on machines without a GPU.
"""

from __future__ import annotations

from zl.errors import DeviceError
from zl.gpu.kernels.attention import split_tokens
from zl.sampling.filter import Filter
from zl.shapes import TOKEN_BUCKETS, ModelShape, Shapes

KERNELS_PER_LAYER = 11
KERNELS_PER_STEP = 10

NODE_BYTES = 16 << 10
"""Estimate of one captured kernel launch on the device. Never measured: `make gpu-check` prints the real sum."""

MODULE_BYTES = 128 << 20
"""Estimate of the loaded kernels and their local memory; the CUDA context itself is no part of what is free."""


SHARED_BYTES = 163 << 10
"""Shared memory that a program may need: what sm_80 and sm_90 have. sm_86 and sm_89 have 99 KiB."""


def check_device(name: str, major: int, minor: int, shared_bytes: int) -> int:
    """Refuse a device that the kernels do not run on; return its capability's major number times ten.

    shared_bytes  most shared memory of one program
    Raises        DeviceError
    """
    if major < 8:
        raise DeviceError(
            f"{name} has compute capability {major}.{minor}; bfloat16 needs 8.0 (A100) or later: serve with "
            "--dtype float32, or with --device cpu",
            call="cudaGetDeviceProperties",
            lasting=True,
        )
    if shared_bytes < SHARED_BYTES:
        raise DeviceError(
            f"{name} (compute capability {major}.{minor}) gives a program {shared_bytes >> 10} KiB of shared memory, "
            f"the kernels are built for {SHARED_BYTES >> 10} KiB (A100, H100 and later): serve with --dtype float32, "
            "or with --device cpu",
            call="cudaGetDeviceProperties",
            lasting=True,
        )
    return 10 * major


def token_buckets(step_tokens: int) -> tuple[int, ...]:
    """Return the captured sizes for a build, widest first: the order of capture."""
    return (step_tokens, *sorted((b for b in TOKEN_BUCKETS if b < step_tokens), reverse=True))


def weight_bytes(shape: ModelShape, *, o_bias: bool = False) -> int:
    """Count the bytes of the weights: matrices bf16, vectors float32, a tied head once."""
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    matrices = 2 * shape.hidden * (q + kv) + 3 * shape.hidden * shape.ffn
    vectors = 2 * shape.hidden
    if shape.attention_bias:
        vectors += q + 2 * kv + (shape.hidden if o_bias else 0)
    if shape.mlp_bias:
        vectors += 2 * shape.ffn + shape.hidden
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return 2 * (shape.n_layers * matrices + tables) + 4 * (shape.n_layers * vectors + shape.hidden)


def buffer_bytes(
    shape: ModelShape, shapes: Shapes, *, canary: bool = False, penalty_filter: str = "exact"
) -> int:
    """Count the bytes of activations (one set, that of the widest bucket), row state and rotary tables.

    canary  the last row is the heartbeat's and never shares a step
    """
    t, form = shapes.step_tokens, Filter(penalty_filter, shape.vocab)
    r = min(t, shapes.max_rows - canary)
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    context = 20 * t + 21 * r + 8
    tokens = t * (6 * shape.hidden + 4 * (q + 2 * kv) + 4 * q + 10 * shape.ffn)
    splits = -(-shapes.max_model_len // split_tokens(shapes.max_model_len))
    partials = 4 * r * splits * shape.n_heads * (shape.head_dim + 2)
    draws = r * (2 * shape.hidden + 8 * shape.vocab + 28 + 4 * form.bitmap_words + 13 + 4)
    state = shapes.max_rows * (4 * shapes.max_model_len + 4 * shapes.pages_per_row + 5 + 4 * form.words)
    tables = 4 * shapes.max_model_len * shape.head_dim + 4 * max(1, len(shape.eos_ids))
    return context + tokens + partials + draws + state + tables


def n_programs(shapes: Shapes, n_slots: int, *, canary: bool = False) -> int:
    """Count the captured graphs: each bucket for single tokens and for mixed steps, for each slot.

    canary  the last slot is the heartbeat's, which has the narrowest bucket only
    """
    return 2 * (len(token_buckets(shapes.step_tokens)) * (n_slots - canary) + canary)


def program_bytes(shape: ModelShape, shapes: Shapes, n_slots: int = 2, *, canary: bool = False) -> int:
    """Estimate the bytes of the captured graphs."""
    nodes = KERNELS_PER_LAYER * shape.n_layers + KERNELS_PER_STEP
    return n_programs(shapes, n_slots, canary=canary) * nodes * NODE_BYTES + MODULE_BYTES
