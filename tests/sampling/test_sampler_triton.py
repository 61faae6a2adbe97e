"""zl/sampling/sampler.py, `sample_triton`: the Triton sampler against its torch twin, in triton's interpreter.

The interpreter is chosen when triton is imported, so the comparison runs in a process of its own: this file, called by
its name.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sampling import oracle
from tests.sampling.native import bitmap
from zl.errors import ShapeError
from zl.sampling import rng, sampler

triton = pytest.importorskip("triton", reason="triton is not installed: a CPU-only install needs none")


def buffers(n, vocab):
    """Outputs and scratch, poisoned."""
    return {
        "weights": torch.full((n, vocab), float("nan")), "token": torch.full((n,), -9),
        "logprob": torch.full((n,), float("nan")), "finite": torch.zeros(n, dtype=torch.bool),
    }  # fmt: skip


def compare(n, vocab):
    """Return (equal tokens, rows) over mixed rows, and check finiteness and log probabilities."""
    r = np.random.default_rng(vocab)
    rows = [oracle.zipf_logits(r, vocab) for _ in range(n)]
    for i in range(0, n, 2):
        rows[i] = np.round(r.normal(0, 2, vocab) * 2).astype(np.float32) / 2  # many ties
    rows[0][:] = -np.inf
    rows[1][vocab // 2] = np.nan
    rows[2][0] = np.inf
    rows[3][:] = -np.inf
    rows[3][vocab - 1] = 4
    rows[4][:] = 1.5
    rows[5][r.random(vocab) < 0.5] = -np.inf
    rows[5][0] = 0
    logits = torch.from_numpy(np.stack(rows))
    seen = r.random((n, vocab)) < 0.1
    words = torch.from_numpy(np.stack([bitmap(row) for row in seen]).view(np.int32))
    columns = [
        torch.from_numpy(r.choice(values, n).astype(np.float32))
        for values in ([0, 0.3, 0.7, 0.9], [0, 0.5, 0.95, 0.99, 1], [1, 1.1, 1.3])
    ]
    seeds, index = rng.seed_tensor([int(v) for v in r.integers(0, 2**64, n, dtype=np.uint64)]), torch.arange(n)
    token, logprob, finite = sampler.sample(logits, torch.from_numpy(seen), *columns, seeds, index)
    out = buffers(n, vocab)
    sampler.sample_triton(logits, words, *columns, seeds, index, **out)
    assert out["finite"].tolist() == finite.tolist()
    assert finite.sum() == n - 3
    same = out["token"] == token
    assert out["token"][:3].tolist() == [-1, -1, -1]
    assert out["logprob"][:3].tolist() == [0, 0, 0]
    assert float((out["logprob"] - logprob)[same].abs().max()) < 1e-5
    return int(same.sum()), n


def test_triton_draws_as_torch_does():
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.strip())
    assert "rows equal" in done.stdout


@pytest.mark.parametrize("argument", ["logits", "seen", "top_p", "seed", "weights", "token", "finite"])
def test_the_launcher_names_a_wrong_argument(argument):
    n, vocab = 2, 40
    good = {
        "logits": torch.zeros(n, vocab), "seen": torch.zeros(n, 2, dtype=torch.int32), "temperature": torch.ones(n),
        "top_p": torch.ones(n), "penalty": torch.ones(n), "seed": torch.zeros(n, dtype=torch.int64),
        "index": torch.zeros(n, dtype=torch.int64), **buffers(n, vocab),
    }  # fmt: skip
    strided = torch.zeros(*good[argument].shape, 2, dtype=good[argument].dtype)[..., 0]
    for bad in (good[argument].to(torch.float16), strided):
        with pytest.raises(ShapeError) as caught:
            sampler.sample_triton(**(good | {argument: bad}))
        assert caught.value.argument == argument


if __name__ == "__main__":
    results = [compare(n, vocab) for n, vocab in ((40, 40), (24, 600), (10, 1100))]
    equal, total = (sum(column) for column in zip(*results, strict=True))
    assert equal >= 0.99 * total, (equal, total)
    print(f"{equal} of {total} rows equal")
