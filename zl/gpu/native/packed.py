"""A model's packed weights as a file: what the native step opens without dequantising or packing.

The file begins with the bytes that decide how its matrices are held (zl_config.kinds); the library writes the rest.
Owns no state. Refuses torch, rows, net and asyncio.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from zl.errors import ModelError

_HEAD = struct.Struct("<8sQ")
_MAGIC = b"zlweight"
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights that a native step of the same build has exported, and the library that reads them.

    weights  file written by `NativeStep.export`
    library  shared library of `level`
    dtype    "bfloat16" or "float32"
    """

    weights: Path
    library: Path
    level: str
    dtype: str


def write_head(file: IO[bytes], kinds: np.ndarray) -> None:
    """Begin a file. kinds: uint8 [n], opaque here."""
    head = _HEAD.pack(_MAGIC, len(kinds)) + kinds.tobytes()
    file.write(head.ljust(_aligned(len(head)), b"\0"))


def read_head(path: Path) -> tuple[np.ndarray, int]:
    """Return the kinds and where the library's part begins, in bytes. Raises ModelError: no such file's beginning."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) == _HEAD.size:
                magic, count = _HEAD.unpack(head)
                if magic == _MAGIC and count <= _ALIGN**2 and len(kinds := file.read(count)) == count:
                    return np.frombuffer(kinds, np.uint8).copy(), _aligned(_HEAD.size + count)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; build it again") from error
    raise ModelError(f"{path}: no packed weights, or cut short; build it again")


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN
