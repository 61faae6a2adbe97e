"""The samplers under test: the torch twin and every level of the native one that this machine can run."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from tests.sampling.native import LEVELS, NativeSampler, compile_level, cpu_flags
from zl.sampling import sampler
from zl.sampling.filter import Filter


class TorchSampler:
    """The torch twin behind the native sampler's calls, one row at a time."""

    level = "torch"

    def __init__(self, vocab):
        self.vocab = vocab

    def row(self, logits, *, seen=None, temperature=1.0, top_p=1.0, penalty=1.0, seed=0, index=0, logprob=True):
        mask = np.zeros((1, self.vocab), bool) if seen is None else _unpack(seen, self.vocab)[None]
        columns = (torch.tensor([v], dtype=torch.float32) for v in (temperature, top_p, penalty))
        token, lp, finite = sampler.sample(
            torch.from_numpy(logits)[None], torch.from_numpy(mask), *columns, [seed], torch.tensor([index])
        )
        return int(token[0]), float(lp[0]) if logprob else 0.0, 0 if finite[0] else 4

    def kept(self, logits, *, seen=None, temperature=1.0, top_p=1.0, penalty=1.0):
        mask = np.zeros(self.vocab, bool) if seen is None else _unpack(seen, self.vocab)
        x = sampler.penalise(torch.from_numpy(logits)[None], torch.from_numpy(mask)[None], torch.tensor([penalty]))[0]
        return sampler.kept_tokens(x, float(np.float32(temperature)), float(np.float32(top_p))).numpy()

    def seen(self, ids, later=(), kind="exact"):
        form = Filter(kind, self.vocab)
        row = np.zeros(form.words, np.uint32)
        form.add(row, np.array([*ids, *later], np.int64))
        return form.bitmaps(row[None])[0]


def _unpack(words, vocab):
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab].astype(bool)


@pytest.fixture(scope="session")
def native_levels(tmp_path_factory):
    """Compile every level that this processor runs: {level: library}."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the native sampler cannot be built here")
    folder = tmp_path_factory.mktemp("native_sampler")
    flags = cpu_flags()
    return {level: compile_level(level, folder) for level in LEVELS if LEVELS[level][1] <= flags}


@pytest.fixture(scope="session")
def generic_levels(native_levels, tmp_path_factory):
    """Compile every level without a profile: {level: library}."""
    folder = tmp_path_factory.mktemp("generic_sampler")
    return {level: compile_level(level, folder, profiles=[]) for level in native_levels}


@pytest.fixture
def native(native_levels):
    """Make a native sampler: native(level, vocab); skips a level that this processor lacks."""
    made = []

    def make(level, vocab):
        if level not in native_levels:
            pytest.skip(f"this processor cannot run the {level} level")
        made.append(NativeSampler(level, native_levels[level], vocab))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=["torch", "avx512", "avx2", "scalar"])
def make_sampler(request):
    """Make the sampler under test for a vocabulary: make_sampler(vocab)."""
    if request.param == "torch":
        return TorchSampler
    native = request.getfixturevalue("native")
    return lambda vocab: native(request.param, vocab)
