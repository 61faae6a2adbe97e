"""Hold listening sockets for servers that come and go: what systemd's socket units do, where there is no systemd.

`hold` binds the addresses and hands descriptors of them to whoever connects to its control socket; `join` takes them,
binds an address of the process's own beside them, and becomes the command, with the variables of sd_listen_fds(3).
All servers then accept from one queue, which lives as long as the holder: one that closes its descriptor resets
nobody. (With SO_REUSEPORT each socket has a queue of its own, and closing one resets what waits in it.)

State: of `hold`, the sockets. Refuses torch, numpy, the engine and connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from zl.address import UnixAddress, parse_address
from zl.errors import ConfigError, ZlError
from zl.net.listen import FIRST_SYSTEMD_FD, Bound, bind_all, unbind
from zl.streams import Teller

MOST_SOCKETS = 16
SHARED, OWN = "shared", "own"
"""Names of the descriptors, as a server sees them in LISTEN_FDNAMES."""

_CONTROL_S = 5.0


def hold(listen: Sequence[str], control: str, ready: Callable[[Sequence[str]], None]) -> int:
    """Hold sockets on the addresses until SIGTERM or SIGINT; `ready` is told their names. Returns the exit status.

    control  `unix:PATH`, made for this user alone
    Raises   ConfigError: an address is none; ZlError: it cannot be listened on
    """
    if not 1 <= len(listen) <= MOST_SOCKETS - 1:
        raise ConfigError(f"--listen: give from 1 to {MOST_SOCKETS - 1} addresses, not {len(listen)}")
    control_at = _control(control)
    bounds = bind_all([parse_address(text, port_zero=True) for text in listen])
    masked = os.umask(0o177)
    try:
        door = bind_all([control_at])[0]
    except BaseException:
        _close(bounds)
        raise
    finally:
        os.umask(masked)

    def end(*_: object) -> NoReturn:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ready([bound.name for bound in bounds])
        _serve(door.sock, bounds)
    except SystemExit:
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _close([*bounds, door])


def join(control: str, own: str, command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become `command` with the held sockets and, if there is one, a socket on the address `own`.

    Raises  ConfigError: an address is none; ZlError: no holder answers, an address is taken, or no such command
    """
    taken = receive(control)
    if own:
        # Left open by the process that execs; the file is removed by the next one that finds it unanswered.
        taken.append(bind_all([parse_address(own)])[0].sock)
    names = [SHARED] * (len(taken) - bool(own)) + [OWN] * bool(own)
    _place([sock.detach() for sock in taken])
    passed = {
        "LISTEN_FDS": str(len(names)),
        "LISTEN_FDNAMES": ":".join(names),
        "LISTEN_PID": str(os.getpid()),
    }
    try:
        os.execvpe(command[0], list(command), {**environ, **passed})
    except OSError as error:
        raise ZlError(f"{command[0]}: cannot be run ({error.strerror})") from None


def receive(control: str) -> list[socket.socket]:
    """Get the held sockets from the holder at `unix:PATH`.

    Raises  ZlError: no holder answers there
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONTROL_S)
        try:
            sock.connect(_control(control).path)
            said, fds, _, _ = socket.recv_fds(sock, 4_096, MOST_SOCKETS)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ZlError(f"{control}: no holder answers ({reason}); start one: zl hold --help") from None
    if not fds or json.loads(said or b"0") != len(fds):
        for fd in fds:
            os.close(fd)
        raise ZlError(f"{control}: what answers there is no holder of sockets")
    return [socket.socket(fileno=fd) for fd in fds]


def _serve(door: socket.socket, bounds: Sequence[Bound]) -> NoReturn:
    door.setblocking(True)
    while True:
        peer, _ = door.accept()
        with peer, contextlib.suppress(OSError):  # a peer that has left again
            peer.settimeout(_CONTROL_S)
            socket.send_fds(peer, [json.dumps(len(bounds)).encode()], [bound.sock.fileno() for bound in bounds])


def _place(fds: list[int]) -> None:
    """Move descriptors to 3, 4, 5 … in order, inherited across exec."""
    # First out of the way of the places, then into them: dup2 onto one that is still to be moved would close it.
    high = [_above(fd, FIRST_SYSTEMD_FD + len(fds)) for fd in fds]
    for place, fd in enumerate(high, FIRST_SYSTEMD_FD):
        os.dup2(fd, place, inheritable=True)
        os.close(fd)


def _above(fd: int, lowest: int) -> int:
    import fcntl

    moved: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return moved


def _control(text: str) -> UnixAddress:
    address = parse_address(text)
    if not isinstance(address, UnixAddress):
        raise ConfigError(f"--control: {text} must be unix:PATH; descriptors pass through Unix sockets only")
    return address


def _close(bounds: Sequence[Bound]) -> None:
    for bound in bounds:
        unbind(bound)


def announce(names: Sequence[str], control: str) -> None:
    """Print the one line that says that the sockets are there."""
    Teller()(f"zl: holding {' and '.join(names)} for {control}")
