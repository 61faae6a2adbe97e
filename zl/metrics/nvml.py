"""GPU memory and clocks through NVML, where its Python bindings and its library are.

State: the handles of the GPUs, held until `close`. Refuses torch, asyncio and cuda.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

from zl.metrics.collect import Read

log = logging.getLogger("zl")


class Nvml:
    """Read every GPU of the machine through pynvml."""

    def __init__(self, nvml: Any):
        self._nvml = nvml
        nvml.nvmlInit()
        self._gpus = {str(i): nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())}

    def memory(self) -> dict[tuple[str, ...], float]:
        """Give bytes by GPU and state."""
        found: dict[tuple[str, ...], float] = {}
        for gpu, handle in self._gpus.items():
            with contextlib.suppress(self._nvml.NVMLError):  # lost, or not allowed: the other figures must still come
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                found[gpu, "free"], found[gpu, "used"] = memory.free, memory.used
        return found

    def clocks(self) -> dict[tuple[str, ...], float]:
        """Give hertz by GPU and clock."""
        nvml = self._nvml
        kinds = (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM))
        found: dict[tuple[str, ...], float] = {}
        for gpu, handle in self._gpus.items():
            for name, kind in kinds:
                with contextlib.suppress(nvml.NVMLError):
                    found[gpu, name] = 1e6 * nvml.nvmlDeviceGetClockInfo(handle, kind)
        return found

    def sources(self) -> dict[str, Read]:
        """Map the catalog's names to what reads them."""
        return {"zl_gpu_memory_bytes": self.memory, "zl_gpu_clock_hertz": self.clocks}

    def close(self) -> None:
        """Let go of the library."""
        self._nvml.nvmlShutdown()


def open_nvml() -> Nvml | None:
    """Open NVML; None where there is no pynvml, no driver or no GPU."""
    try:
        return Nvml(importlib.import_module("pynvml"))
    except ImportError:
        return None
    except Exception as failure:  # pynvml raises its own error for a missing library
        log.info("metrics: no GPU figures: %s", failure)
        return None
