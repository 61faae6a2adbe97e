"""`zl doctor` on the machine: cores, memory, limits, NUMA, governor, cache. Reads, never changes. Owns no state."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from zl.config import Settings
from zl.filehash import cache_root
from zl.tools.findings import FAIL, OK, WARN, Finding, read

FEW_FILES = 4_096
"""Below this many descriptors, connections are what ends first."""

LITTLE_ROOM = 512 << 20
"""Below this many bytes free, the next artifact may not fit."""


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at what the kernel gives this user."""
    yield cores(settings)
    yield memory()
    yield huge_pages()
    yield memlock(settings)
    yield open_files()
    yield numa()
    yield governor()
    yield cache(settings)


def cores(settings: Settings) -> Finding:
    """Compare the compute threads with the cores that may be used."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    threads = settings.threads or usable
    text = f"{usable} usable of {present}; {threads} compute threads"
    if threads > usable:
        return Finding(WARN, "cores", f"{text}: more threads than cores slow each other down, set threads = 0")
    return Finding(OK, "cores", text)


def memory(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup/memory.max") -> Finding:
    """Tell how much memory is free, within the limit of this container or unit."""
    info = _meminfo(meminfo)
    free, total = info.get("MemAvailable", 0), info.get("MemTotal", 0)
    limit = ""
    text = read(cgroup)
    if text.isdigit() and int(text) < total:
        limit = f"; this container may use {int(text) / 2**30:.1f} GiB"
        free = min(free, int(text))
    text = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB{limit}"
    if free >= 2**31:
        return Finding(OK, "memory", text)
    return Finding(WARN, "memory", text + ": a small KV pool; free some, or raise MemoryMax= of the unit")


def huge_pages(path: str = "/sys/kernel/mm/transparent_hugepage/enabled") -> Finding:
    """Tell whether large buffers may live on huge pages."""
    text = read(path)
    if not text and not Path(path).parents[1].is_dir():
        return Finding(OK, "huge pages", f"not visible here: there is no {Path(path).parents[1]} (a container?)")
    if not text:
        return Finding(WARN, "huge pages", "the kernel has no transparent huge pages: a little slower")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return Finding(WARN, "huge pages", f"transparent huge pages are off: a little slower; echo madvise > {path}")
    return Finding(OK, "huge pages", f"transparent, {chosen}")


def memlock(settings: Settings) -> Finding:
    """Compare the limit of locked memory with the arena, which a GPU wants page-locked."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    arena = settings.berths * settings.max_frame
    if limit == resource.RLIM_INFINITY:
        return Finding(OK, "memlock", "no limit")
    text = f"limit {limit / 2**20:.0f} MiB, the arena has {arena / 2**20:.0f} MiB"
    if limit < arena:
        return Finding(WARN, "memlock", f"{text}: it may be swapped out, and a GPU may refuse it; "
                                        "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited")  # fmt: skip
    return Finding(OK, "memlock", text)


def open_files() -> Finding:
    """Tell how many descriptors, and so connections, this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"limit {hard}" if soft == hard else f"limit {soft}, which zl serve raises to {hard}"
    if 0 <= hard < FEW_FILES:  # -1: no limit
        return Finding(WARN, "open files", f"{text}: about {max(0, hard - 64)} connections; LimitNOFILE=65536 in the "
                                           "unit, or as root ulimit -Hn 65536")  # fmt: skip
    return Finding(OK, "open files", text)


def numa(nodes: str = "/sys/devices/system/node", allowed: set[int] | None = None) -> Finding:
    """Tell whether the usable cores lie on several memory nodes."""
    usable = os.sched_getaffinity(0) if allowed is None else allowed
    known = sorted(Path(nodes).glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    used = [path.name for path in known if usable & _cpu_list(read(path / "cpulist"))]
    if len(known) < 2:
        return Finding(OK, "numa", "one memory node")
    if len(used) < 2:
        return Finding(OK, "numa", f"{len(known)} memory nodes, cores of {', '.join(used) or 'none'} used")
    return Finding(WARN, "numa", f"cores of {', '.join(used)} are used: weights on one node are slow from another; run "
                                 "one server a node, with CPUAffinity=, NUMAPolicy=bind and NUMAMask= in its unit, or "
                                 "numactl --cpunodebind=0 --membind=0")  # fmt: skip


def governor(cpus: str = "/sys/devices/system/cpu", allowed: set[int] | None = None) -> Finding:
    """Tell how the clock of the usable cores is governed."""
    usable = os.sched_getaffinity(0) if allowed is None else allowed
    found = {read(Path(cpus) / f"cpu{cpu}" / "cpufreq" / "scaling_governor") for cpu in usable} - {""}
    if not found:
        return Finding(OK, "governor", "not visible here, as on most virtual machines: the host decides the clock")
    text = ", ".join(sorted(found))
    if found == {"performance"}:
        return Finding(OK, "governor", text)
    return Finding(WARN, "governor", f"{text}: the clock follows the load, which costs first tokens after a pause; "
                                     "cpupower frequency-set -g performance")  # fmt: skip


def cache(settings: Settings, root: Path | None = None) -> Finding:
    """Tell whether models, artifacts and compiled programs can be kept; one that was compiled before still serves."""
    root = cache_root() if root is None else root
    blocked = next((root / name for name in ("native", "builds", "models") if not _writable(root / name)), None)
    if blocked is not None:
        compiled = any(root.glob("native/*/*.so")) or settings.cpu_level == "torch"
        remedy = "set XDG_CACHE_HOME to a folder that can"
        return Finding(WARN if compiled else FAIL, "cache", f"{blocked} cannot be written: {remedy}")
    free = shutil.disk_usage(_existing(root)).free
    if free < LITTLE_ROOM:
        return Finding(WARN, "cache", f"{root}: {free / 2**20:.0f} MiB free, and an artifact is as large as its model: "
                                      "free some, or set XDG_CACHE_HOME to another folder")  # fmt: skip
    return Finding(OK, "cache", f"{root}, {free / 2**30:.1f} GiB free")


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if os.path.lexists(each))


def _writable(folder: Path) -> bool:
    """Tell whether a folder can be written, or made."""
    place = _existing(folder)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _meminfo(path: str) -> dict[str, int]:
    found = {}
    for line in read(path).splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[key] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _cpu_list(text: str) -> set[int]:
    """Read the kernel's lists, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
