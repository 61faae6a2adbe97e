"""GGUF headers: bytes → fields and tensor places, every length checked against the file before it is used.

Owns no state. Imports the standard library, numpy and our errors; refuses torch, net, text, asyncio.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zl.errors import ModelError

_SCALARS: dict[int, tuple[str, str]] = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_AGAIN = "the file is damaged or cut short; download it again"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of the file. `dims` as torch counts them, outermost first; `offset` from the start of the file."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the tensor data. `data` is the whole file, uint8, privately mapped: writable, never written."""

    fields: dict[str, Any]
    tensors: dict[str, TensorPlace]
    data: np.ndarray


class _Cursor:
    """Reads forward through the mapped file and refuses to pass its end."""

    def __init__(self, path: Path, view: memoryview):
        self.path, self.view, self.at = path, view, 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what} at byte {self.at}; {_AGAIN}")

    def take(self, n_bytes: int) -> memoryview:
        end = self.at + n_bytes
        if end > len(self.view):
            raise self.fail(f"header ends: {n_bytes} bytes wanted, {len(self.view) - self.at} left")
        piece = self.view[self.at : end]
        self.at = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("<Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind][0])
        if kind != _ARRAY:
            raise self.fail(f"unknown value type {kind}")
        element, count = self.scalar("<I"), self.scalar("<Q")
        if element == _STRING:
            if count * 8 > len(self.view) - self.at:  # a string is at least its length: no loop over a made-up count
                raise self.fail(f"array of {count} strings is longer than the file")
            return [self.string() for _ in range(count)]
        if element not in _SCALARS:
            raise self.fail(f"array of unknown element type {element}")
        dtype = np.dtype(_SCALARS[element][1])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def read_header(path: Path) -> GgufHeader:
    """Map a GGUF file (version 2 or 3, little endian) and read its header. Raises ModelError."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ModelError(f"{path}: the file is empty; download it again") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    cursor = _Cursor(path, memoryview(mapped))
    if bytes(mapped[:4]) != b"GGUF":
        start_bytes = bytes(mapped[:4])
        raise ModelError(f"{path}: not a GGUF file, it starts with {start_bytes!r}; give a .gguf file or a folder")
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version}; zl reads 2 and 3, little endian: convert the model again")
    n_tensors, n_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        key = cursor.string()
        if key in fields:
            raise cursor.fail(f"field {key!r} is given twice")
        fields[key] = cursor.value(cursor.scalar("<I"))
    places: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(n_tensors):
        name, n_dims = cursor.string(), cursor.scalar("<I")
        if not 0 < n_dims <= _MAX_DIMS:
            raise cursor.fail(f"tensor {name!r} with {n_dims} dimensions")
        dims = tuple(cursor.scalar("<Q") for _ in range(n_dims))[::-1]
        places.append((name, dims, cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment is {alignment!r}, not a power of two from 8 up; {_AGAIN}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: TensorPlace(name, dims, kind, start + offset) for name, dims, kind, offset in places}
    for name, _, _, offset in places:
        if offset % alignment:
            raise ModelError(f"{path}: tensor {name!r} lies at {offset}, not a multiple of {alignment}; {_AGAIN}")
    if len(tensors) != len(places):
        raise ModelError(f"{path}: a tensor name is given twice; {_AGAIN}")
    return GgufHeader(fields, tensors, np.frombuffer(mapped, np.uint8))
