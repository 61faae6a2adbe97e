"""Where the weights of a damaged program come from again: the model's own files, or an artifact's packed weights.

State: an open file at most. Refuses rows, dispatch, net and asyncio; torch is loaded with the first fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from zl.gpu.native.step import NativeStep

if TYPE_CHECKING:
    from zl.gpu.model import Weights
    from zl.gpu.weights import WeightSource


class Renewal(Protocol):
    """Where the weights of a damaged program come from again. Both are called with no native step in flight."""

    def load(self, native: NativeStep, alive: Callable[[float], None]) -> Weights:
        """Give the fallback's weights in the native step's dtype; calls `alive` while it works."""

    def pack(self, native: NativeStep, weights: Weights) -> None:
        """Fill the native step's packed weights again, in place."""

    def close(self) -> None:
        """Give back what is held."""


class FromSource:
    """Weights from the model's own files."""

    def __init__(self, source: WeightSource):
        self._source = source

    def load(self, native: NativeStep, alive: Callable[[float], None]) -> Weights:
        """Dequantise every tensor."""
        import torch

        from zl.gpu.model import load_weights

        return load_weights(self._source, getattr(torch, native.dtype), alive)

    def pack(self, native: NativeStep, weights: Weights) -> None:
        """Pack what the fallback has loaded."""
        native.reload(weights.tensors, self._source.blocks)

    def close(self) -> None:
        """Nothing is held."""


class FromPacked:
    """Weights from an artifact's file, which is kept open: the artifact may be deleted while it is served."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("rb")

    def load(self, native: NativeStep, alive: Callable[[float], None]) -> Weights:
        """Read the packed weights again and take the tensors out of them."""
        from zl.gpu.fallback import unpacked

        native.reimport(self._file.fileno(), self._path)
        return unpacked(native, alive)

    def pack(self, native: NativeStep, weights: Weights) -> None:  # noqa: ARG002
        """Read the packed weights again."""
        native.reimport(self._file.fileno(), self._path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
