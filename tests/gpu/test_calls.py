"""One call into compute a decode step, whatever the number of rows: what bench.micro.calls counts, on a tiny model."""

import torch

from bench.micro.calls import profiled
from tests.gpu.native_kit import Bench, random_weights, tiny


def test_a_step_of_128_rows_is_one_launch_and_one_fence():
    shape = tiny()
    weights = random_weights(shape, torch.bfloat16)
    with Bench(shape, weights, rows=128, model_len=128, n_pages=512, step_tokens=512) as bench:
        for row in range(128):
            bench.seat(row, [1, 2, 3, 4], room=120)
        found = profiled(bench.step, bench.slots, 128, 4, steps=20)
    assert found.steps == 20
    assert found.foreign == {"zl_launch": 20, "zl_wait": 20}
    assert "step.py" in found.profile
    assert "torch" not in found.profile
