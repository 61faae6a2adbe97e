"""The surface that both devices share, and the one place that opens a device.

State: none. Refuses asyncio and net.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from zl.errors import INSTALL_CUDA, ConfigError
from zl.gpu.cpu import CpuDevice
from zl.gpu.cuda import CudaDevice, device_count, has_driver


class Device(Protocol):
    """What the rest of zl needs of a device.

    kind          "cpu" or "cuda"
    torch_device  the name torch knows it by
    run_ahead     steps launched before the oldest one's results are read
    """

    kind: str
    name: str
    torch_device: str
    run_ahead: int

    def register(self, address: int, n_bytes: int) -> None:
        """Make host memory readable by the device."""

    def allocate(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Allocate a zeroed host array that the device can read and write."""

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the memory that the KV pool lives in."""

    def close(self) -> None:
        """Give back what was registered."""


def open_device(kind: str) -> tuple[Device, str]:
    """Open `auto`, `cpu` or `cuda`; return the device and one line that says why this one."""
    if kind == "cpu":
        return CpuDevice(), "device cpu, as asked"
    if kind == "cuda":
        return CudaDevice(), "device cuda, as asked"
    if kind != "auto":
        raise ConfigError(f"device: {kind!r} is not one of auto, cpu, cuda")
    n = device_count()
    if n == 0 and has_driver():
        return CpuDevice(), f"device cpu: a CUDA driver is here, but no GPU or no bindings ({INSTALL_CUDA})"
    if n == 0:
        return CpuDevice(), "device cpu: no CUDA driver found"
    return CudaDevice(), f"device cuda: {n} GPU{'s' if n > 1 else ''} found"
