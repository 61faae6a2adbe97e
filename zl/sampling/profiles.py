"""Sampling profiles: the compiled settings of each request type, and their way into the row columns.

State: three frozen profiles and their hash. Refuses torch, asyncio and net.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from zl.errors import Code, RequestError
from zl.flags import IGNORE_EOS, LOGPROBS

SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Profile:
    """One request type's settings, constants of the build."""

    name: str
    temperature: float
    top_p: float
    penalty: float


CHAT = Profile("CHAT", 0.7, 0.95, 1.1)
SUMMARIZE = Profile("SUMMARIZE", 0.3, 0.5, 1.0)
CREATIVE = Profile("CREATIVE", 0.9, 0.99, 1.2)

PROFILES = MappingProxyType({0: CHAT, 1: SUMMARIZE, 2: CREATIVE})
"""`zl.RequestType` of the wire to its profile."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one request samples with. `generic`: some value differs from the profile's, so no baked program fits."""

    temperature: float
    top_p: float
    penalty: float
    profile: Profile
    generic: bool


PROGRAMS = (*(profile.name for profile in PROFILES.values()), "generic")
"""What can sample a row: the program of a profile, or the one that reads the row's own values."""

GENERIC = len(PROGRAMS) - 1


def program_of(sampling: Sampling) -> int:
    """Give the index in PROGRAMS of what samples a request."""
    return GENERIC if sampling.generic else PROGRAMS.index(sampling.profile.name)


class SamplingColumns(Protocol):
    """The part of the row columns that `write` fills: NumPy arrays of one element a row.

    The members are read-only here: the arrays are written, never replaced.
    """

    @property
    def temperature(self) -> np.ndarray:
        """Float32."""

    @property
    def top_p(self) -> np.ndarray:
        """Float32."""

    @property
    def penalty(self) -> np.ndarray:
        """Float32."""

    @property
    def seed(self) -> np.ndarray:
        """Uint64."""

    @property
    def row_flags(self) -> np.ndarray:
        """Uint8, IGNORE_EOS and LOGPROBS."""


def resolve(
    request_type: int, temperature: float | None = None, top_p: float | None = None, penalty: float | None = None
) -> Sampling:
    """Settle a request's settings: its own values where present, else its profile's.

    request_type  the wire's number; values in plain units (the wire's millionths divided)
    Raises        RequestError(BAD_REQUEST): an unknown type or a value outside its range
    """
    profile = PROFILES.get(int(request_type))
    if profile is None:
        known = ", ".join(f"{number} ({known.name})" for number, known in PROFILES.items())
        raise RequestError(Code.BAD_REQUEST, f"type: {int(request_type)} is unknown, send one of {known}", field="type")
    t = _checked("temperature", temperature, profile.temperature, 0.0, math.inf)
    p = _checked("top_p", top_p, profile.top_p, 0.0, 1.0)
    r = _checked("repetition_penalty", penalty, profile.penalty, 0.0, math.inf, above=True)
    # Compared as the float32 values of the columns: a client that spells out the profile's values gets its program.
    generic = _f32(t, p, r) != _f32(profile.temperature, profile.top_p, profile.penalty)
    return Sampling(t, p, r, profile, generic)


def write(
    columns: SamplingColumns,
    row: int,
    sampling: Sampling,
    *,
    seed: int,
    ignore_eos: bool = False,
    logprobs: bool = False,
) -> None:
    """Write one row's sampling columns; call before the row is seated. `seed` counts modulo 2**64."""
    columns.temperature[row] = sampling.temperature
    columns.top_p[row] = sampling.top_p
    columns.penalty[row] = sampling.penalty
    columns.seed[row] = seed & SEED_MASK
    columns.row_flags[row] = IGNORE_EOS * ignore_eos | LOGPROBS * logprobs


def profile_hash(profiles: Any = PROFILES) -> str:
    """Hash the profiles' numbers and names as hex; equal on every machine, part of the build id."""
    lines = [f"{n}:{p.name}:{p.temperature!r}:{p.top_p!r}:{p.penalty!r}" for n, p in sorted(profiles.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


HASH = profile_hash()


def _checked(field: str, value: float | None, default: float, low: float, high: float, *, above: bool = False) -> float:
    if value is None:
        return default
    number = float(value)
    fits = math.isfinite(number) and (low < number if above else low <= number) and number <= high
    if not fits:
        bounds = f"{'above' if above else 'at least'} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        raise RequestError(Code.BAD_REQUEST, f"{field}: {number:g} is out of range, send {bounds}", field=field)
    return number


def _f32(*values: float) -> tuple[float, ...]:
    return tuple(float(np.float32(v)) for v in values)
