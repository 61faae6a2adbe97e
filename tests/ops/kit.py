"""What the tests of this folder share: a service manager's ear, and a server process that talks to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import zl

READY_S = 120
ROOT = Path(zl.__file__).parent.parent


class Message(NamedTuple):
    at: float
    fields: dict[str, str]


class Manager:
    """A real datagram socket that collects what a service says; `address` is its NOTIFY_SOCKET."""

    def __init__(self, path: str):
        self.address = path
        self.messages: list[Message] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + path[1:] if path.startswith("@") else path)
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        while True:
            try:
                data = self._sock.recv(4096)
            except OSError:
                return
            if not data:
                return
            fields = dict(line.split("=", 1) for line in data.decode().split("\n"))
            self.messages.append(Message(time.monotonic(), fields))

    def said(self, name: str, since: float = 0.0) -> list[Message]:
        return [message for message in list(self.messages) if name in message.fields and message.at >= since]

    def wait_for(
        self, name: str, *, since: float = 0.0, seconds: float = READY_S, alive: subprocess.Popen | None = None
    ) -> Message:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := self.said(name, since):
                return found[0]
            if alive is not None and alive.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"no {name}; heard {[message.fields for message in self.messages]}")

    def order(self) -> list[str]:
        """The milestones in the order in which they were heard, equal neighbours once."""
        names = ("READY", "RELOADING", "STOPPING", "WATCHDOG", "STATUS")
        heard = [next(name for name in names if name in message.fields) for message in self.messages]
        return [name for i, name in enumerate(heard) if not i or heard[i - 1] != name]

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join()


class Service:
    """`zl serve` as a service manager starts it: NOTIFY_SOCKET, a watchdog, a log that is kept."""

    def __init__(self, folder: Path, *flags: str, script: str | None = None, instead: list[str] | None = None,
                 pass_fds: tuple[int, ...] = (), **environ: str):  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log"
        self.manager = Manager(f"@zl-{os.getpid()}-{folder.name}-{time.monotonic_ns()}")
        command = instead or [*([sys.executable, script] if script else [sys.executable, "-m", "zl"]), "serve", *flags]
        env = {"NOTIFY_SOCKET": self.manager.address, "WATCHDOG_USEC": "2000000", "PYTHONPATH": str(ROOT),
               "ZL_METRICS": "off"}  # fmt: skip
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, pass_fds=pass_fds, env=os.environ | env | environ
            )

    def ready(self) -> Service:
        try:
            self.manager.wait_for("READY", alive=self.process)
        except AssertionError as failure:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{failure}\n{self.text()}") from None
        return self

    def text(self) -> str:
        return self.log.read_text()

    def wait_log(self, words: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text():
            assert time.monotonic() < deadline, f"{words!r} is not in the log:\n{self.text()}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> float:
        at = time.monotonic()
        self.process.send_signal(number)
        return at

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(timeout=seconds)

    def reload(self) -> None:
        """Send HUP and wait until the server says that it is done."""
        since = self.send(signal.SIGHUP)
        self.manager.wait_for("RELOADING", since=since, seconds=20)
        self.manager.wait_for("READY", since=since, seconds=20)

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop:\n{self.text()}") from None
        finally:
            self.manager.close()



def pings(address: tuple[str, int] | str, sock: socket.socket | None = None, seconds: float = 1.0) -> bool:
    """Say whether a ping is answered: on a new connection, or on one that is there."""
    fresh = sock is None
    if sock is None:
        sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        sock.settimeout(seconds)
        sock.connect(address)
    try:
        sock.settimeout(seconds)
        sock.sendall(bytes(4))
        return sock.recv(4) == bytes(4)
    except OSError:
        return False
    finally:
        if fresh:
            sock.close()
