"""A CudaStep with random weights of a real shape, its columns in registered memory, and the rows that proofs need."""

from __future__ import annotations

import copy
import enum
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zl.gpu.arena import Arena
from zl.gpu.cuda import check
from zl.gpu.cuda_step import CudaStep
from zl.gpu.heartbeat import with_canary
from zl.gpu.model import Weights
from zl.gpu.pinned import FIRST, SAMPLE, RowColumns, StepSlot
from zl.gpu.source import canonical_shapes
from zl.gpu.torch_step import TorchStep
from zl.shapes import PAGE, ModelShape, Shapes, pages_for

Segment = tuple[int, int, int, int]
"""(row, start, tokens, flags), as gpu.pinned has them."""


class Status(enum.IntEnum):
    """The runtime's codes that registration can end with."""

    cudaSuccess = 0  # noqa: N815
    cudaErrorInvalidValue = 1  # noqa: N815
    cudaErrorHostMemoryAlreadyRegistered = 712  # noqa: N815
    cudaErrorHostMemoryNotRegistered = 713  # noqa: N815


class DryDevice:
    """No device: plain memory, with the rules of cudaHostRegister as its documentation has them."""

    kind = "dry"
    name = "no GPU, Triton's interpreter on the CPU"
    torch_device = "cpu"
    run_ahead = 1

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}

    def register(self, address: int, n_bytes: int, flags: int = 3) -> None:
        """Note a range; overlaps, empty ranges and unknown flags are refused."""
        status = Status.cudaSuccess
        if not address or n_bytes <= 0 or flags & ~0x0B:
            status = Status.cudaErrorInvalidValue
        elif any(address < a + n and a < address + n_bytes for a, n in self._ranges.items()):
            status = Status.cudaErrorHostMemoryAlreadyRegistered
        check((status,), "cudaHostRegister")
        self._ranges[address] = n_bytes

    def unregister(self, address: int) -> None:
        """Forget a range."""
        known = address in self._ranges
        check((Status.cudaSuccess if known else Status.cudaErrorHostMemoryNotRegistered,), "cudaHostUnregister")
        del self._ranges[address]

    def device_pointer(self, address: int) -> int:
        """Return the same address: there is one memory only."""
        return address

    def allocate(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Allocate a zeroed array."""
        return np.zeros(shape, dtype)

    def close(self) -> None:
        """Forget all ranges."""
        self._ranges.clear()


class RandomTensors(Mapping[str, torch.Tensor]):
    """Weights that nobody trained, made on the device when asked for; each decided by its name alone."""

    def __init__(self, shape: ModelShape, device: str):
        self._dims = dict(canonical_shapes(shape, False))
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        """Make one tensor: matrices bf16 with unit gain, vectors float32 near one."""
        dims = self._dims[name]
        # Small ones are made on the CPU, so that the tiny model is the same on every machine.
        place = "cpu" if np.prod(dims) < 1 << 20 else self._device
        g = torch.Generator(place).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(dims, generator=g, device=place).to(self._device)
        if len(dims) == 1:
            return 1 + 0.1 * values
        # Logits then have a standard deviation of 2: flat enough for draws to depend on every bit.
        return (values * dims[1] ** -0.5 * (2 if name in ("embed", "head") else 1)).bfloat16()

    def __iter__(self) -> Iterator[str]:
        """List the names."""
        return iter(self._dims)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._dims)


class Rig:
    """One engine under test. Row r owns the pages r * k … r * k + k - 1 in a scattered order.

    As a server has it: `wide` has the heartbeat's row and page beyond `shapes`, `all_slots` its slot beyond `slots`.
    """

    def __init__(self, device: Any, shape: ModelShape, shapes: Shapes, n_slots: int = 2):
        self.device, self.shape, self.shapes = device, shape, shapes
        self.wide = with_canary(shapes)
        self.arena = Arena(2, 65_536, register=device.register, unregister=device.unregister)
        self.columns = RowColumns(self.wide, device.allocate, np.frombuffer(self.arena.memory, np.uint8))
        self.all_slots = [StepSlot(self.wide, device.allocate) for _ in range(n_slots + 1)]
        self.slots = self.all_slots[:-1]
        self.engine = CudaStep(
            shape, RandomTensors(shape, device.torch_device), self.columns, self.all_slots, self.wide, canary=True,
            device=device.torch_device, debug_addresses=device.kind == "dry",
        )  # fmt: skip
        self.row_pages = shapes.n_pages // shapes.max_rows
        self._order = np.random.default_rng(5).permutation(shapes.n_pages).astype(np.int32)
        self._turn = 0

    @property
    def dry(self) -> bool:
        """Tell whether there is no GPU behind it."""
        return self.device.kind == "dry"

    def prompt(self, n: int, seed: int) -> list[int]:
        """Draw token ids."""
        return np.random.default_rng(seed).integers(0, self.shape.vocab, n).tolist()

    def seat(
        self, row: int, prompt: Sequence[int], *, temperature: float = 0.9, seed: int = 7, berth_at: int | None = None
    ) -> None:
        """Give a row its columns and pages; it never ends by itself.

        berth_at  all of the prompt but its first and last token lie in the arena, from this byte on
        """
        c = self.columns
        if berth_at is None:
            c.put_ids(row, prompt)
        else:
            packed = np.array(prompt[1:-1], "<i4").view(np.uint8)
            c.arena[berth_at : berth_at + len(packed)] = packed
            own = np.array([prompt[0], prompt[-1]], np.int32)
            c.put_prompt(row, own, [(~0, 1), (berth_at, len(prompt) - 2), (~1, 1)])
        c.max_new[row], c.row_flags[row] = 1 << 30, 1
        c.page_table[row] = -1
        n = min(self.row_pages, c.page_table.shape[1])
        c.page_table[row, :n] = self._order[row * self.row_pages : row * self.row_pages + n]
        c.temperature[row], c.top_p[row], c.penalty[row], c.seed[row] = temperature, 0.9, 1.1, seed

    def plan(self, segments: Sequence[Segment]) -> int:
        """Write a step's plan into the next slot and return the slot's number."""
        index, self._turn = self._turn, (self._turn + 1) % len(self.slots)
        slot = self.slots[index]
        n = len(segments)
        slot.n_segs[0] = n
        slot.seg_row[:n], slot.seg_start[:n], slot.seg_len[:n], slot.seg_flags[:n] = zip(*segments, strict=True)
        return index

    def step(self, segments: Sequence[Segment], launch: Callable[[int], int] | None = None) -> list[tuple[int, bytes]]:
        """Run one step; return each segment's token and the bits of its logprob."""
        index = self.plan(segments)
        self.engine.wait((launch or self.engine.launch)(index))
        slot = self.slots[index]
        return [(int(slot.out_token[i]), slot.out_logprob[i].tobytes()) for i in range(len(segments))]

    def answer(
        self,
        prompt: Sequence[int],
        n_new: int,
        *,
        row: int = 0,
        chunks: Sequence[int] = (),
        crowd: bool = False,
        launch: Callable[[int], int] | None = None,
        temperature: float = 0.9,
        berth_at: int | None = None,
    ) -> list[tuple[int, bytes]]:
        """Compute a prompt in chunks and draw `n_new` tokens, alone or with every other row decoding in each step."""
        self.seat(row, prompt, temperature=temperature, berth_at=berth_at)
        others = [r for r in range(self.shapes.max_rows) if r != row] if crowd else []
        for r in others:
            self.seat(r, self.prompt(1, r), seed=r)
        found, start, turn = [], 0, 0
        for n in [*chunks, len(prompt) - sum(chunks)] + [1] * (n_new - 1):
            draws = SAMPLE if start + n >= len(prompt) else 0
            own = (row, start, n, draws | (0 if start else FIRST))
            beside = [(r, turn, 1, SAMPLE | (0 if turn else FIRST)) for r in others]
            middle = len(beside) // 2
            results = self.step([*beside[:middle], own, *beside[middle:]], launch)
            if draws:
                found.append(results[middle])
            start, turn = start + n, turn + 1
        return found

    def twin(self) -> Rig:
        """Make the same rig over the torch twin, on the CPU, with the same weights."""
        other = copy.copy(self)
        other.columns, other.slots = RowColumns(self.shapes), [StepSlot(self.shapes) for _ in self.slots]
        tensors = {name: tensor.cpu() for name, tensor in RandomTensors(self.shape, self.device.torch_device).items()}
        weights = Weights(self.shape, torch.bfloat16, tensors)
        other.engine = TorchStep(self.shape, weights, other.columns, other.slots, self.shapes)  # type: ignore[assignment]
        other._turn = 0
        return other

    def close(self) -> None:
        """Free the engine, and unlock the arena."""
        self.engine.close()
        self.device.unregister(self.arena.address)


def row_tokens(shapes: Shapes) -> int:
    """Return the tokens that each row has pages for when all rows are seated."""
    return shapes.n_pages // shapes.max_rows * PAGE


def shapes_for(max_rows: int, max_len: int, row_len: int, step_tokens: int) -> Shapes:
    """Return a build whose rows have pages for `row_len` tokens each."""
    return Shapes(
        max_rows=max_rows, max_model_len=max_len, step_tokens=step_tokens, n_pages=max_rows * pages_for(row_len)
    )
