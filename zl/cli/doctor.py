"""`zl doctor`: what this machine offers, what zl will use of it, and why. Reads, never changes. Owns no state."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import platform
import resource
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zl import __version__
from zl.address import TcpAddress, UnixAddress, parse_address, parse_host_port
from zl.config import Settings, load
from zl.errors import ConfigError
from zl.gpu.native import build as native
from zl.pull import MODELS, cache_folder, locate

HELP = "say what the machine offers and what zl will use"
DESCRIPTION = """\
Say what this machine offers, what `zl serve` would use of it, and why. Changes nothing.

  ok     fine              warn   works, but slower or not as asked
  fail   `zl serve` would not start; the line says what to do
"""
EPILOG = """\
examples:
  zl doctor
  zl doctor --config zl.toml
"""

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: str
    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the CUDA driver says. `count` 0: no driver or no device, and `why` tells."""

    count: int
    why: str
    driver: str = ""
    name: str = ""
    memory_bytes: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which settings to look at."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with the server's settings")
    parser.add_argument("--model", metavar="PATH|NAME", dest="set_model", help="model to look for")
    parser.add_argument("--listen", metavar="ADDR", dest="set_listen", action="append", help="address to look at")
    parser.add_argument("--device", metavar="auto|cpu|cuda", dest="set_device", help="device to look for")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 where `zl serve` can start, else 1."""
    flags = {"model": args.set_model, "listen": args.set_listen, "device": args.set_device}
    findings = list(examine(load(flags, file=args.config)))
    for found in findings:
        print(f"{found.level:<5} {found.topic:<10} {found.text}")
    return 1 if any(found.level == FAIL for found in findings) else 0


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at everything that decides how `zl serve` runs with these settings."""
    levels = native.available_levels()
    gpu = find_gpu()
    compiler = native.compiler()
    yield Finding(OK, "zl", f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    yield from _packages()
    yield _cpu(levels)
    yield _compiler(compiler)
    yield _cores(settings)
    yield _memory()
    yield _huge_pages()
    yield _memlock()
    yield _gpu(gpu, settings)
    yield from _addresses(settings)
    yield _model(settings)
    yield _choice(settings, levels, gpu, compiler)


def find_gpu(library: str = "libcuda.so.1") -> Gpu:
    """Ask the CUDA driver, through its own library, for devices."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return Gpu(0, f"no NVIDIA driver ({library} is not there)")
    if status := cuda.cuInit(0):
        return Gpu(0, f"the NVIDIA driver does not start: cuInit says {status}")
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory, name = ctypes.c_size_t(), ctypes.create_string_buffer(128)
    if (
        cuda.cuDriverGetVersion(ctypes.byref(version))
        or cuda.cuDeviceGetCount(ctypes.byref(count))
        or not count.value
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetName(name, len(name), device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    ):
        return Gpu(0, "the NVIDIA driver is there but shows no device")
    driver = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Gpu(count.value, "", driver, name.value.decode("utf-8", "replace"), memory.value)


def _cpuinfo(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _packages() -> Iterator[Finding]:
    wanted = ("torch", "numpy", "uvloop", "protobuf", "tokenizers")
    missing = [package for package in wanted if not _version(package)]
    if missing:
        yield Finding(FAIL, "packages", f"missing: {', '.join(missing)}; run make install, or pip install zl")
    else:
        yield Finding(OK, "packages", ", ".join(f"{package} {_version(package)}" for package in wanted))


def _cpu(levels: list[str]) -> Finding:
    model = _cpuinfo("/proc/cpuinfo", "model name") or platform.machine()
    if not levels:
        return Finding(WARN, "cpu", f"{model}: no AVX2, so torch computes, which is slow")
    return Finding(OK, "cpu", f"{model}: {', '.join(levels)}")


def _compiler(path: str | None) -> Finding:
    if path is None:
        return Finding(WARN, "compiler", "no g++: torch computes instead of native code, several times slower; "
                                         "install g++ (apt install g++)")  # fmt: skip
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(WARN, "compiler", f"{path} does not run: {error}")
    return Finding(OK, "compiler", (done.stdout.splitlines() or [path])[0])


def _cores(settings: Settings) -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    threads = settings.threads or usable
    text = f"{usable} usable of {present}; {threads} compute threads"
    if threads > usable:
        return Finding(WARN, "cores", f"{text}: more threads than cores slow each other down, set threads = 0")
    return Finding(OK, "cores", text)


def _meminfo() -> dict[str, int]:
    found = {}
    for line in Path("/proc/meminfo").read_text("ascii", "replace").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[key] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _memory() -> Finding:
    info = _meminfo()
    free, total = info.get("MemAvailable", 0), info.get("MemTotal", 0)
    limit = ""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text("ascii").strip()
        if text.isdigit() and int(text) < total:
            limit = f"; this container may use {int(text) / 2**30:.1f} GiB"
            free = min(free, int(text))
    except OSError:
        pass
    text = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB{limit}"
    return Finding(OK, "memory", text) if free >= 2**31 else Finding(WARN, "memory", text + ": a small KV pool")


def _huge_pages() -> Finding:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text("ascii")
    except OSError:
        return Finding(WARN, "huge pages", "the kernel has no transparent huge pages: a little slower")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return Finding(WARN, "huge pages", "transparent huge pages are off; "
                                           "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")  # fmt: skip
    return Finding(OK, "huge pages", f"transparent, {chosen}")


def _memlock() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding(OK, "memlock", "no limit")
    # The arena is at most berths * max_frame; 64 MiB is the default build's.
    if limit < 64 * 2**20:
        return Finding(WARN, "memlock", f"limit {limit / 2**20:.0f} MiB: memory may be swapped out; see ulimit -l")
    return Finding(OK, "memlock", f"limit {limit / 2**20:.0f} MiB")


def _gpu(gpu: Gpu, settings: Settings) -> Finding:
    if not gpu.count:
        if settings.device == "cuda":
            return Finding(FAIL, "gpu", f"{gpu.why}, but device is cuda: install the driver, or set device = cpu")
        return Finding(OK, "gpu", f"none: {gpu.why}")
    text = f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, driver for {gpu.driver}, {gpu.count} in all"
    lacking = _cuda_lacking()
    if lacking:
        level = FAIL if settings.device == "cuda" else WARN
        return Finding(level, "gpu", f"{text}; not usable: {lacking}; pip install 'zl[cuda]'")
    return Finding(OK, "gpu", text)


def _cuda_lacking() -> str:
    lacking = [package for package in ("cuda-python", "triton") if not _version(package)]
    if "+cpu" in _version("torch"):
        lacking.append("a CUDA build of torch")
    return "missing " + ", ".join(lacking) if lacking else ""


def _addresses(settings: Settings) -> Iterator[Finding]:
    for text in settings.listen:
        yield _address(parse_address(text, port_zero=True))
    if settings.metrics != "off":
        found = _address(parse_host_port(settings.metrics, port_zero=True))
        yield Finding(found.level, "metrics", found.text)


def _address(address: TcpAddress | UnixAddress) -> Finding:
    if isinstance(address, UnixAddress):
        folder = os.path.dirname(address.path) or "."
        if not os.access(folder, os.W_OK):
            return Finding(FAIL, "listen", f"{address}: cannot write in {folder}: choose another path")
        if not os.path.exists(address.path):
            return Finding(OK, "listen", f"{address} is free")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            if probe.connect_ex(address.path) == 0:
                return Finding(FAIL, "listen", f"{address} is taken: a server answers there already")
        return Finding(OK, "listen", f"{address}: left over from an earlier server, will be replaced")
    try:
        family, kind, protocol, _, end = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(end)
    except OSError as error:
        return Finding(FAIL, "listen", f"{address}: {error.strerror or error}: stop who has it, or choose another port")
    return Finding(OK, "listen", f"{address} is free")


def _model(settings: Settings) -> Finding:
    try:
        path = locate(settings.model)
    except ConfigError as error:
        return Finding(FAIL, "model", str(error))
    if path is None:
        target = cache_folder() / MODELS[settings.model].file
        return Finding(WARN, "model", f"{settings.model} is not in the cache: zl serve fetches it, or run zl pull; "
                                      f"offline, copy it to {target}")  # fmt: skip
    size = path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.glob("*.safetensors"))
    return Finding(OK, "model", f"{path}, {size / 1e6:.0f} MB")


def _choice(settings: Settings, levels: list[str], gpu: Gpu, compiler: str | None) -> Finding:
    usable = bool(gpu.count) and not _cuda_lacking()
    if settings.device == "cuda" or (settings.device == "auto" and usable):
        why = "device is cuda" if settings.device == "cuda" else "there is a GPU and what it needs is installed"
        return Finding(OK, "will use", f"cuda, because {why}")
    why = "device is cpu" if settings.device == "cpu" else "no GPU can be used"
    level, because = settings.cpu_level, "set as cpu_level"
    if level == "auto":
        level, because = (levels[0], "the best of this CPU") if levels else ("torch", "no AVX2")
    if level != "torch" and compiler is None:
        level, because = "torch", "no g++"
    elif level not in (*levels, "torch") and not (level == "avx512" and "avx512f" in levels):
        return Finding(FAIL, "will use", f"cpu_level is {level}, which this CPU lacks: {', '.join(levels) or 'torch'}")
    return Finding(WARN if level == "torch" else OK, "will use", f"cpu with {level} ({because}), because {why}")
