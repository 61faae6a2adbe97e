"""Open the sockets that peers connect to: TCP, Unix, TLS on TCP, and sockets handed over by systemd.

State: the servers of one `Listeners`. Every failure is one line that names the address and what to do. Refuses gpu and
dispatch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zl.address import Address, TcpAddress, UnixAddress
from zl.errors import ConfigError, ZlError
from zl.ports import resolve

BACKLOG = 4_096
"""Connections that may wait to be accepted; the kernel cuts it to net.core.somaxconn, 4096 since Linux 5.4."""

FIRST_SYSTEMD_FD = 3  # SD_LISTEN_FDS_START, sd_listen_fds(3)


@dataclass(frozen=True, slots=True)
class Bound:
    """A listening socket.

    owned_path  the Unix socket file that we made and remove again, if it still is that file: `inode`
    held        somebody else has it too, and keeps it when we are gone
    """

    sock: socket.socket
    name: str
    owned_path: str = ""
    inode: int = 0
    held: bool = False

    @property
    def ip(self) -> str:
        """The IP address that it is bound to; "" for a Unix socket."""
        tcp = self.sock.family in (socket.AF_INET, socket.AF_INET6)
        return str(self.sock.getsockname()[0]) if tcp else ""


def bind(address: Address) -> Bound:
    """Bind one address and listen on it.

    Raises  ConfigError: the host does not exist, the path or port is not this user's to take
            ZlError: in use, an address that this machine does not have (yet), refused for another reason
    """
    return _bind_tcp(address) if isinstance(address, TcpAddress) else _bind_unix(address)


def bind_all(addresses: Iterable[Address]) -> list[Bound]:
    """Bind several addresses, or none: when one fails, those before it are closed. Raises as `bind` does."""
    bounds: list[Bound] = []
    try:
        for address in addresses:
            bounds.append(bind(address))
    except BaseException:
        for bound in bounds:
            unbind(bound)
        raise
    return bounds


def unbind(bound: Bound) -> None:
    """Close a listening socket and remove the file that we made for it, if it still is that file."""
    bound.sock.close()
    _remove_file(bound)


def _remove_file(bound: Bound) -> None:
    if bound.owned_path:
        with contextlib.suppress(OSError):
            if os.lstat(bound.owned_path).st_ino == bound.inode:
                os.unlink(bound.owned_path)


def systemd_sockets(environ: Mapping[str, str], pid: int) -> list[Bound]:
    """Take over the sockets that systemd passes, sd_listen_fds(3); none where they are not meant for this process.

    environ  LISTEN_PID, LISTEN_FDS and, for the names, LISTEN_FDNAMES
    Raises   ConfigError: the variables or the descriptors make no sense
    """
    if not environ.get("LISTEN_FDS") or environ.get("LISTEN_PID") != str(pid):
        return []
    count = environ["LISTEN_FDS"]
    if not (count.isascii() and count.isdigit()):
        raise ConfigError(f"LISTEN_FDS={count!r} is no number: start zl from a systemd socket unit, or unset it")
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    bounds: list[Bound] = []
    for i in range(int(count)):
        fd = FIRST_SYSTEMD_FD + i
        name = names[i] if i < len(names) and names[i] not in ("", "unknown") else f"fd {fd}"
        try:
            sock = socket.socket(fileno=fd)
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ConfigError(f"systemd socket {name}: descriptor {fd} is no socket ({error.strerror})") from None
        if not listening or sock.type != socket.SOCK_STREAM:
            sock.detach()
            raise ConfigError(f"systemd socket {name}: not a listening stream; use ListenStream= and Accept=no")
        os.set_inheritable(fd, False)
        sock.setblocking(False)
        _no_delay(sock)
        bounds.append(Bound(sock, f"systemd:{name} ({_address_of(sock)})", held=True))
    return bounds


class Listeners:
    """The servers that accept peers; made by `listen`."""

    def __init__(self, servers: list[asyncio.AbstractServer], bounds: list[Bound], tls: bool = False):
        self._servers = servers
        self._bounds = list(bounds)
        self._tls = tls

    @property
    def names(self) -> list[str]:
        """Name the addresses as clients do, with the ports that the system picked where 0 was asked for."""
        return [
            bound.name.replace("tcp:", "tls:", 1) if self._tls and bound.sock.family != socket.AF_UNIX else bound.name
            for bound in self._bounds
        ]

    async def finish(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Accept those whom the kernel has connected already, and no more: else it would reset them.

        seconds  at most
        hurry    says whether to come to the end at once

        Who waits at a socket that others hold stays there, for the next server.
        """
        loop = asyncio.get_running_loop()
        poll = select.poll()
        for server, bound in zip(self._servers, self._bounds, strict=True):
            if bound.held:
                server.close()
            else:
                _remove_file(bound)  # nobody new finds it
                poll.register(bound.sock, select.POLLIN)
        until = loop.time() + seconds
        while poll.poll(0) and loop.time() < until and not hurry():
            await asyncio.sleep(0)  # a turn of the loop may accept no more than one
        await asyncio.sleep(0.005)  # and what it has accepted becomes a connection some turns later
        self.close()

    def close(self) -> None:
        """Accept no more; connections that exist live on."""
        for server in self._servers:
            server.close()
        for bound in self._bounds:
            unbind(bound)
        self._servers.clear()
        self._bounds.clear()


async def listen(
    bounds: list[Bound],
    factory: Callable[[], asyncio.BaseProtocol],
    *,
    tls: ssl.SSLContext | None = None,
) -> Listeners:
    """Accept peers on bound sockets; `tls` is for all but Unix sockets, whose peers are on this machine."""
    loop = asyncio.get_running_loop()
    servers: list[asyncio.AbstractServer] = []
    for bound in bounds:
        if bound.sock.family == socket.AF_UNIX:
            # The file is removed by `unbind` alone, which knows whether it is ours; since 3.13 loops would do it too.
            keep: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
            server = await loop.create_unix_server(factory, sock=bound.sock, backlog=BACKLOG, **keep)
        else:
            server = await loop.create_server(factory, sock=bound.sock, backlog=BACKLOG, ssl=tls)
        servers.append(server)
    return Listeners(servers, bounds, tls is not None)


def _address_of(sock: socket.socket) -> str:
    """Name where a socket listens; several of one unit carry the same name."""
    where = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        path = os.fsdecode(where)
        return "unix:" + path.replace("\0", "@", 1)
    return str(TcpAddress(where[0], where[1]))


def _bind_tcp(address: TcpAddress) -> Bound:
    try:
        family, kind, proto, _, where = resolve(address.host, address.port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{address}: host {address.host!r} is not known here ({error}); 0.0.0.0 or [::] means every interface"
        ) from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # [::] and 0.0.0.0 can stand side by side
        _no_delay(sock)
        sock.setblocking(False)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_listen(address, error) from None
    return Bound(sock, str(TcpAddress(address.host, sock.getsockname()[1])))


def _bind_unix(address: UnixAddress) -> Bound:
    _remove_stale(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(address.path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_listen(address, error) from None
    return Bound(sock, str(address), address.path, os.lstat(address.path).st_ino)


def _remove_stale(address: UnixAddress) -> None:
    """Remove a socket file that a server left behind; one that is answered, or no socket, stays."""
    try:
        mode = os.lstat(address.path).st_mode
    except OSError:
        return  # nothing there, or bind will say what is wrong
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{address}: there is a file in the way that is no socket; remove it or take another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog answers EAGAIN at once instead of keeping us
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.unlink(address.path)
                except PermissionError as error:
                    raise _cannot_listen(address, error) from None
            return
        except BlockingIOError:
            pass
        except OSError as error:
            raise _cannot_listen(address, error) from None
    raise _cannot_listen(address, OSError(errno.EADDRINUSE, "answered"))


def _cannot_listen(address: Address, error: OSError) -> ZlError:
    """Say why; a port in use may be free at the next start, and a network that is not up yet may be up then."""
    tcp = isinstance(address, TcpAddress)
    if error.errno == errno.EADDRINUSE:
        what = "port" if tcp else "path"
        return ZlError(
            f"{address}: already in use; stop the server that has it (zl doctor names it), or take another {what} "
            f"with --listen {'tcp:HOST:PORT' if tcp else 'unix:PATH'}"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = "ports below 1024 need a privilege, take a higher one" if tcp else "take a path you may write to"
        return ConfigError(f"{address}: permission denied; {remedy}")
    if error.errno == errno.EADDRNOTAVAIL:
        return ZlError(f"{address}: this machine has no such address; 127.0.0.1 is local, 0.0.0.0 every interface")
    if error.errno == errno.ENOENT and not tcp:
        return ConfigError(f"{address}: its folder does not exist; make it, or take another path")
    return ZlError(f"{address}: cannot listen: {error.strerror or error}")


def _no_delay(sock: socket.socket) -> None:
    # Accepted sockets inherit it on Linux. A small frame must not wait for the acknowledgement of the one before.
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
