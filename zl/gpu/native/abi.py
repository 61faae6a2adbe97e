"""The ctypes twin of api.h: structures, signatures, weight numbers.

Owns no state; a loaded library is returned to the caller. Refuses torch, rows, net and asyncio.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zl.errors import DeviceError, ShapeError

WEIGHTS = (
    "embed", "norm", "head", "attn_norm", "wq", "wk", "wv", "wo", "mlp_norm", "w_gate", "w_up", "w_down",
    "bq", "bk", "bv", "bo", "b_gate", "b_up", "b_down",
)  # fmt: skip
"""Positions are zl_weight_name's values."""

LAYER_WEIGHTS = WEIGHTS[3:]

PACKED = (("wq", "wk", "wv"), ("wo",), ("w_gate", "w_up"), ("w_down",))
"""A layer's packed matrices, in zl_config.kinds' order, and the tensors that share each."""

BLOCK_FORMATS = {"Q4_0": (2, 1), "Q4_1": (3, 1), "Q8_0": (8, 2)}
"""Formats that are kept as blocks: GGML's number, kind in zl_config.kinds."""

_INTS = (
    "n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab", "max_rows", "max_model_len",
    "pages_per_row", "n_pages", "max_step_tokens", "n_threads", "is_bf16", "kv8", "n_eos", "bloom",
)  # fmt: skip


class Config(ctypes.Structure):
    """zl_config."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in _INTS), ("rms_eps", ctypes.c_float), ("eos", ctypes.c_void_p),
        ("kinds", ctypes.c_void_p),
    ]  # fmt: skip


_COLUMNS = {
    "own_ids": np.int32, "n_pieces": np.int32, "piece_at": np.int32, "piece_source": np.int64, "arena": np.uint8,
    "prompt_len": np.int32, "max_new": np.int32, "page_table": np.int32,
    "temperature": np.float32, "top_p": np.float32, "penalty": np.float32, "seed": np.uint64, "row_flags": np.uint8,
}  # fmt: skip
_SLOT = {
    "n_segs": np.int32, "seg_row": np.int32, "seg_start": np.int32, "seg_len": np.int32, "seg_flags": np.uint8,
    "out_token": np.int32, "out_logprob": np.float32, "out_flags": np.uint8,
}  # fmt: skip


class Columns(ctypes.Structure):
    """zl_columns."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in list(_COLUMNS)[:5]),
        ("max_pieces", ctypes.c_int64), ("arena_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in list(_COLUMNS)[5:]),
    ]  # fmt: skip


class Slot(ctypes.Structure):
    """zl_slot."""

    _fields_ = [(name, ctypes.c_void_p) for name in _SLOT]


def _address(owner: Any, name: str, dtype: Any) -> int:
    array = getattr(owner, name)
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ShapeError(name, array.dtype, f"a contiguous array of {np.dtype(dtype)}")
    return int(array.ctypes.data)


def columns(source: Any) -> Columns:
    """Collect the addresses of row columns; the arrays must outlive the context."""
    at = {name: _address(source, name, dtype) for name, dtype in _COLUMNS.items()}
    return Columns(max_pieces=source.piece_at.shape[1], arena_bytes=source.arena.nbytes, **at)


def slots(sources: Sequence[Any]) -> Any:
    """Collect the addresses of the two step slots."""
    if len(sources) != 2:
        raise ShapeError("slots", len(sources), 2)
    made = [Slot(**{name: _address(s, name, dtype) for name, dtype in _SLOT.items()}) for s in sources]
    return (Slot * 2)(*made)


def view(pointer: ctypes.c_void_p, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Lay an array over native memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = (ctypes.c_char * size).from_address(pointer.value or 0)
    return np.ndarray(shape, dtype, buffer)


def load(path: Path) -> ctypes.CDLL:
    """Open a level's library and declare its functions.

    Raises  DeviceError: the file cannot be loaded
    """
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"cannot load {path}: {error}; delete the file and build again", call="dlopen") from error
    p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "zl_open": (p, [p, p, p]),
        "zl_count": (i, [p, p]),
        "zl_weight": (i, [p, i, i, p, n, n, i]),
        "zl_blocks": (i, [p, i, i, i, p, n, n]),
        "zl_rope": (i, [p, p, p, n]),
        "zl_packed_bytes": (n, [p]),
        "zl_export": (i, [p, i]),
        "zl_import": (i, [p, i, n]),
        "zl_start": (i, [p]),
        "zl_launch": (ctypes.c_uint32, [p, i]),
        "zl_wait": (i, [p, ctypes.c_uint32]),
        "zl_close": (None, [p]),
        "zl_read_kv": (i, [p, i, i, i, i, p, p]),
        "zl_write_kv": (i, [p, i, i, i, i, p, p]),
        "zl_logits": (i, [p, i, p, p]),
        "zl_times": (p, [p]),
        "zl_batches": (i, [p, p, p]),
        "zl_state": (None, [p, p, p, p, p]),
        "zl_packed": (p, [p, p]),
        "zl_unload": (None, [p]),
        "zl_settle": (None, [p]),
        "zl_pool": (p, [p, p, p]),
        "zl_unpack": (i, [p, i, i, p, n, n, i]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)  # the attribute is cached, an item is not
        function.restype, function.argtypes = result, arguments
    return lib
