"""`zl doctor` on the GPU: driver, devices, whether host memory can be page-locked; asks the driver's own library.

Owns no state.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

from zl.tools.findings import OK, WARN, Finding, read

LIBRARY = "libcuda.so.1"
PORTABLE_MAPPED = 0x01 | 0x02
"""CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP: what the arena is registered with."""

PROBE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the CUDA driver says. `count` 0: no driver or no device, and `why` tells."""

    count: int
    why: str
    driver: str = ""
    name: str = ""
    memory_bytes: int = 0


def find_gpu(library: str = LIBRARY) -> Gpu:
    """Ask the CUDA driver, through its own library, for devices."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return Gpu(0, f"no NVIDIA driver ({library} is not there)")
    if status := cuda.cuInit(0):
        return Gpu(0, f"the NVIDIA driver does not start: cuInit says {status}")
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory, name = ctypes.c_size_t(), ctypes.create_string_buffer(128)
    if (
        cuda.cuDriverGetVersion(ctypes.byref(version))
        or cuda.cuDeviceGetCount(ctypes.byref(count))
        or not count.value
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetName(name, len(name), device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    ):
        return Gpu(0, "the NVIDIA driver is there but shows no device")
    driver = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Gpu(count.value, "", driver, name.value.decode("utf-8", "replace"), memory.value)


def driver(version: str = "/proc/driver/nvidia/version") -> Finding:
    """Tell which kernel module is loaded."""
    first = read(version).partition("\n")[0].removeprefix("NVRM version:").strip()
    if not first:
        return Finding(OK, "driver", "no NVIDIA kernel module: the CPU computes; for a GPU install its driver")
    return Finding(OK, "driver", " ".join(first.split()))


def host_registration(gpu: Gpu, library: str = LIBRARY) -> Finding:
    """Page-lock some memory for the GPU and let it go again: what every start does with the arena."""
    if not gpu.count:
        return Finding(OK, "page-lock", "not needed: without a GPU, frames land in ordinary memory")
    cuda = ctypes.CDLL(library)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    status = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
    status = status or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status:
        return _refused("no context", status)
    try:
        status = cuda.cuCtxSetCurrent(context) or _register(cuda)
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    if status:
        return _refused(f"{PROBE_BYTES >> 20} MiB cannot be page-locked", status)
    return Finding(OK, "page-lock", f"{PROBE_BYTES >> 20} MiB page-locked and mapped for the GPU, and let go again")


def _register(cuda: Any) -> int:
    with mmap.mmap(-1, PROBE_BYTES) as region:
        view = ctypes.c_char.from_buffer(region)
        address = ctypes.c_void_p(ctypes.addressof(view))
        status = int(cuda.cuMemHostRegister_v2(address, ctypes.c_size_t(PROBE_BYTES), PORTABLE_MAPPED))
        if not status:
            status = int(cuda.cuMemHostUnregister(address))
        del view, address  # a map that is referred to cannot be closed
    return status


def _refused(what: str, status: int) -> Finding:
    return Finding(WARN, "page-lock", f"{what} (driver status {status}): LimitMEMLOCK=infinity in the unit, or "
                                      "ulimit -l unlimited; in a container, allow it there")  # fmt: skip
