"""Compile the native step: one shared library per instruction level, cached by content.

State: files under the cache folder, named by a hash of sources, flags and compiler; nothing in memory.
Refuses torch, asyncio and the network.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from pathlib import Path

from zl.compiled import NO_COMPILER, cache_dir, compiler, compiler_says, shared_library
from zl.errors import DeviceError

HERE = Path(__file__).parent

_COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=default",
    "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized",  # gcc 12 about its own intrinsics
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_LEVEL_FLAGS: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx512f": _AVX512,
    "avx512": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DZL_AMX"),
}
_NEEDS_AVX512 = frozenset({"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
_NEEDS: dict[str, frozenset[str]] = {
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "avx512f": _NEEDS_AVX512,
    "avx512": _NEEDS_AVX512 | {"avx512_bf16"},
    "amx": _NEEDS_AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}

LEVELS = ("amx", "avx512", "avx512f", "avx2")
"""Best first. `avx512` has the bf16 dot product of AVX512_BF16; `avx512f` widens bf16 by hand."""

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILE_DATA = 18


def have_compiler() -> bool:
    """Tell whether the native step can be built here."""
    return compiler() is not None and platform.machine() == "x86_64" and bool(available_levels())


def cpu_flags() -> frozenset[str]:
    """Read this CPU's feature flags as Linux reports them (only what the kernel has enabled)."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def request_amx() -> bool:
    """Ask the kernel for the tile registers, for this process and the threads it starts from now on."""
    if platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILE_DATA)
    return int(syscall(*map(ctypes.c_long, arguments))) == 0


def needed_flags(level: str) -> frozenset[str]:
    """Name the CPU features that a level's library uses."""
    return _NEEDS[level]


def runs(level: str) -> bool:
    """Tell whether this machine can run a level."""
    return level in _NEEDS and cpu_flags() >= _NEEDS[level] and (level != "amx" or request_amx())


def available_levels() -> list[str]:
    """List the levels this machine can run, best first."""
    return [level for level in LEVELS if runs(level)]


def pick_level(level: str = "auto") -> str:
    """Resolve a wish to a level of this machine. `avx512` falls to `avx512f` where there is no bf16 instruction.

    Raises  DeviceError: the level is unknown or this CPU lacks it
    """
    levels = available_levels()
    if level == "avx512" and level not in levels and "avx512f" in levels:
        return "avx512f"
    if level == "auto" and levels:
        return levels[0]
    if level in levels:
        return level
    raise DeviceError(
        f"ZL_CPU_LEVEL={level!r}: this CPU offers {', '.join(levels) or 'no level of the native step'}; "
        "choose one of these, or auto",
        call="pick_level",
        lasting=True,
    )


def profile_flags() -> list[str]:
    """Give the compiler the sampling profiles, whose float32 values become constants of the program."""
    from zl.sampling.profiles import PROFILES  # loads numpy, which the command line's help does without

    table = (
        "{" + ",".join(f"(float){value!r}" for value in (p.temperature, p.top_p, p.penalty)) + "}"
        for _, p in sorted(PROFILES.items())
    )
    return [f"-DZL_PROFILES={','.join(table)}"]


def fingerprint(level: str) -> str:
    """Hash everything that decides the library of a level: sources, flags, compiler. Part of `build_id`.

    Raises  DeviceError: no compiler
    """
    if compiler() is None:
        raise no_compiler()
    digest = hashlib.sha256()
    for part in (compiler_says(), *_COMMON, *_LEVEL_FLAGS[level], *profile_flags()):
        digest.update(part.encode() + b"\0")
    for path in sorted(HERE.iterdir()):
        if path.suffix in {".cpp", ".hpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def no_compiler() -> DeviceError:
    """Make the error of a native program that was asked for and that nothing here can compile."""
    return DeviceError(
        f"{NO_COMPILER}, or set ZL_CPU_LEVEL=torch for the slower engine",
        call="g++",
        lasting=True,
    )


def lacking() -> str:
    """Say why no native program can be built here, where `have_compiler` is false."""
    return NO_COMPILER if compiler() is None else "this CPU has no AVX2"


def library(level: str) -> Path:
    """Give the path of a level's shared library, compiling it when the cache has none.

    Raises  DeviceError: no compiler, it refused a source, or there is no room
            ConfigError: the cache is not this user's to write
    """
    target = cache_dir() / fingerprint(level) / f"zl_native_{level}.so"
    flags = [*_COMMON, *_LEVEL_FLAGS[level], *profile_flags()]
    return shared_library(f"the native step ({level})", target, sorted(HERE.glob("*.cpp")), flags, ["-pthread"])
