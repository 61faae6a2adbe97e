"""The heartbeat on the device: what a beat costs, and that damage to a weight is found, mended and leaves no trace."""

from __future__ import annotations

import time

import torch

from bench.gpu.report import Report
from bench.gpu.rig import RandomTensors, Rig
from zl.gpu.cuda_guard import CudaGuard


def heartbeat(report: Report, rig: Rig, n_prompt: int, n_new: int) -> None:
    """Beat; flip a bit of a weight, find it, upload and capture anew, compare an answer's bits with those before."""
    begun, now = time.perf_counter(), [1_000.0]
    guard = CudaGuard(
        rig.engine, rig.columns, rig.all_slots, rig.wide, RandomTensors(rig.shape, rig.device.torch_device),
        beat_s=60.0, clock=lambda: now[0],
    )  # fmt: skip
    opened = time.perf_counter() - begun
    prompt = rig.prompt(n_prompt, 8)
    before = rig.answer(prompt, n_new, launch=guard.launch)

    def beat() -> float:
        now[0] += 60.001
        started = time.perf_counter()
        for _ in range(100_000):
            if not guard.due():
                break
            guard.between()
        return time.perf_counter() - started

    quiet = beat()
    counters = guard.counters
    ok = (counters.beats, counters.retired) == (1, 0)
    text = f"{opened:.2f} s for golden readings and sums, {quiet * 1e3:.1f} ms for a whole beat with all slices"
    report.prove(rig.shape.name, "heartbeat, undisturbed", ok, text, opened_s=opened, beat_s=quiet)

    words = dict(rig.engine.device_tensors())["layers.0.w_down"].view(-1).view(torch.int32)
    words[words.numel() // 2] ^= 1 << 12
    rig.engine.stream.settle()
    mended = beat()
    after = rig.answer(prompt, n_new, launch=guard.launch)
    ok = (counters.retired, counters.recaptured, guard.fallback) == (1, 1, False) and after == before
    text = f"{mended:.2f} s to find it, upload and capture anew; answer {'equal' if after == before else 'other'} bits"
    report.prove(rig.shape.name, "a flipped bit is found and mended", ok, text, seconds=mended)
