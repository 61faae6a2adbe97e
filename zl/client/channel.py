"""A blocking connection to a server: whole sends, reads that end in time; the same over TCP, Unix sockets and TLS.

State: of each `Channel`, its socket, the TLS on it and what waits to be sent. One thread may receive while any number
send. The one place where blocking clients open sockets. Refuses asyncio; ssl comes with the first tls: address.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from zl.address import Target, TcpAddress, TlsAddress, UnixAddress
from zl.client import endpoints
from zl.client.endpoints import ASK_TLS_S, is_tls, judged, needs_tls
from zl.client.trust import Trust

if TYPE_CHECKING:
    from zl.client.tls import Tls

_RECV_BYTES = 1 << 16
_MAX_WAITING_BYTES = 1 << 20
_LONGEST_S = 1_000_000.0
"""The longest single wait: poll counts milliseconds in an int, which ends after 24 days."""


class Channel:
    """A connection; made by `open_channel`.

    early  what had come with the end of the TLS handshake, as a receiver is to see it
    """

    def __init__(self, sock: socket.socket, address: Target, tls: Tls | None = None, early: bytes = b""):
        self.address = address
        self._socket = sock
        self._tls = tls
        self._early = early
        self._waiting: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._sender = 0  # the thread that has it
        self._queued: set[int] = set()  # threads that wait for it
        self._broken: OSError | None = None
        self._heard = self._sent_all = False
        self._n_sent = 0

    def receive(self, timeout: float) -> bytes | None:
        """Wait at most `timeout` seconds for bytes; b"" at the end, None where none came, or no whole TLS record.

        Raises  TlsFailed: the address is a tcp: one, and the server answers in TLS; OSError: the connection broke
        """
        data = self._receive(timeout)
        if data and not self._heard:
            self._heard = True
            if isinstance(self.address, TcpAddress) and is_tls(data):
                raise needs_tls(self.address)
        return data

    def ask_for_tls(self, seconds: float) -> None:
        """Where the server ended a tcp: connection without a word, ask it over another one whether it speaks TLS.

        zl's closes without a word on what is no TLS, as one that is being stopped may.
        seconds  how long it may take to show it, at most `ASK_TLS_S`
        Raises   TlsFailed: it does
        """
        address, seconds = self.address, min(seconds, ASK_TLS_S)
        if self._heard or not isinstance(address, TcpAddress) or not judged(self._n_sent, self._sent_all):
            return
        if seconds > 0 and _speaks_tls(address, seconds):
            raise needs_tls(address)

    def _receive(self, timeout: float) -> bytes | None:
        if self._early:
            early, self._early = self._early, b""
            return early
        if self._tls is not None:
            self._tls.check()
            if self._tls.ended:
                return b""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not poll.poll(math.ceil(max(0.0, min(timeout, _LONGEST_S)) * 1000)):
            timeout -= _LONGEST_S
            if timeout <= 0:
                return None
        raw = self._socket.recv(_RECV_BYTES)
        if self._tls is None:
            return raw
        # All that can be decrypted is taken at once: nothing stays behind where `poll` does not see it.
        data = self._tls.decrypt(raw)
        return data if data or not raw or self._tls.ended else None

    def send(self, data: bytes, *, wait: bool = True) -> None:
        """Send bytes whole, after all that was to be sent before. Where another thread is sending, it sends these too.

        wait    where more than 1 MiB is to be sent already, wait until another thread has sent or this one may; without
                it no lock is waited for: a Stream's __del__, which may come anywhere, sends as well
        Raises  OSError: the connection broke, or the server has not read for too long. The thread that was sending gets
                it, and those that waited for it; one whose bytes were left to it, and are lost, with its next `send`
        """
        self._waiting.append(data)
        done = False
        while self._waiting:
            if not self._sending.acquire(blocking=False):
                if not wait or self._sender == threading.get_ident() or not self._is_full():
                    return
                self._wait_for_turn()
                done = True
            try:
                self._sender = threading.get_ident()
                done = self._send_waiting(data, done)
            finally:
                self._sender = 0
                self._sending.release()
            # Looked at after the release, so that one who gives up waiting is either not seen here or finds it free.
            if done and self._queued:
                return

    def _is_full(self) -> bool:
        # The copy is made without giving the GIL up: other threads may append at any time.
        return sum(map(len, self._waiting.copy())) > _MAX_WAITING_BYTES

    def _wait_for_turn(self) -> None:
        me = threading.get_ident()
        self._queued.add(me)
        try:
            self._sending.acquire()
        except BaseException:
            self._queued.discard(me)
            with contextlib.suppress(OSError):
                self.send(b"", wait=False)  # the turn may just have been left to us
            raise
        self._queued.discard(me)

    def _send_waiting(self, data: bytes, done: bool) -> bool:
        """Send what waits, or once `data` is out or `done`, until another thread wants to; say whether it is out."""
        if self._broken is not None:
            raise self._broken.with_traceback(None)  # else the traceback grows with each
        try:
            while self._waiting:
                chunk = self._waiting.popleft()
                self._n_sent += len(chunk)
                self._socket.sendall(chunk if self._tls is None else self._tls.encrypt(chunk))  # wire
                done = done or chunk is data
                if done and self._queued:
                    break
        except BaseException as error:  # a frame may have been cut short: nothing can follow it
            self._broken = error if isinstance(error, OSError) else OSError("a send was interrupted")
            self._waiting.clear()
            raise
        return done

    def end_sending(self) -> None:
        """Say that nothing more will be sent."""
        self._sent_all = True
        self._farewell()
        self._socket.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """End the connection; a thread that receives wakes. `close` must follow, once it has."""
        self._farewell()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket up."""
        self._socket.close()

    def _farewell(self) -> None:
        # Where a thread is stuck in the middle of a record there is no saying goodbye, and no waiting for it either.
        if self._tls is not None and self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    # A socket with a timeout would wait that long for room.
                    if self._broken is None and _has_room(self._socket):
                        self._socket.send(self._tls.end(), socket.MSG_DONTWAIT)
            finally:
                self._sending.release()


def _has_room(sock: socket.socket) -> bool:
    if sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))


def open_channel(text: str | None, timeout: float, trust: Trust) -> Channel:
    """Connect to an address, or to the default ones for None.

    timeout  seconds for each address that is tried, a TLS handshake included; later also how long the server may take
             nothing off us
    Raises   ConnectionFailed, TlsFailed; ConfigError: the text is no address, or the CA file cannot be used
    """
    addresses = endpoints.candidates(text)
    limit = None if math.isinf(timeout) else min(timeout, _LONGEST_S)
    last = OSError("nothing to try")
    for address in addresses:
        try:
            if isinstance(address, TlsAddress):
                return _open_tls(address, limit, trust)
            return Channel(open_socket(address, limit), address)
        except OSError as error:
            last = error
    raise endpoints.failure(addresses, last, trust.ca_file) from last


def open_socket(address: Target, timeout: float | None) -> socket.socket:
    """Connect a socket; `timeout` in seconds, None waits for ever, stays on it. OSError: nobody answers."""
    if not isinstance(address, UnixAddress):
        sock = socket.create_connection((address.host, address.port), timeout)
        # A request is one small write: waiting for more to send with it would only delay it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        sock.connect(address.path)
    except BaseException:
        sock.close()
        raise
    return sock


def _open_tls(address: TlsAddress, timeout: float | None, trust: Trust) -> Channel:
    from zl.client.tls import Tls

    tls = Tls(trust.context(), address.host)
    end = None if timeout is None else time.monotonic() + timeout
    sock = open_socket(address, timeout)
    try:
        early = _shake_hands(sock, tls, end)
        sock.settimeout(timeout)
    except BaseException:
        sock.close()
        raise
    return Channel(sock, address, tls, early)


def _speaks_tls(address: TcpAddress, seconds: float) -> bool:
    from zl.client.tls import client_hello

    end = time.monotonic() + seconds
    try:
        with open_socket(address, seconds) as sock:
            sock.sendall(client_hello(address.host))  # wire
            sock.settimeout(max(0.001, end - time.monotonic()))
            return is_tls(sock.recv(_RECV_BYTES))
    except OSError:
        return False


def _shake_hands(sock: socket.socket, tls: Tls, end: float | None) -> bytes:
    """Do the handshake; return what the server has said beyond it."""
    data, done = b"", False
    while True:
        if end is not None:
            sock.settimeout(max(0.001, end - time.monotonic()))
        try:
            done = tls.handshake(data)
        except OSError:
            with contextlib.suppress(OSError):
                sock.sendall(tls.outgoing())  # wire (the alert, which tells the server why)
            raise
        sock.sendall(tls.outgoing())  # wire
        if done:
            return tls.decrypt(b"")
        data = sock.recv(_RECV_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        if end is not None and time.monotonic() > end:
            raise TimeoutError
