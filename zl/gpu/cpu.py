"""The CPU behind the device surface. State: none. Refuses cuda, asyncio and net."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


class CpuDevice:
    """The machine's own processor: pinned memory is plain memory, registering is a no-op."""

    kind = "cpu"
    torch_device = "cpu"
    run_ahead = 0

    def __init__(self) -> None:
        self.name = f"cpu, {len(os.sched_getaffinity(0))} cores"

    def register(self, address: int, n_bytes: int) -> None:
        """Accept host memory as it is."""

    def allocate(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Allocate a zeroed host array, every page of it touched now and not by the first request that needs it."""
        array: np.ndarray = np.empty(shape, dtype)
        array.fill(0)
        return array

    def memory(self) -> tuple[int, int]:
        """Return (available, total) bytes of main memory, bounded by the control group's limit."""
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
        total = int(fields["MemTotal"].split()[0]) * 1024
        limit, used = _cgroup_memory()
        if limit is not None:
            total = min(total, limit)
            available = min(available, max(0, limit - used))
        return available, total

    def close(self) -> None:
        """Nothing to give back."""


def _cgroup_memory() -> tuple[int | None, int]:
    """Read the control group's (limit, usage) in bytes; the limit is None where there is none (cgroup v2 only)."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None, 0
    return (None, used) if limit == "max" else (int(limit), used)
