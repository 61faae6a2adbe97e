"""Compile C++ sources into shared libraries, each of them once: the compiler, its cache folder, one atomic way into it.

State: files under the cache folder; nothing in memory. What decides a library's bytes is known to its owner, who names
the file accordingly. Refuses torch, numpy, asyncio, net and gpu: both of these have libraries.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

from zl.errors import DeviceError, unwritable
from zl.filehash import cache_root

NO_COMPILER = "no C++ compiler found; install g++ (or set CXX)"


def compiler() -> str | None:
    """Find the C++ compiler: `$CXX`, else g++."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compiler_says() -> str:
    """Ask the compiler for all that it says of its version; empty where there is none."""
    command = compiler()
    if command is None:
        return ""
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout


def compiler_version() -> str:
    """Ask the compiler for its version line; empty where there is none."""
    return compiler_says().partition("\n")[0].strip()


def cache_dir() -> Path:
    """Name the folder that holds compiled libraries."""
    return cache_root() / "native"


def shared_library(
    what: str, target: Path, sources: Sequence[Path], flags: Sequence[str], link: Sequence[str] = ()
) -> Path:
    """Give `target`, compiled when it is not there yet; another process sees all of it or nothing.

    what    the library's name in an error
    flags   for compiling and linking; link: for linking alone
    Raises  DeviceError: no compiler, it refused a source, or there is no room
            ConfigError: the folder is not this user's to write
    """
    if target.exists():
        return target
    command = compiler()
    if command is None:
        raise DeviceError(f"{what}: {NO_COMPILER}", call="g++", lasting=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            os.replace(_compile(command, what, Path(work), sources, flags, link), target)
    except OSError as error:
        raise unwritable(f"cannot write below {target.parent}", error, passing=DeviceError) from error
    return target


def _compile(
    command: str, what: str, work: Path, sources: Sequence[Path], flags: Sequence[str], link: Sequence[str]
) -> Path:
    # The assembler's input goes into the same folder: one place that has to have room, and that the error names.
    compilers = _Compilers(command, os.environ | {"TMPDIR": str(work), "LC_ALL": "C"})

    def run(arguments: list[str]) -> None:
        status, stderr = compilers.run(arguments)
        if status and os.strerror(errno.ENOSPC) in stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if status:
            raise DeviceError(
                f"{command} could not build {what}: {stderr.strip()[:2000]}",
                call=" ".join([command, *arguments]),
                status=status,
            )

    objects = [work / f"{source.stem}.o" for source in sources]
    made = work / "library.so"
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        list(pool.map(lambda s, o: run([*flags, "-c", str(s), "-o", str(o)]), sources, objects))
        pool.submit(run, [*flags, "-shared", *link, *map(str, objects), "-o", str(made)]).result()
    except BaseException:  # a signal too, which only this thread hears of: nothing goes on without us
        compilers.end()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return made


class _Compilers:
    """The compilers that run, each the leader of a group: what it has started in turn is ended with it."""

    def __init__(self, command: str, environ: Mapping[str, str]):
        self._command, self._environ = command, environ
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Run one, on a thread that no signal interrupts; give its exit status and stderr."""
        with self._lock:
            if self._ended:
                raise CancelledError
            process = subprocess.Popen(
                [self._command, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, env=self._environ, process_group=0,
            )  # fmt: skip
            self._running.add(process)
        with process:
            _, stderr = process.communicate()
        with self._lock:
            self._running.discard(process)
        return process.returncode, stderr

    def end(self) -> None:
        """Kill those that run, and start no other."""
        with self._lock:
            self._ended = True
            for process in self._running:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
