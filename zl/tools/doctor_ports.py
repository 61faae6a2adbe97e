"""`zl doctor` on addresses: free, or taken and by whom. Reads /proc and binds for a moment. Owns no state."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from zl.address import TcpAddress, UnixAddress, parse_address, parse_host_port
from zl.config import Settings
from zl.exposure import warning
from zl.ports import resolve, try_binding
from zl.tools.findings import FAIL, OK, WARN, Finding, read

LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp (include/net/tcp_states.h)."""


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at every address that the settings name."""
    wheres = [parse_address(text, port_zero=True) for text in settings.listen]
    for where in wheres:
        yield address(where)
    if exposed := warning(_ends(wheres), settings):
        yield Finding(WARN, "access", exposed)
    if settings.metrics != "off":
        found = address(parse_host_port(settings.metrics, port_zero=True))
        yield Finding(found.level, "metrics", found.text)


def _ends(wheres: list[TcpAddress | UnixAddress]) -> Iterator[tuple[str, str]]:
    """Resolve the TCP addresses; one that is not known here has had its own line."""
    for where in wheres:
        if isinstance(where, TcpAddress):
            with contextlib.suppress(OSError, UnicodeError):
                yield str(where), str(resolve(where.host, where.port)[4][0])


def address(where: TcpAddress | UnixAddress) -> Finding:
    """Say whether a server could listen there."""
    return _unix(where) if isinstance(where, UnixAddress) else _tcp(where)


def holders(inodes: set[str], proc: str = "/proc") -> list[tuple[int, str]]:
    """Return (pid, name) of the processes that hold one of these sockets; only those that this user may look into."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found = []
    for folder in Path(proc).iterdir():
        if not folder.name.isdigit():
            continue
        if wanted.intersection(_links(folder / "fd")):
            found.append((int(folder.name), read(folder / "comm")))
    return sorted(found)


def serves(pid: int, proc: str = "/proc") -> bool:
    """Tell by its command line whether a process is `zl serve`, or `zl hold` that hands sockets to it."""
    words = read(Path(proc) / str(pid) / "cmdline").split("\0")
    return any(
        os.path.basename(program) == "zl" and command in ("serve", "hold")
        for program, command in itertools.pairwise(words)
    )


def _links(folder: Path) -> Iterator[str]:
    """Give what the descriptors of a process refer to; those that close meanwhile, or may not be seen, are left out."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield os.readlink(folder / name)


def _tcp(where: TcpAddress) -> Finding:
    try:
        try_binding(where.host, where.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _taken(str(where), _tcp_inodes(where.port), "choose another port")
        return Finding(FAIL, "listen", f"{where}: {error.strerror or error}: choose another address")
    return Finding(OK, "listen", f"{where} is free")


def _unix(where: UnixAddress) -> Finding:
    folder = os.path.dirname(where.path) or "."
    if not os.path.exists(where.path):
        if not os.access(folder, os.W_OK):
            return Finding(FAIL, "listen", f"{where}: cannot write in {folder}: choose another path")
        return Finding(OK, "listen", f"{where} is free")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        if probe.connect_ex(where.path) == 0:
            return _taken(str(where), _unix_inodes(where.path), "choose another path")
    if not os.access(folder, os.W_OK):
        return Finding(FAIL, "listen", f"{where}: cannot write in {folder}: choose another path")
    return Finding(OK, "listen", f"{where}: left over from an earlier server, will be replaced")


def _taken(where: str, inodes: set[str], otherwise: str) -> Finding:
    found = holders(inodes)
    if any(pid == 1 for pid, _ in found):
        return Finding(OK, "listen", f"{where}: held by systemd for its service; systemctl list-sockets names it")
    if not found:
        return Finding(FAIL, "listen", f"{where} is in use by another user's process: run zl doctor as root to see "
                                       f"which; stop it, or {otherwise}")  # fmt: skip
    if all(serves(pid) for pid, _ in found):
        own = ", ".join(str(pid) for pid, _ in found)
        return Finding(WARN, "listen", f"{where}: a zl is serving there (process {own}); for a second one {otherwise}")
    names = ", ".join(f"{name} (process {pid})" for pid, name in found)
    return Finding(FAIL, "listen", f"{where} is in use by {names}: stop it, or {otherwise}")


def _tcp_inodes(port: int) -> set[str]:
    """Find the listening sockets of a port; proc(5): local address, state, inode are words 1, 3, 9 of a line."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in read(table).splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                found.add(words[9])
    return found


def _unix_inodes(path: str) -> set[str]:
    """Find the sockets bound to a path; proc(5), /proc/net/unix: inode and path are words 6 and 7."""
    lines = (line.split(None, 7) for line in read("/proc/net/unix").splitlines()[1:])
    return {words[6] for words in lines if len(words) == 8 and words[7] == path}
