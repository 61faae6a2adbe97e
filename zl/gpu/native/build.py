"""Compile the native step: one shared library per instruction level, cached by content.

State: files under the cache folder, named by a hash of sources, flags and compiler; nothing in memory.
Refuses torch, asyncio and the network.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zl.errors import ConfigError, DeviceError, ZlError
from zl.filehash import cache_root

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


def compiler() -> str | None:
    """Find the C++ compiler: `$CXX`, else g++."""
    return shutil.which(os.environ.get("CXX", "g++"))


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


def compiler_version() -> str:
    """Ask the compiler for its version line; empty where there is none."""
    command = compiler()
    if command is None:
        return ""
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    return said.partition("\n")[0].strip()


def cache_dir() -> Path:
    """Name the folder that holds compiled libraries."""
    return cache_root() / "native"


def profile_flags() -> list[str]:
    """Give the compiler the sampling profiles, whose float32 values become constants of the program."""
    from zl.sampling.profiles import PROFILES  # loads numpy, which the command line's help does without

    table = (
        "{" + ",".join(f"(float){value!r}" for value in (p.temperature, p.top_p, p.penalty)) + "}"
        for _, p in sorted(PROFILES.items())
    )
    return [f"-DZL_PROFILES={','.join(table)}"]


def fingerprint(level: str) -> str:
    """Hash everything that decides the library of a level: sources, flags, compiler. Part of `build_id`."""
    command = compiler()
    if command is None:
        raise no_compiler()
    digest = hashlib.sha256()
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (version, *_COMMON, *_LEVEL_FLAGS[level], *profile_flags()):
        digest.update(part.encode() + b"\0")
    for path in sorted(HERE.iterdir()):
        if path.suffix in {".cpp", ".hpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def library(level: str) -> Path:
    """Give the path of a level's shared library, compiling it when the cache has none.

    Raises  DeviceError: no compiler, it refused a source, or there is no room
            ConfigError: the cache is not this user's to write
    """
    folder = cache_dir() / fingerprint(level)
    target = folder / f"zl_native_{level}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = _compile(level, Path(work))
            os.replace(made, target)  # atomic: another process sees all of it or nothing
    except OSError as error:
        raise _unwritable(folder, error) from error
    return target


def _unwritable(folder: Path, error: OSError) -> ZlError:
    """Say why the cache cannot be written: a full disk may have room again at the next start, a right stays lacking."""
    text = f"cannot write below {folder}: {error.strerror or error}; "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DeviceError(text + "free some room there, or set XDG_CACHE_HOME to a folder that has it", call="write")
    return ConfigError(text + "set XDG_CACHE_HOME to a folder that can be written")


def no_compiler() -> DeviceError:
    """Make the error of a native program that was asked for and that nothing here can compile."""
    return DeviceError(
        "no C++ compiler found; install g++ (or set CXX), or set ZL_CPU_LEVEL=torch for the slower engine",
        call="g++", lasting=True,
    )  # fmt: skip


def _compile(level: str, work: Path) -> Path:
    command = compiler()
    if command is None:
        raise no_compiler()
    flags = [*_COMMON, *_LEVEL_FLAGS[level], *profile_flags()]
    # The assembler's input goes into the same folder: one place that has to have room, and that the error names.
    environ = os.environ | {"TMPDIR": str(work), "LC_ALL": "C"}

    def run(arguments: list[str]) -> None:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False, env=environ)
        if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if done.returncode:
            raise DeviceError(
                f"{command} could not build the native step ({level}): {done.stderr.strip()[:2000]}",
                call=" ".join([command, *arguments]),
                status=done.returncode,
            )

    sources = sorted(HERE.glob("*.cpp"))
    objects = [work / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda s, o: run([*flags, "-c", str(s), "-o", str(o)]), sources, objects))
    out = work / "library.so"
    run([*flags, "-shared", "-pthread", *map(str, objects), "-o", str(out)])
    return out
