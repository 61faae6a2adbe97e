"""What must hold on a device: registration, kernels, captures, determinism, memory. Each check reports what it saw."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from typing import Any

import numpy as np
import torch

from bench.gpu.report import Report
from bench.gpu.rig import Rig
from zl.errors import DeviceError
from zl.gpu.cuda import REGISTER_IO_MEMORY, REGISTER_MAPPED, REGISTER_PORTABLE, REGISTER_READ_ONLY
from zl.gpu.pinned import FIRST, SAMPLE

MUST = {0: "default", 1: "portable", 2: "mapped", 3: "portable and mapped"}
MAY = {
    REGISTER_READ_ONLY | REGISTER_MAPPED | REGISTER_PORTABLE: "read-only",
    REGISTER_IO_MEMORY: "I/O memory on ordinary memory",
}
INVALID, ALREADY, ABSENT = 1, 712, 713


def _status(call: Any, *arguments: int) -> int:
    try:
        call(*arguments)
    except DeviceError as refused:
        return refused.status
    return 0


def registration(report: Report, device: Any) -> None:
    """Register with every flag and provoke every refusal that a caller can cause."""
    region = mmap.mmap(-1, 1 << 20)
    anchor = ctypes.c_char.from_buffer(region)
    address = ctypes.addressof(anchor)
    for flags, name in (MUST | MAY).items():
        status = _status(device.register, address, len(region), flags)
        text = f"flags {flags:#x}: status {status}"
        if not status:
            if flags & REGISTER_MAPPED:
                text += f", device address {'equal' if device.device_pointer(address) == address else 'another'}"
            status = _status(device.unregister, address)
        report.prove("-", f"register, {name}", flags in MAY or status == 0, text, status=status)
    device.register(address, len(region))
    codes = {
        "registered twice": (_status(device.register, address, len(region)), ALREADY),
        "empty range": (_status(device.register, address, 0), INVALID),
        "given back": (_status(device.unregister, address), 0),
        "given back twice": (_status(device.unregister, address), ABSENT),
        "registered anew": (_status(device.register, address, len(region)), 0),
        "given back anew": (_status(device.unregister, address), 0),
    }
    for name, (found, wanted) in codes.items():
        report.prove("-", f"register, {name}", found == wanted, f"status {found}, documented {wanted}", status=found)
    del anchor
    region.close()


def mapped_output(report: Report, rig: Rig) -> None:
    """Read results from host memory right after the fence; no call copies them."""
    rig.seat(0, rig.prompt(5, 1))
    for slot in rig.slots:
        slot.out_token.fill(-7)
        slot.out_logprob.fill(np.nan)
        slot.out_flags.fill(99)
    index = rig.plan([(0, 0, 5, FIRST | SAMPLE)])
    rig.engine.wait(rig.engine.launch(index))
    slot = rig.slots[index]
    token, logprob, rest = int(slot.out_token[0]), float(slot.out_logprob[0]), slot.out_token[1:]
    ok = 0 <= token < rig.shape.vocab and np.isfinite(logprob) and slot.out_flags[0] == 0 and (rest == -7).all()
    report.prove(rig.shape.name, "results in mapped memory", ok, f"token {token}, logprob {logprob:.3f}, no copy call")


def berths(report: Report, rig: Rig, n_prompt: int, n_new: int) -> None:
    """Gather a prompt from registered berths, from each byte of a word on: the answer is that of own ids."""
    prompt = rig.prompt(n_prompt, 8)
    wanted = rig.answer(prompt, n_new)
    found = [_equal(rig.answer(prompt, n_new, berth_at=65_536 + at), wanted) for at in range(4)]
    text = f"{found} of {n_new} tokens and logprobs, by the byte that the ids begin at"
    report.prove(rig.shape.name, "prompts gathered from berths", found == [n_new] * 4, text)


def capture_equals_eager(report: Report, rig: Rig, n_prompt: int, n_new: int) -> None:
    """Replay and kernel-by-kernel launches give the same tokens, logprobs, logits and pages."""
    prompt, seen = rig.prompt(n_prompt, 2), []
    for launch in (rig.engine.launch, rig.engine.launch_uncaptured):
        rig.engine._pool.zero_()
        _fence(rig)
        found = rig.answer(prompt, n_new, launch=launch)
        own = rig.columns.page_table[0, : rig.row_pages].astype(np.int64)
        pages = torch.from_numpy(own).to(rig.device.torch_device)
        logits = rig.engine._buffers[rig.engine._buckets[-1]].logits[:1].clone()
        seen.append((found, rig.engine._pool[:, :, pages], logits))
    (a, pool_a, logits_a), (b, pool_b, logits_b) = seen
    same = [a == b, torch.equal(pool_a, pool_b), torch.equal(logits_a, logits_b)]
    report.prove(
        rig.shape.name, "captured equals uncaptured", all(same),
        f"results {same[0]}, pages {same[1]}, logits {same[2]}; {len(a)} tokens"
        + (" (both uncaptured here)" if rig.dry else ""),
    )  # fmt: skip


def equals_twin(report: Report, rig: Rig, n_prompt: int, n_new: int) -> None:
    """Serve the same greedy answer by the plain torch step on the CPU."""
    prompt = rig.prompt(n_prompt, 6)
    ours = rig.answer(prompt, n_new, chunks=(5,), temperature=0.0)
    theirs = rig.twin().answer(prompt, n_new, chunks=(5,), temperature=0.0)
    tokens = [a[0] == b[0] for a, b in zip(ours, theirs, strict=True)]
    off = max(abs(_logprob(a) - _logprob(b)) for a, b in zip(ours, theirs, strict=True))
    text = f"{sum(tokens)} of {n_new} tokens equal, logprobs within {off:.4f}"
    report.prove(rig.shape.name, "whole step equals the torch twin", all(tokens) and off < 0.05, text, error=off)


def determinism(report: Report, rig: Rig, n_prompt: int, n_new: int) -> None:
    """A row's bits alone, among all rows, in chunks, and over pages that hold NaN."""
    prompt, rows = rig.prompt(n_prompt, 3), rig.shapes.max_rows
    rig.engine._pool.zero_()
    _fence(rig)
    alone = rig.answer(prompt, n_new)
    for name, options in (
        (f"alone equals among {rows} rows", {"row": rows // 2, "crowd": True}),
        ("whole equals chunked prefill", {"row": rows - 1, "chunks": (1, 30, 2)}),
        ("chunked among all rows", {"row": 1, "chunks": (n_prompt // 2,), "crowd": True}),
    ):
        found = rig.answer(prompt, n_new, **options)
        report.prove(rig.shape.name, name, found == alone, f"{_equal(found, alone)} of {n_new} tokens and logprobs")
    rig.engine._pool.fill_(float("nan"))
    _fence(rig)
    found = rig.answer(prompt, n_new, chunks=(7,))
    report.prove(
        rig.shape.name, "NaN in masked and stale slots", found == alone, f"{_equal(found, alone)} of {n_new} equal"
    )
    rig.engine._pool.zero_()
    _fence(rig)


def allocation_free(report: Report, rig: Rig, n_steps: int) -> None:
    """Count what the allocator and the driver gave out over many steps after READY."""
    if rig.dry:
        report.say(f"skip {rig.shape.name}: allocations after READY need a device's allocator to be counted")
        return
    rows = min(16, rig.shapes.max_rows)
    for r in range(rows):
        rig.seat(r, rig.prompt(40, r))
    prefill = [(r, 0, 8, FIRST) for r in range(rows)]
    decode = [(r, 8, 1, SAMPLE) for r in range(rows)]
    rig.step(prefill)
    rig.step(decode)
    names = ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries")
    before, free = [torch.cuda.memory_stats()[n] for n in names], torch.cuda.mem_get_info()[0]
    for i in range(n_steps):
        rig.step(prefill if i % 8 == 0 else decode)
    grown = [torch.cuda.memory_stats()[n] - b for n, b in zip(names, before, strict=True)]
    moved = free - torch.cuda.mem_get_info()[0]
    report.prove(
        rig.shape.name, "no allocation after READY", not any(grown) and moved <= 0,
        f"{n_steps} steps: {grown[0]} allocations, {grown[1]} segments, free memory {-moved:+d} bytes",
    )  # fmt: skip


def one_launch(report: Report, rig: Rig, n_steps: int = 8) -> None:
    """Count the runtime calls of steps with the profiler: one graph launch each, no copy, no synchronize."""
    rig.seat(0, rig.prompt(20, 4))
    rig.step([(0, 0, 20, FIRST | SAMPLE)])
    if rig.dry:
        calls = Counter[str]()
        compute = rig.engine._compute

        def counted(*arguments: Any) -> None:
            calls["compute"] += 1
            compute(*arguments)

        rig.engine._compute = counted  # type: ignore[method-assign]
        rig.step([(0, 20, 1, SAMPLE)])
        rig.engine._compute = compute  # type: ignore[method-assign]
        report.prove(rig.shape.name, "one launch a step", calls["compute"] == 1, "one program run (no graph here)")
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(n_steps):
            rig.step([(0, 20, 1, SAMPLE)])
    calls = Counter(e.name for e in seen.events() if e.name.startswith(("cuda", "cu")))
    graphs = calls["cudaGraphLaunch"]
    bad = {
        name: n
        for name, n in calls.items()
        if any(word in name for word in ("Memcpy", "Malloc", "LaunchKernel", "DeviceSynchronize", "StreamSynchronize"))
    }
    copies = sum("Memcpy" in e.name for e in seen.events())
    # The profiler itself ends with a device-wide synchronize.
    bad = {n: c for n, c in bad.items() if not (n == "cudaDeviceSynchronize" and c <= 2)}
    report.prove(
        rig.shape.name, "one graph launch a step", graphs == n_steps and not bad and not copies,
        f"{graphs} graph launches in {n_steps} steps, {copies} copies, other calls {bad or 'none'}", calls=dict(calls),
    )  # fmt: skip


def _equal(found: list[Any], wanted: list[Any]) -> int:
    return sum(a == b for a, b in zip(found, wanted, strict=True))


def _logprob(result: tuple[int, bytes]) -> float:
    return float(np.frombuffer(result[1], np.float32)[0])


def _fence(rig: Rig) -> None:
    """Order our own changes to the pool, made on another stream, before the next step."""
    if not rig.dry:
        torch.cuda.synchronize()  # sync
