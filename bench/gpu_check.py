"""Prove and time the CUDA path on the GPU of this machine: `make gpu-check`, or `python -m bench.gpu_check`.

    python -m bench.gpu_check [--dry] [--models tiny,llama-3.2-1b,llama-3.1-8b,qwen2.5-7b,service] [--out bench/results]

Needs no network and no model file: weights are random, in real shapes. At most eight minutes: each section states what
it needs (bench/gpu/budget.py) and is named as skipped where that is not left. Writes JSON and a table. `--dry` runs the
same code on the CPU, in Triton's interpreter, with tiny shapes; every line that it prints or writes says DRY, since it
proves nothing about a GPU. Status: 0 if every proof held, 1 if one failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.budget import PLAN, START_S, TOTAL_S, Budget
from zl.shapes import ModelShape

ROOT = Path(__file__).parent.parent
MODELS = ("tiny", "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b", "service")


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; the environment decides before triton is imported whether kernels are interpreted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="interpret on the CPU: no GPU result")
    parser.add_argument("--models", default=",".join(MODELS), help="which shapes to run on a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="where JSON and table go")
    args = parser.parse_args(arguments)
    wanted = args.models.split(",")
    if unknown := set(wanted) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}: choose from {', '.join(MODELS)}")
    os.environ["TRITON_INTERPRET"] = "1" if args.dry else "0"
    from zl.gpu.cuda import device_count

    if not args.dry and device_count() == 0:
        print("gpu-check: no CUDA driver with a GPU here; --dry runs the same code on the CPU", file=sys.stderr)
        return 2
    return check(args.dry, wanted, args.out)


def check(dry: bool, wanted: list[str], out: Path) -> int:
    """Run everything on the device that there is."""
    import torch

    from bench.gpu import proofs
    from bench.gpu.report import Report
    from bench.gpu.rig import DryDevice
    from zl.gpu.cuda import CudaDevice

    budget = Budget(TOTAL_S - START_S)
    device: Any = DryDevice() if dry else CudaDevice()
    report = Report(dry, facts(device.name))
    report.say(f"gpu-check on {device.name}, {report.facts['date']}, commit {report.facts['commit']}")
    proofs.registration(report, device)
    if dry:
        from tests.gpu.kernel_kit import exact_dots

        # NumPy's own order of sums depends on shapes; with ideal products the bits show what the kernels decide.
        with exact_dots(), warnings.catch_warnings():
            # Lanes beyond the vocabulary subtract infinities: NumPy tells, a GPU does not.
            warnings.simplefilter("ignore", RuntimeWarning)
            run_dry(report, device, budget)
    else:
        for (name, part), seconds in PLAN.items():
            if name in wanted:
                budget.section(report, name, part, seconds, section(report, device, name, part))
                gc.collect()
                torch.cuda.empty_cache()
    seconds = budget.total_s - budget.left_s
    report.facts |= {"seconds": round(seconds, 1), "budget_s": budget.total_s, "sections": budget.sections}
    stem = f"gpu-check-{'dry' if dry else device.name.lower().replace(' ', '-')}-{report.facts['date'][:10]}"
    for path in report.write(out, stem):
        report.say(f"wrote {path.name}")
    report.say(
        f"{len(report.findings)} findings, {report.failed} failed, {report.skipped} skipped, {seconds:.0f} of "
        f"{budget.total_s:.0f} s"
    )
    device.close()
    return 1 if report.failed else 0


def shape_of(name: str) -> ModelShape:
    """Return the shape that a name stands for."""
    from zl.gpu.kernels.compile import LLAMA_1B, LLAMA_8B, QWEN_7B

    tiny = ModelShape(
        name="tiny", n_layers=1, hidden=64, n_heads=3, n_kv_heads=1, head_dim=64, ffn=96, vocab=61, max_position=4096,
        rms_eps=1e-5, rope_theta=10_000.0,
    )  # fmt: skip
    return {"tiny": tiny, "llama-3.2-1b": LLAMA_1B, "llama-3.1-8b": LLAMA_8B, "qwen2.5-7b": QWEN_7B}[name]


def section(report: Any, device: Any, name: str, part: str) -> Callable[[], object]:
    """Return what a section of the plan does on a GPU."""
    import torch

    from bench.gpu import peer, service
    from bench.gpu.kernels import Kernels

    target = device.torch_device
    if part == "socket":
        return lambda: service.socket(report, dry=False, streams=128, rounds=4, tokens=64, words=60)
    shape = shape_of(name)
    if part == "kernels":
        capability = 10 * torch.cuda.get_device_capability(target)[0]
        # Rows of the captured buckets, and one: these meet every tile that the program compiles, and no other.
        lengths = [(0, 300), (700, 1), (31, 65), (1023, 2)]
        return Kernels(report, shape, target, capability, [1, 16, 64, 256, 512], lengths, 2048).run
    if part == "peer":
        rows = [1, 128] if name == "llama-3.2-1b" else [128]
        return lambda: peer.decode(report, shape, target, rows, 1024, 16)
    return lambda: run_program(report, device, shape)


def run_dry(report: Any, device: Any, budget: Budget) -> None:
    """Run a small case of every section, in the interpreter or, for the server and the peer, on the CPU."""
    from bench.gpu import peer, service
    from bench.gpu.kernels import Kernels

    tiny = shape_of("tiny")
    kernels = Kernels(report, tiny, "cpu", 80, [1, 16, 17, 40], [(0, 33), (40, 1), (31, 3)], 96)
    budget.section(report, "tiny", "kernels", 60, kernels.run)
    budget.section(report, "tiny", "program", 150, lambda: run_program(report, device, tiny))
    budget.section(
        report, "service", "socket", 60,
        lambda: service.socket(report, dry=True, streams=4, rounds=2, tokens=8, words=6),
    )  # fmt: skip
    # transformers takes no hidden size that its heads do not divide.
    plain = dataclasses.replace(tiny, n_heads=1)
    budget.section(report, "tiny", "peer", 30, lambda: peer.decode(report, plain, "cpu", [1, 4], 40, 2))


def run_program(report: Any, device: Any, shape: ModelShape) -> None:
    """Prove and time the captured program of one shape; sizes follow from the shape, so that all stays in minutes."""
    import torch

    from bench.gpu import guarding, proofs, timings
    from bench.gpu.rig import Rig, row_tokens, shapes_for

    target, dry = device.torch_device, device.kind == "dry"
    shapes = shapes_for(4, 96, 96, 48) if dry else shapes_for(256, 2048, 1024 + 96, 512)
    free = 0
    if not dry:
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    loaded = time.perf_counter()
    rig = Rig(device, shape, shapes)
    text = f"{time.perf_counter() - loaded:.1f} s for weights, kernels and captures"
    figures: dict[str, Any] = {"seconds": time.perf_counter() - loaded}
    if not dry:
        figures |= memory_figures(rig, free)
        text += (
            f"; device memory taken {figures['taken_bytes'] / 2**30:.2f} GiB, planned tensors "
            f"{figures['planned_bytes'] / 2**30:.2f} GiB, the rest {figures['rest_bytes'] / 2**20:.0f} MiB "
            f"(estimate {figures['program_estimate_bytes'] / 2**20:.0f} MiB)"
        )
    report.time(shape.name, "start", text, **figures)
    prompt, new = (34, 2) if dry else (100, 8)
    proofs.mapped_output(report, rig)
    proofs.berths(report, rig, prompt, new)
    if shape.name == "tiny":
        proofs.equals_twin(report, rig, 12, 2)
    proofs.capture_equals_eager(report, rig, prompt, new)
    proofs.determinism(report, rig, prompt, new)
    proofs.allocation_free(report, rig, 200)
    proofs.one_launch(report, rig)

    bandwidth = timings.copy_bandwidth(target, (1 << 20) if dry else (2 << 30), 3 if dry else 20)
    report.time(shape.name, "copy bandwidth", f"{bandwidth / 1e9:,.0f} GB/s read and written", bytes_per_s=bandwidth)
    counts = [1, 4] if dry else [1, 16, 64, 128, 256]
    timings.decode(report, rig, bandwidth, counts, 40 if dry else 1024, 1 if dry else 24)
    timings.prefill(report, rig, 60 if dry else row_tokens(shapes) - 96)
    if dry:
        timings.streams(report, rig, 3, 1, 4, 2)
    else:
        timings.streams(report, rig, 128, 4, 128, 64)
    # Last: it damages what the others look at.
    guarding.heartbeat(report, rig, prompt, new)
    rig.close()


def memory_figures(rig: Any, free_before: int) -> dict[str, int]:
    """Compare the memory that the start took with the plan: what exceeds the tensors is programs and rounding."""
    import torch

    from zl.gpu import cuda_memory
    from zl.gpu.pool import KVPool

    taken = free_before - torch.cuda.mem_get_info()[0]
    planned = cuda_memory.weight_bytes(rig.shape) + cuda_memory.buffer_bytes(rig.shape, rig.wide, canary=True)
    planned += rig.wide.n_pages * KVPool.page_bytes(rig.shape, torch.bfloat16)
    return {
        "taken_bytes": taken,
        "planned_bytes": planned,
        "rest_bytes": taken - planned,
        "program_estimate_bytes": cuda_memory.program_bytes(rig.shape, rig.wide, len(rig.all_slots), canary=True),
    }


def facts(device: str) -> dict[str, Any]:
    """Say what was measured, when and with which versions."""
    import torch
    import triton

    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "device": device,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": done.stdout.strip() or "unknown",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
    }


if __name__ == "__main__":
    raise SystemExit(main())
