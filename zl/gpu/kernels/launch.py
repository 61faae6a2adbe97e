"""What the Triton launchers share: argument checks, and the variants that a build compiles ahead.

State: none. Refuses model, rows and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from zl.errors import ShapeError

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True where kernels run in Triton's interpreter. Its `dot` multiplies the raw bits of bfloat16 operands (triton 3.9,
runtime/interpreter.py, create_dot), so kernels widen them to float32 there: their products are exact in it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How one kernel is launched: decided by dtype and model dimensions, never by live rows.

    constexprs  by parameter name
    fp_fusion   False forbids contracting a multiply and an add, so that two kernels that share a formula share its bits
    """

    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of a launch."""
        return {
            **self.constexprs,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fp_fusion,
        }


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as a build compiles it.

    signature  Triton type by name for each parameter that is not a constexpr, e.g. {"x": "*fp32"}; an absent pointer
               (None at launch) is a constexpr None
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    settings: Settings
    facts: Mapping[str, str] = field(default_factory=dict)


def expect(name: str, tensor: torch.Tensor, dtype: torch.dtype | tuple[torch.dtype, ...], *shape: int | None) -> None:
    """Check one argument's dtype, shape (None: any size) and that it is contiguous; ShapeError otherwise."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        raise ShapeError(name, tensor.dtype, " or ".join(str(d) for d in dtypes))
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, found, strict=True)
    ):
        raise ShapeError(name, f"shape {found}", f"shape {tuple('any' if s is None else s for s in shape)}")
    if not tensor.is_contiguous():
        raise ShapeError(name, f"strides {tensor.stride()}", "contiguous")


def expect_same_device(**tensors: torch.Tensor | None) -> None:
    """Check that all tensors are on the first one's device; ShapeError names the first that is not."""
    first: torch.device | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = tensor.device
        elif tensor.device != first:
            raise ShapeError(name, f"device {tensor.device}", f"device {first}")


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
