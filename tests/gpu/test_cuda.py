"""zl/gpu/cuda.py without a GPU: statuses, and `host_memory` over a runtime that keeps the documented rules."""

# ruff: noqa: N802, N815

from __future__ import annotations

import enum
import resource

import pytest

from zl.errors import DeviceError
from zl.gpu import cuda


class Status(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713


class Runtime:
    """Registration as documented; `most` bytes may be locked."""

    def __init__(self, most=1 << 40, shift=0):
        self.most, self.shift = most, shift
        self.ranges: dict[int, int] = {}
        self.sticky = Status.cudaSuccess

    def cudaGetDeviceCount(self):
        return Status.cudaSuccess, 1

    def cudaHostRegister(self, address, n_bytes, flags):
        assert flags == cuda.REGISTER_MAPPED | cuda.REGISTER_PORTABLE
        if sum(self.ranges.values()) + n_bytes > self.most:
            self.sticky = Status.cudaErrorMemoryAllocation
            return (self.sticky,)
        if address in self.ranges:
            self.sticky = Status.cudaErrorHostMemoryAlreadyRegistered
            return (self.sticky,)
        self.ranges[address] = n_bytes
        return (Status.cudaSuccess,)

    def cudaHostGetDevicePointer(self, address, flags):
        return Status.cudaSuccess, address + self.shift

    def cudaHostUnregister(self, address):
        known = self.ranges.pop(address, None)
        return (Status.cudaSuccess if known else Status.cudaErrorHostMemoryNotRegistered,)

    def cudaGetLastError(self):
        last, self.sticky = self.sticky, Status.cudaSuccess
        return (last,)


@pytest.fixture
def machine(monkeypatch):
    def make(runtime: Runtime | None, limit: int = resource.RLIM_INFINITY) -> None:
        monkeypatch.setattr(cuda, "has_driver", lambda: runtime is not None)
        monkeypatch.setattr(cuda, "runtime", lambda: runtime)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))

    return make


def test_host_memory_probes_and_gives_back(machine):
    runtime = Runtime()
    machine(runtime)
    found = cuda.host_memory(64 << 20)
    assert found.works is True
    assert not found.doubtful
    assert found.limit_bytes is None
    assert "works" in found.text
    assert "host's own address" in found.text
    assert runtime.ranges == {}


def test_host_memory_says_when_the_device_has_an_address_of_its_own(machine):
    machine(Runtime(shift=1 << 30))
    assert "another address" in cuda.host_memory().text


def test_a_refused_registration_names_the_code_the_limit_and_the_remedy(machine):
    runtime = Runtime(most=4096)
    machine(runtime, limit=64 << 10)
    found = cuda.host_memory(64 << 20)
    assert found.works is False
    assert found.doubtful
    assert found.limit_bytes == 64 << 10
    for word in ("cudaErrorMemoryAllocation (2)", "limit 0.1 MiB", "64.0 MiB that are needed", "LimitMEMLOCK"):
        assert word in found.text
    assert runtime.sticky is Status.cudaSuccess, "the refusal stays in the runtime, and the next library would raise it"


def test_a_low_limit_alone_is_said_and_is_no_verdict(machine):
    machine(Runtime(), limit=8 << 20)
    found = cuda.host_memory(64 << 20)
    assert found.works is True
    assert "ulimit -l" in found.text
    assert "ulimit" not in cuda.host_memory(4 << 20).text


def test_without_a_driver_nothing_is_tried_and_the_limit_is_still_said(machine):
    machine(None, limit=8 << 20)
    found = cuda.host_memory()
    assert found.works is None
    assert "no CUDA driver" in found.text
    assert "8.0 MiB" in found.text


def test_without_bindings_nothing_is_tried(machine, monkeypatch):
    machine(Runtime())

    def missing():
        raise DeviceError("the CUDA bindings are not installed", call="import")

    monkeypatch.setattr(cuda, "runtime", missing)
    assert cuda.host_memory().works is None


def test_every_status_is_checked_and_named():
    assert cuda.check((Status.cudaSuccess,), "call") is None
    assert cuda.check((Status.cudaSuccess, 7), "call") == 7
    assert cuda.check((Status.cudaSuccess, 7, 8), "call") == (7, 8)
    with pytest.raises(DeviceError, match=r"cudaHostUnregister failed with cudaErrorHostMemoryNotRegistered \(713\)"):
        cuda.check((Status.cudaErrorHostMemoryNotRegistered,), "cudaHostUnregister")
