"""Server processes under test: start, pause, resume, end, and what their tree uses. State: the child that it started.

Figures come from /proc: resident memory and CPU of the whole tree, CPU by thread name. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Find a TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tree(root: int) -> list[int]:
    """List a process and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def _stat(pid: int, thread: int | None = None) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on (state is index 0), None where the process is gone."""
    where = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        return Path(where).read_text().rpartition(")")[2].split()
    except OSError:
        return None


def cpu_seconds(pids: Sequence[int]) -> float:
    """Sum user and system time, those of ended and waited-for children included."""
    stats = (_stat(pid) for pid in pids)
    return sum(sum(map(int, s[11:15])) for s in stats if s is not None) / TICKS


def cpu_by_thread(pids: Sequence[int]) -> dict[str, float]:
    """Sum CPU seconds by thread name; a process's first thread is called NAME/main."""
    spent: Counter[str] = Counter()
    for pid in pids:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            fields = _stat(pid, int(thread))
            if fields is None:
                continue
            try:
                name = Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
            except OSError:
                continue
            spent[name + ("/main" if int(thread) == pid else "")] += (int(fields[11]) + int(fields[12])) / TICKS
    return dict(spent)


def resident_bytes(pids: Sequence[int]) -> int:
    """Sum resident memory; pages that processes share count in each."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except OSError:
            continue
    return total


def proportional_bytes(pids: Sequence[int]) -> int:
    """Sum proportional memory: a page shared by n processes counts as 1/n. Slow: it walks the page tables."""
    total = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


class Server:
    """One server process and its tree.

    log       file that takes its output
    started   monotonic second of the exec
    """

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path):
        self.name = name
        self.log = log
        self.paused = False
        self.peak_bytes = 0
        with log.open("wb") as out:
            self.started = time.perf_counter()
            self._child = subprocess.Popen(
                list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """The root of the tree."""
        return self._child.pid

    def check(self) -> None:
        """Raise RuntimeError, with the end of its log, where the server has ended."""
        code = self._child.poll()
        if code is not None:
            tail = self.log.read_text(errors="replace")[-2_000:]
            raise RuntimeError(f"the {self.name} server ended with status {code}; its log {self.log} ends:\n{tail}")

    def pids(self) -> list[int]:
        """List the tree."""
        return tree(self.pid)

    def sample(self) -> int:
        """Take note of resident memory; return it, bytes."""
        now = resident_bytes(self.pids())
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    def pause(self) -> None:
        """Stop the whole tree from running; connections stay open."""
        if not self.paused:
            os.killpg(self.pid, signal.SIGSTOP)
            self.paused = True

    def resume(self) -> None:
        """Let the tree run again."""
        if self.paused:
            os.killpg(self.pid, signal.SIGCONT)
            self.paused = False

    def stop(self, patience_s: float = 20.0) -> None:
        """End the tree: SIGTERM, and SIGKILL to what is left when patience ends."""
        pids = self.pids()
        self.resume()
        if self._child.poll() is None:
            os.killpg(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(patience_s)
        for pid in pids:
            if _stat(pid) is not None and _group(pid) == self.pid:
                os.kill(pid, signal.SIGKILL)
        self._child.wait()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
