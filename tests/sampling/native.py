"""Compiles the native sampler alone, once a level, and calls it with NumPy arrays."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zl.gpu.native.build import profile_flags

SOURCES = [Path(__file__).parents[2] / "zl" / "gpu" / "native" / name for name in ("sample.cpp", "filter.cpp")]
LEVELS = {
    "avx512": ("avx512f avx512bw avx512dq avx512vl avx2 fma", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": ("avx2 fma", {"avx2", "fma"}),
    "scalar": ("", set()),
}


def cpu_flags() -> set[str]:
    """Name this processor's instruction sets."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":")[1].split())
    return set()


def compile_level(level: str, folder: Path, profiles: Sequence[str] | None = None) -> Path:
    """Compile the sampler with the level's flags and its symbol suffix. profiles: flags in place of the build's."""
    out = folder / f"sample_{level}.so"
    flags = [f"-m{name}" for name in LEVELS[level][0].split()]
    flags += profile_flags() if profiles is None else profiles
    command = ["g++", "-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off"]
    command += ["-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # g++ 12's intrinsics
    subprocess.run([*command, *flags, f"-DZL_LEVEL={level}", *map(str, SOURCES), "-o", str(out)], check=True)
    return out


def _pointer(array: np.ndarray | None) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def bitmap(seen: np.ndarray) -> np.ndarray:
    """Pack bool [vocab] into uint32 [ceil(vocab / 32)]."""
    padded = np.zeros(-(-len(seen) // 32) * 32, np.uint8)
    padded[: len(seen)] = seen
    return np.packbits(padded, bitorder="little").view(np.uint32)


class _Filter(ctypes.Structure):
    """zl_filter."""

    _fields_ = [("vocab", ctypes.c_int32), ("bloom", ctypes.c_int32)]


class NativeSampler:
    """One level's functions and a scratch for one vocabulary. suffix: of the library's names."""

    def __init__(self, level: str, library: Path, vocab: int, suffix: str | None = None):
        self.level, self.vocab = level, vocab
        self._suffix = f"_{level}" if suffix is None else suffix
        lib = ctypes.CDLL(str(library))
        f, p, i = ctypes.c_float, ctypes.c_void_p, ctypes.c_int
        draw = [ctypes.c_uint64, ctypes.c_uint32]
        self._row = self._function(lib, "zl_sample_row", None, [p, i, p, f, f, f, *draw, p, p, p, p, i])
        self._kept = self._function(lib, "zl_sample_kept", i, [p, i, p, f, f, f, p, p])
        self._words = self._function(lib, "zl_filter_words", i, [_Filter])
        self._room = self._function(lib, "zl_filter_room", i, [_Filter])
        self._build = self._function(lib, "zl_filter_build", None, [_Filter, p, p, i])
        self._add = self._function(lib, "zl_filter_add", None, [_Filter, p, ctypes.c_int32])
        self._bitmap = self._function(lib, "zl_filter_bitmap", p, [_Filter, p, p])
        self._uniform = self._function(lib, "zl_sample_uniform", f, [ctypes.c_uint64, ctypes.c_uint32])
        self.program = self._function(lib, "zl_sample_program", i, [f, f, f])
        self._free = self._function(lib, "zl_sample_scratch_free", None, [p])
        self._scratch = self._function(lib, "zl_sample_scratch_new", p, [i])(vocab)
        assert self._scratch

    def _function(self, lib, name, result, arguments):
        function = getattr(lib, name + self._suffix)
        function.restype, function.argtypes = result, arguments
        return function

    def close(self):
        self._free(self._scratch)

    def row(self, logits, *, seen=None, temperature=1.0, top_p=1.0, penalty=1.0, seed=0, index=0, logprob=True):
        """Draw one row; returns (token, logprob, flags)."""
        assert logits.dtype == np.float32
        assert logits.shape == (self.vocab,)
        token, lp, flags = np.full(1, -7, np.int32), np.full(1, np.nan, np.float32), np.full(1, 99, np.uint8)
        self._row(_pointer(logits), self.vocab, _pointer(seen), temperature, top_p, penalty, seed, index, self._scratch,
                  _pointer(token), _pointer(lp), _pointer(flags), logprob)  # fmt: skip
        return int(token[0]), float(lp[0]), int(flags[0])

    def kept(self, logits, *, seen=None, temperature=1.0, top_p=1.0, penalty=1.0):
        """Return bool [vocab]: what top-p keeps, or None for NUMERIC."""
        kept = np.full(self.vocab, 7, np.uint8)
        settings = (temperature, top_p, penalty)
        n = self._kept(_pointer(logits), self.vocab, _pointer(seen), *settings, self._scratch, _pointer(kept))
        assert n == -1 or n == kept.sum()
        return None if n < 0 else kept.astype(bool)

    def row_filter(self, ids, later=(), kind="exact"):
        """Build a filter of ids, then add `later` one by one: uint32 [words]."""
        form, ids = _Filter(self.vocab, kind == "bloom"), np.asarray(ids, np.int32)
        row = np.full(self._words(form), 0xFFFFFFFF, np.uint32)
        self._build(form, _pointer(row), _pointer(ids), len(ids))
        for token in later:
            self._add(form, _pointer(row), token)
        return row

    def bitmap(self, row, kind):
        """Turn a row's filter into what the sampler reads: uint32 [ceil(vocab / 32)]."""
        form = _Filter(self.vocab, kind == "bloom")
        room = np.full(self._room(form) + 1, 0xFFFFFFFF, np.uint32)
        found = self._bitmap(form, _pointer(row), _pointer(room))
        assert found == (room if kind == "bloom" else row).ctypes.data
        assert room[-1] == 0xFFFFFFFF
        return (room if kind == "bloom" else row)[: -(-self.vocab // 32)].copy()

    def seen(self, ids, later=(), kind="exact"):
        """Give the bitmap that the sampler reads once ids were seen, then `later` one by one."""
        return self.bitmap(self.row_filter(ids, later, kind), kind)

    def uniform(self, seed, index):
        return self._uniform(seed, index)
