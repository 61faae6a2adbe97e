"""The door to model files: one call opens a GGUF file or a Hugging Face folder.

Owns no state. Refuses net, text, asyncio, and every format that can execute (no pickle).
"""

from __future__ import annotations

from pathlib import Path

from zl.errors import ModelError
from zl.gpu.gguf_file import GgufSource
from zl.gpu.hf_folder import HfSource
from zl.gpu.source import WeightSource

__all__ = ["WeightSource", "open_model"]

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_model(path: str | Path) -> WeightSource:
    """Open a model and check its hyper-parameters and tensors; reads headers only, weights stay mapped.

    Raises ModelError, one line, for a path that is missing, damaged, or not a model that zl serves.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return HfSource(path)
    if path.is_file():
        if path.suffix in _PICKLED:
            raise ModelError(f"{path}: zl reads no pickled weights, they can run code; use GGUF or safetensors")
        if path.suffix == ".safetensors":
            raise ModelError(f"{path}: give the folder that holds it and its config.json, not the file")
        return GgufSource(path)
    if path.exists():
        raise ModelError(f"{path}: neither a file nor a folder; give a GGUF file or a Hugging Face folder")
    raise ModelError(f"{path}: no such file or folder; give a GGUF file, a Hugging Face folder, or run `zl pull`")
