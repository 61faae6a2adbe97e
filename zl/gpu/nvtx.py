"""NVTX ranges for Nsight Systems: what the host does around a step, by name, on the thread that does it.

Off, nothing is wrapped: `unmarked` hands back the very function. State: none. Refuses rows, dispatch, net and asyncio;
torch is loaded only where ranges are asked for, since the bindings used are those that come with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from zl.errors import DeviceError

P = ParamSpec("P")
T = TypeVar("T")


class Mark(Protocol):
    """Wrap a function so that each call is a range with this name."""

    def __call__(self, name: str, call: Callable[P, T]) -> Callable[P, T]: ...


def unmarked(name: str, call: Callable[P, T]) -> Callable[P, T]:  # noqa: ARG001
    """Give the function back as it is."""
    return call


class NvtxMark:
    """Ranges through the bindings that come with torch, or through what stands in for them in a test.

    bindings  has range_push(name) and range_pop(); None: torch.cuda.nvtx
    Raises    DeviceError: this torch has no NVTX
    """

    def __init__(self, bindings: Any = None):
        if bindings is None:
            from torch.cuda import nvtx as bindings
        try:
            bindings.range_push("zl")
            bindings.range_pop()
        except RuntimeError as missing:
            raise DeviceError(
                f"nvtx = on needs a torch that is built for CUDA ({missing}); install one, or leave nvtx off",
                call="nvtxRangePush",
            ) from missing
        self._push, self._pop = bindings.range_push, bindings.range_pop

    def __call__(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        """Wrap a function; the range ends however the call does."""
        push, pop = self._push, self._pop

        def marked(*args: P.args, **kwargs: P.kwargs) -> T:
            push(name)
            try:
                return call(*args, **kwargs)
            finally:
                pop()

        return marked


class MarkedEngine:
    """An Engine (gpu.programs) whose launches and waits are ranges; everything else is the engine's own."""

    def __init__(self, engine: Any, mark: Mark):
        self._engine = engine
        self.name: str = engine.name
        self.launch: Callable[[int], int] = mark("launch", engine.launch)
        self.wait: Callable[[int], None] = mark("wait", engine.wait)

    @property
    def fallback(self) -> bool:
        """Tell whether something slower computes now."""
        return bool(self._engine.fallback)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
