"""Facts of the machine, and its bandwidth and GEMM peak as measured now: `python -m bench.machine`.

A bound that a step is compared with must come from the same minute: machines of this kind change their speed by 2.
Owns no state. Imports torch, so callers run it as a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
MIB = 2**20


def facts() -> dict[str, Any]:
    """Read what does not change: processor, cores, memory, kernel."""
    cpu = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in cpu.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    have = set(fields.get("flags", "").split())
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "processor": fields.get("model name", platform.processor()),
        "family_model_stepping": [fields.get(k, "") for k in ("cpu family", "model", "stepping")],
        "cache": fields.get("cache size", ""),
        "hypervisor": "hypervisor" in have,
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in have],
        "memory_bytes": int(memory["MemTotal"].split()[0]) * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }


def _best(work: Callable[[], object], seconds: float) -> float:
    """Shortest of the runs that fit into `seconds`, at least three."""
    work()
    best, n, until = float("inf"), 0, time.perf_counter() + seconds
    while n < 3 or time.perf_counter() < until:
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
        n += 1
    return best


def bandwidth(n_bytes: int, threads: int, seconds: float = 1.0) -> float:
    """Measure reading: bytes a second, the best of several sums over an array of n_bytes (float32, read once)."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(n_bytes // 4, dtype=torch.float32)
    return n_bytes / _best(data.sum, seconds)


def copy_bandwidth(n_bytes: int, threads: int, seconds: float = 1.0) -> float:
    """Measure copying: bytes read plus bytes written a second."""
    import torch

    torch.set_num_threads(threads)
    source = torch.ones(n_bytes // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * n_bytes / _best(lambda: target.copy_(source), seconds)


def gemm(dtype_name: str, threads: int, n: int = 2_048, seconds: float = 1.0) -> float:
    """Measure FLOP a second of an n by n by n product, the best of several."""
    import torch

    torch.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    out = torch.empty(n, n, dtype=dtype)
    return 2 * n**3 / _best(lambda: torch.mm(a, b, out=out), seconds)


def measure(threads: int, seconds: float = 1.0) -> dict[str, float]:
    """Measure bandwidth over an array in the shared cache's reach and one well beyond it, and GEMM peaks."""
    return {
        "threads": threads,
        "read_128MiB_bytes_per_s": bandwidth(128 * MIB, threads, seconds),
        "read_1GiB_bytes_per_s": bandwidth(1024 * MIB, threads, seconds),
        "copy_512MiB_bytes_per_s": copy_bandwidth(512 * MIB, threads, seconds),
        "gemm_bfloat16_flop_per_s": gemm("bfloat16", threads, seconds=seconds),
        "gemm_float32_flop_per_s": gemm("float32", threads, n=1_024, seconds=seconds),
    }


def main() -> None:
    """Print facts and figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    args = parser.parse_args()
    print(json.dumps(facts() | {"measured": measure(args.threads, args.seconds)}, indent=2))


if __name__ == "__main__":
    main()
