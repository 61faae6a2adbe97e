"""Words to the service manager: the protocol of sd_notify(3), one datagram a message, by the standard library alone.

State: where the datagrams go, and whether a failure has been reported. A server without a manager, and one
whose manager does not listen, runs on. Refuses torch, asyncio and everything of zl.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("zl")

SEND_S = 2.0
"""How long a message that must arrive may wait for a manager that is slow to read."""


class Notifier:
    """Tell the service manager where the server is in its life.

    environ  NOTIFY_SOCKET: a path, or @name of an abstract socket; WATCHDOG_USEC and WATCHDOG_PID
    pid      of this process: WATCHDOG_* meant for another are ignored
    """

    def __init__(self, environ: Mapping[str, str], pid: int, *, monotonic: Callable[[], float] | None = None):
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._monotonic = monotonic or (lambda: time.clock_gettime(time.CLOCK_MONOTONIC))
        self._complained = False
        self.watchdog_s = _watchdog_s(environ, pid) if self._address else 0.0

    @property
    def listening(self) -> bool:
        """Say whether there is a service manager to talk to."""
        return bool(self._address)

    def status(self, text: str, *, extend_s: float = 0.0) -> None:
        """Say in one line what goes on; `extend_s`: the start or stop may take that much longer from now on."""
        self._send(f"STATUS={_line(text)}", _extension(extend_s))

    def ready(self, text: str) -> None:
        """Say that requests are answered."""
        self._send("READY=1", f"STATUS={_line(text)}")

    def reloading(self) -> None:
        """Say that the configuration is being read again; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={int(self._monotonic() * 1e6)}", "STATUS=reading the configuration")

    def stopping(self, text: str, *, extend_s: float = 0.0) -> None:
        """Say that the end has begun and may take `extend_s`."""
        self._send("STOPPING=1", f"STATUS={_line(text)}", _extension(extend_s))

    def watchdog(self) -> None:
        """Say that the server makes progress. Never waits: a manager too busy to read hears of the next one."""
        self._send("WATCHDOG=1", wait=False)

    def _send(self, *lines: str, wait: bool = True) -> None:
        if not self._address:
            return
        message = "\n".join(line for line in lines if line).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(SEND_S if wait else 0.0)
                sock.sendto(message, self._address)
        except (BlockingIOError, TimeoutError):
            if wait:
                self._complain(f"it did not read within {SEND_S:g} s")
        except OSError as error:
            self._complain(error.strerror or str(error))

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("the service manager at NOTIFY_SOCKET cannot be told: %s", why)


def _address(text: str) -> str | bytes:
    """Return what sendto takes: a path, or the name of an abstract socket with its leading zero byte."""
    if text.startswith("@"):
        return b"\0" + os.fsencode(text[1:])
    if text and not text.startswith("/"):
        log.warning("NOTIFY_SOCKET=%r is not used: only /PATH and @NAME are known here", text)
        return ""
    return text


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """Return the period in which the manager wants to hear of progress, 0 for none (sd_watchdog_enabled(3))."""
    text = environ.get("WATCHDOG_USEC", "")
    if not text or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return 0.0
    if not (text.isascii() and text.isdigit() and int(text)):
        log.warning("WATCHDOG_USEC=%r is not used: it must be a number of microseconds", text)
        return 0.0
    return int(text) / 1e6


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}" if seconds else ""


def _line(text: str) -> str:
    return " ".join(text.split())
