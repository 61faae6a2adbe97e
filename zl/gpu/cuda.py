"""The one door to CUDA: the only importer of `cuda.bindings`.

State: none beyond the driver's own. Every status goes through `check`, which raises with the call and the code.
Refuses asyncio and net.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
from dataclasses import dataclass
from typing import Any

import numpy as np

from zl.errors import INSTALL_CUDA, DeviceError

# cudaHostRegister flags, CUDA Runtime API 13, section "Memory Management"
REGISTER_PORTABLE = 0x01
REGISTER_MAPPED = 0x02
REGISTER_IO_MEMORY = 0x04
REGISTER_READ_ONLY = 0x08

_REMEDIES = {
    "cudaErrorMemoryAllocation": "raise the locked-memory limit (ulimit -l, or LimitMEMLOCK= in the unit)",
    "cudaErrorHostMemoryAlreadyRegistered": "another library registered this range first; this is a bug in zl",
    "cudaErrorHostMemoryNotRegistered": "the range was never registered, or given back before; this is a bug in zl",
    "cudaErrorInvalidValue": "address, size or flags are wrong: the range must be mapped and not empty",
    "cudaErrorNotSupported": "this platform cannot map host memory; serve with --device cpu",
    "cudaErrorInsufficientDriver": "the driver is older than the CUDA runtime; update the driver",
    "cudaErrorNoDevice": "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES",
}


def runtime() -> Any:
    """Import the CUDA runtime bindings; DeviceError where they or the driver are missing."""
    try:
        from cuda.bindings import runtime as bindings
    except ImportError as missing:
        raise DeviceError(
            f"the CUDA bindings are not installed ({missing}); {INSTALL_CUDA}, or serve with --device cpu",
            call="import",
            lasting=True,
        ) from missing
    return bindings


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unwrap a binding's result tuple; raise DeviceError with call and code unless it succeeded.

    Status-only calls return a 1-tuple, the others (err, value) or (err, value, …).
    """
    status = result[0]
    if int(status) != 0:
        name = getattr(status, "name", str(status))
        remedy = _REMEDIES.get(name, "see the CUDA runtime documentation for this code")
        raise DeviceError(f"{call} failed with {name} ({int(status)}): {remedy}", call=call, status=int(status))
    values = result[1:]
    if not values:
        return None
    return values[0] if len(values) == 1 else values


def has_driver() -> bool:
    """Tell whether the NVIDIA driver's library is there; the bindings need not be."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def device_count() -> int:
    """Count visible GPUs; 0 where there is no driver or its bindings are missing."""
    if not has_driver():
        return 0
    try:
        return int(check(runtime().cudaGetDeviceCount(), "cudaGetDeviceCount"))
    except DeviceError:
        return 0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Whether host memory can be registered for the device, in one line for people.

    works        None where there is nothing to try it with: no driver, bindings or GPU
    limit_bytes  the locked-memory limit of this process; None: unlimited
    text         what was found, with the remedy where something is wrong
    """

    works: bool | None
    limit_bytes: int | None
    text: str

    @property
    def doubtful(self) -> bool:
        """Tell whether a server that needs what was asked about may fail to start."""
        return self.works is False


PROBE_BYTES = 1 << 20


def host_memory(need_bytes: int = 0) -> HostMemory:
    """Try host registration as a server does it, and read the locked-memory limit; registers 1 MiB and gives it back.

    need_bytes  what a server would register: its arena and columns; 0: only the probe
    Opens the device's context in this process where there is a device. Raises nothing.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = None if soft == resource.RLIM_INFINITY else soft
    said = "no locked-memory limit" if limit is None else f"locked-memory limit {limit / 2**20:,.1f} MiB"
    remedy = ""
    if limit is not None and limit < max(need_bytes, PROBE_BYTES):
        # Drivers differ in whether page-locking counts against the limit, so this alone is no verdict.
        remedy = (
            f"; below the {max(need_bytes, PROBE_BYTES) / 2**20:,.1f} MiB that are needed: where a start fails with "
            "cudaErrorMemoryAllocation, raise it (ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit)"
        )
    if not has_driver():
        return HostMemory(None, limit, f"not tried, no CUDA driver; {said}{remedy}")
    try:
        bindings = runtime()
        if device_count() == 0:
            return HostMemory(None, limit, f"not tried, no GPU is visible; {said}{remedy}")
        seen = _probe_registration(bindings)
    except DeviceError as refused:
        return HostMemory(None if refused.call == "import" else False, limit, f"{refused}; {said}{remedy}")
    return HostMemory(True, limit, f"host registration works, {seen}; {said}{remedy}")


def _probe_registration(bindings: Any) -> str:
    """Register and give back a probe; say how the device sees it."""
    region = mmap.mmap(-1, PROBE_BYTES)
    anchor = ctypes.c_char.from_buffer(region)
    address = ctypes.addressof(anchor)
    try:
        flags = REGISTER_MAPPED | REGISTER_PORTABLE
        try:
            check(bindings.cudaHostRegister(address, PROBE_BYTES, flags), "cudaHostRegister")
            try:
                seen = int(check(bindings.cudaHostGetDevicePointer(address, 0), "cudaHostGetDevicePointer"))
            finally:
                check(bindings.cudaHostUnregister(address), "cudaHostUnregister")
        except DeviceError:
            bindings.cudaGetLastError()
            raise
    finally:
        del anchor
        region.close()
    return "mapped at the host's own address" if seen == address else "mapped at another address for the device"


class CudaDevice:
    """An NVIDIA GPU behind the surface of gpu.device. Not yet run on hardware: docs/gpu-status.md."""

    kind = "cuda"
    run_ahead = 1

    def __init__(self, index: int = 0):
        if not has_driver():
            raise DeviceError(
                "no CUDA driver found: install the NVIDIA driver, or serve with --device cpu",
                call="dlopen",
                lasting=True,
            )
        self._rt = runtime()
        if device_count() == 0:
            raise DeviceError(
                "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, or serve with --device cpu",
                call="cudaGetDeviceCount",
            )
        self.index = index
        check(self._rt.cudaSetDevice(index), "cudaSetDevice")
        properties = check(self._rt.cudaGetDeviceProperties(index), "cudaGetDeviceProperties")
        self.name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        self.torch_device = f"cuda:{index}"
        self._regions: list[int] = []
        self._maps: list[mmap.mmap] = []

    def register(self, address: int, n_bytes: int, flags: int = REGISTER_MAPPED | REGISTER_PORTABLE) -> None:
        """Page-lock host memory and, with the default flags, map it for the device in every context."""
        self._checked(self._rt.cudaHostRegister(address, n_bytes, flags), "cudaHostRegister")
        self._regions.append(address)

    def unregister(self, address: int) -> None:
        """Give registered host memory back."""
        self._checked(self._rt.cudaHostUnregister(address), "cudaHostUnregister")
        self._regions.remove(address)

    def _checked(self, result: tuple[Any, ...], call: str) -> Any:
        """Check a status; a refusal is also taken out of the runtime, or the next library to look would raise it."""
        try:
            return check(result, call)
        except DeviceError:
            self._rt.cudaGetLastError()
            raise

    def device_pointer(self, address: int) -> int:
        """Return the device address of registered host memory."""
        return int(check(self._rt.cudaHostGetDevicePointer(address, 0), "cudaHostGetDevicePointer"))

    def allocate(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Allocate a zeroed, registered host array."""
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        region = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE))
        self._maps.append(region)
        self.register(ctypes.addressof(ctypes.c_char.from_buffer(region)), len(region))
        return np.frombuffer(region, dtype, count=int(np.prod(shape))).reshape(shape)

    def memory(self) -> tuple[int, int]:
        """Return (free, total) device bytes."""
        free, total = check(self._rt.cudaMemGetInfo(), "cudaMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        """Unregister everything that this device registered."""
        for address in self._regions:
            self._checked(self._rt.cudaHostUnregister(address), "cudaHostUnregister")
        self._regions.clear()
