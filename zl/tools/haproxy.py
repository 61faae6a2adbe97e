"""Talk to HAProxy's runtime socket: set a server's state, ask for it.

Owns no state: each command is a connection of its own, as the socket's plain mode wants it. Refuses torch and asyncio.
Commands and columns: HAProxy management guide, section 9.3, "set server" and "show servers state".
"""

from __future__ import annotations

import time
from typing import NamedTuple

from zl.address import parse_address
from zl.client.channel import open_socket
from zl.errors import ZlError

ANSWER_S = 5.0
STATES = ("ready", "drain", "maint")

_STOPPED, _STARTING, _RUNNING = 0, 1, 2  # srv_op_state; 3 is stopping, softly
_FORCED_OR_INHERITED_DRAIN, _MAINT = 0x18, 0x23  # srv_admin_state: FDRAIN, IDRAIN; FMAINT, IMAINT, RMAINT


class ServerState(NamedTuple):
    """What HAProxy thinks of a server: `up` by its own checks, and whether it was told to send nothing new there."""

    up: bool
    draining: bool
    maintenance: bool

    @property
    def takes_traffic(self) -> bool:
        """Say whether new connections may go there."""
        return self.up and not self.draining and not self.maintenance


class Runtime:
    """One HAProxy process's runtime socket, at `unix:PATH` or `tcp:HOST:PORT`."""

    def __init__(self, address: str):
        self.address = address

    def command(self, text: str) -> str:
        """Send one command and return the answer.

        Raises  ZlError: nobody answers
        """
        try:
            end = time.monotonic() + ANSWER_S
            with open_socket(parse_address(self.address), ANSWER_S) as sock:
                sock.sendall(f"{text}\n".encode())  # wire
                parts = []
                while part := sock.recv(65_536):
                    parts.append(part)
                    sock.settimeout(max(0.001, end - time.monotonic()))
        except OSError as error:
            raise ZlError(f"HAProxy's runtime socket {self.address}: {error.strerror or error}") from error
        return b"".join(parts).decode("utf-8", "replace").strip()

    def set_state(self, backend: str, server: str, state: str) -> None:
        """Set a server `ready`, to `drain`, or in `maint`.

        Raises  ZlError: no such backend or server, or the socket's level is below admin
        """
        said = self.command(f"set server {backend}/{server} state {state}")
        if said:  # silence means that it was done
            raise ZlError(f"HAProxy at {self.address} refuses {backend}/{server} state {state}: {said}")

    def state(self, backend: str, server: str) -> ServerState:
        """Ask for a server's state. Raises as `set_state` does."""
        said = self.command(f"show servers state {backend}")
        lines = said.splitlines()
        if len(lines) < 2 or not lines[1].startswith("# "):
            raise ZlError(f"HAProxy at {self.address} knows no backend {backend}: {said}")
        columns = lines[1][2:].split()
        for line in lines[2:]:
            row = dict(zip(columns, line.split(), strict=False))
            if row.get("srv_name") == server:
                admin = int(row["srv_admin_state"])
                return ServerState(
                    up=int(row["srv_op_state"]) in (_STARTING, _RUNNING),
                    draining=bool(admin & _FORCED_OR_INHERITED_DRAIN),
                    maintenance=bool(admin & _MAINT),
                )
        raise ZlError(f"HAProxy at {self.address} has no server {server} in backend {backend}")
