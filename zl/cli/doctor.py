"""`zl doctor`: what this machine offers, what zl will use of it, and why. Reads, never changes. Owns no state."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator

from zl import __version__
from zl.cli.packages import PACKAGES, REMEDY
from zl.compiled import NO_COMPILER
from zl.compiled import compiler as find_compiler
from zl.config import Settings, load
from zl.errors import INSTALL_CUDA, ConfigError, ZlError
from zl.gpu.native import build as native
from zl.pull import MODELS, cache_folder, locate
from zl.tools import doctor_gpu, doctor_machine, doctor_ports, doctor_units
from zl.tools.findings import FAIL, OK, WARN, Finding, read

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
    gpu = doctor_gpu.find_gpu()
    compiler = find_compiler()
    yield Finding(OK, "zl", f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    yield from _packages()
    yield _cpu(levels)
    yield _compiler(compiler)
    yield from doctor_machine.examine(settings)
    yield doctor_gpu.driver()
    yield _gpu(gpu, settings)
    yield doctor_gpu.host_registration(gpu)
    yield from doctor_ports.examine(settings)
    yield from doctor_units.examine()
    yield _model(settings)
    yield _choice(settings, levels, gpu, compiler)


def _cpuinfo(path: str, key: str) -> str:
    lines = (line.partition(":") for line in read(path).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _packages() -> Iterator[Finding]:
    wanted = ("torch", "numpy", "uvloop", "protobuf", "tokenizers")
    missing = [package for package in PACKAGES.values() if not _version(package)]
    if missing:
        yield Finding(FAIL, "packages", f"missing: {', '.join(missing)}; {REMEDY}")
    else:
        yield Finding(OK, "packages", ", ".join(f"{package} {_version(package)}" for package in wanted))


def _cpu(levels: list[str]) -> Finding:
    model = _cpuinfo("/proc/cpuinfo", "model name") or platform.machine()
    if not levels:
        return Finding(WARN, "cpu", f"{model}: no AVX2, so torch computes, which is slow")
    return Finding(OK, "cpu", f"{model}: {', '.join(levels)}")


def _compiler(path: str | None) -> Finding:
    if path is None:
        return Finding(WARN, "compiler", f"{NO_COMPILER}; until then torch computes, several times slower")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(WARN, "compiler", f"{path} does not run: {error}")
    return Finding(OK, "compiler", (done.stdout.splitlines() or [path])[0])


def _gpu(gpu: doctor_gpu.Gpu, settings: Settings) -> Finding:
    if not gpu.count:
        if settings.device == "cuda":
            return Finding(FAIL, "gpu", f"{gpu.why}, but device is cuda: install the driver, or set device = cpu")
        return Finding(OK, "gpu", f"none: {gpu.why}")
    text = f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, driver for {gpu.driver}, {gpu.count} in all"
    lacking = _cuda_lacking()
    if lacking:
        level = FAIL if settings.device == "cuda" else WARN
        return Finding(level, "gpu", f"{text}; not usable: {lacking}; {INSTALL_CUDA}")
    return Finding(OK, "gpu", text)


def _cuda_lacking() -> str:
    lacking = [package for package in ("cuda-python", "triton") if not _version(package)]
    if "+cpu" in _version("torch"):
        lacking.append("a CUDA build of torch")
    return "missing " + ", ".join(lacking) if lacking else ""


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
    try:
        from zl.build import inspect  # here: it loads torch, the last thing that this command needs

        model = inspect(settings, path)
    except ZlError as refused:
        return Finding(FAIL, "model", str(refused))
    except ImportError as missing:
        return Finding(WARN, "model", f"{path}, {size / 1e6:.0f} MB; not opened: {missing}; see the line packages")
    return Finding(OK, "model", f"{path}, {size / 1e6:.0f} MB: {model.name}, at most {model.max_position:,} tokens")


def _choice(settings: Settings, levels: list[str], gpu: doctor_gpu.Gpu, compiler: str | None) -> Finding:
    usable = bool(gpu.count) and not _cuda_lacking()
    if settings.device == "cuda" or (settings.device == "auto" and usable):
        why = "device is cuda" if settings.device == "cuda" else "there is a GPU and what it needs is installed"
        if settings.kv == "int8":
            return Finding(FAIL, "will use", f"cuda, because {why}, but kv is int8, which only the CPU program has: "
                                             "leave kv out, or set device to cpu")  # fmt: skip
        return Finding(OK, "will use", f"cuda, because {why}")
    why = "device is cpu" if settings.device == "cpu" else "no GPU can be used"
    level, because = settings.cpu_level, "set as cpu_level"
    if level == "auto":
        level, because = (levels[0], "the best of this CPU") if levels else ("torch", "no AVX2")
    if compiler is None and settings.cpu_level not in ("auto", "torch"):
        return Finding(FAIL, "will use", f"cpu_level is {level}, but {native.no_compiler()}")
    if level != "torch" and compiler is None:
        level, because = "torch", "no C++ compiler"
    elif level not in (*levels, "torch") and not (level == "avx512" and "avx512f" in levels):
        return Finding(FAIL, "will use", f"cpu_level is {level}, which this CPU lacks: {', '.join(levels) or 'torch'}")
    if level == "torch" and settings.kv == "int8":
        return Finding(FAIL, "will use", f"torch ({because}), but kv is int8, which only the native program has: "
                                         "leave kv out")  # fmt: skip
    kept = " and int8 keys and values" if settings.kv == "int8" else ""
    return Finding(WARN if level == "torch" else OK, "will use", f"cpu with {level} ({because}){kept}, because {why}")
