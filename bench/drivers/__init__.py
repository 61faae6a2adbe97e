"""The systems that bench drives, by name."""

from __future__ import annotations

from bench.drivers.base import Driver, MissingPeerError, Plan
from bench.drivers.llamacpp import LlamaCpp
from bench.drivers.transformers import Transformers
from bench.drivers.vllm import Vllm
from bench.drivers.zl import Zl

__all__ = ["Driver", "MissingPeerError", "Plan", "driver", "known"]


def known() -> list[str]:
    """Names that `driver` takes."""
    return [d.name for d in _all()]


def _all() -> list[Driver]:
    return [
        Zl(),
        Vllm(),
        LlamaCpp(batch=True),
        LlamaCpp(batch=False),
        Transformers("static"),
        Transformers("continuous"),
    ]


def driver(name: str) -> Driver:
    """Give the driver of that name.

    Raises  ValueError: there is none
    """
    for one in _all():
        if one.name == name:
            return one
    raise ValueError(f"no system is called {name!r}; there are {', '.join(known())}")
