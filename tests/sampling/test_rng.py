"""zl/sampling/rng.py: Philox's known answers, and one draw for all of its forms."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from zl.errors import ShapeError
from zl.sampling import rng

# Known answers of Random123 (kat_vectors, "philox4x32 10"): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
INDICES = [0, 1, 2, 1000, 2**31 - 1, 2**32 - 1]
PAIRS = [(s, i) for s in SEEDS for i in INDICES]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert rng.philox4x32(counter, key) == words


def test_uniform_is_the_top_24_bits_of_the_first_word():
    assert rng.uniform(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24


def test_tensor_form_equals_plain_python():
    seeds, indices = zip(*PAIRS, strict=True)
    u = rng.uniforms(rng.seed_tensor(seeds), torch.tensor(indices))
    assert u.dtype == torch.float32
    assert u.tolist() == [rng.uniform(s, i) for s, i in PAIRS]


def test_seeds_come_as_list_int64_or_uint64():
    column = np.array(SEEDS, np.uint64)
    wanted = column.view(np.int64).tolist()
    assert rng.seed_tensor(SEEDS).tolist() == wanted
    assert rng.seed_tensor(torch.from_numpy(column)).tolist() == wanted
    assert rng.seed_tensor(torch.from_numpy(column.view(np.int64))).tolist() == wanted


def test_shapes_are_checked():
    with pytest.raises(ShapeError):
        rng.uniforms(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError):
        rng.uniforms(torch.zeros(2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("level", ["avx512", "avx2", "scalar"])
def test_native_form_equals_plain_python(native, level):
    sampler = native(level, 8)
    assert [sampler.uniform(s, i) for s, i in PAIRS] == [rng.uniform(s, i) for s, i in PAIRS]


def test_draws_are_uniform_along_index_and_along_seed():
    n = 100_000
    along_index = rng.uniforms(torch.full((n,), 7, dtype=torch.int64), torch.arange(n))
    along_seed = rng.uniforms(torch.arange(n), torch.full((n,), 3, dtype=torch.int64))
    for u in (along_index, along_seed):
        assert float(u.min()) >= 0
        assert float(u.max()) < 1
        counts = np.histogram(u.numpy(), bins=256, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-6
        assert abs(float(np.corrcoef(u[1:].numpy(), u[:-1].numpy())[0, 1])) < 0.02


def test_module_imports_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from zl.sampling import rng, sampler\n"
        "assert rng.philox_uniform is None and not rng.HAVE_TRITON and 0 <= rng.uniform(1, 2) < 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
