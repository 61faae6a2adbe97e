"""Read the file that says which instances stand behind one address, and how traffic is moved between them.

Owns no state. Refuses torch, numpy and asyncio; docs/scaling.md describes the file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zl.address import parse_address, parse_target
from zl.errors import ConfigError

DEFAULT_FILE = "/etc/zl/switch.toml"
KINDS = ("shared", "haproxy", "command")


@dataclass(frozen=True)
class Instance:
    """One server.

    address  its own, at which it is pinged; not the shared one
    ready    an http URL that answers 200 when it is ready, or ""
    unit     its systemd unit without suffix, or "" where `start` and `stop` are commands that return when that is done
    server   its name in HAProxy's backend
    ca_file  where its address is a tls: one, PEM file of the authorities to believe; "": `ZL_CA`, else the system's
    """

    name: str
    address: str
    ready: str = ""
    unit: str = ""
    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    server: str = ""
    ca_file: str = ""

    @property
    def start_command(self) -> tuple[str, ...]:
        """What starts it."""
        return ("systemctl", "start", f"{self.unit}.service") if self.unit else self.start

    @property
    def stop_command(self) -> tuple[str, ...]:
        """What drains and stops it. Its own socket goes too: a ping would start the service again."""
        return ("systemctl", "stop", f"{self.unit}.socket", f"{self.unit}.service") if self.unit else self.stop


@dataclass(frozen=True)
class Fleet:
    """The instances and the way between them. Periods in seconds.

    traffic   "shared": all accept from one listening socket; "haproxy": by its runtime sockets; "command": `move`
    start_s   how long an instance may take to be ready, and the start command to return
    steady_s  how long it must then stay so before the others are drained
    drain_s   how long the stop command may take: longer than the server's own drain_s
    canary    ask the new instance for a token before traffic is moved
    enable    with units: enable the one that serves and disable the others, for the next boot
    """

    instances: tuple[Instance, ...]
    traffic: str = "shared"
    start_s: float = 180.0
    steady_s: float = 2.0
    drain_s: float = 120.0
    canary: bool = True
    enable: bool = True
    auth_token_file: str = ""
    move: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    backend: str = "zl"
    path: str = field(default="", compare=False)

    def named(self, name: str) -> Instance:
        """Give the instance of that name.

        Raises  ConfigError: there is none
        """
        for each in self.instances:
            if each.name == name:
                return each
        names = [each.name for each in self.instances]
        raise ConfigError(f"{self.path}: no instance {name!r}{_close(name, names)}; there are {', '.join(names)}")


def load(path: str | Path, ca_file: str = "") -> Fleet:
    """Read and check the file; `ca_file` is for the instances that name none.

    Raises  ConfigError: file, table, key and what it must be
    """
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}; docs/scaling.md shows one") from error
    known = {"switch", "haproxy", "instances"}
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise ConfigError(f"{path}: unknown table {name!r}{_close(name, known)}")
    found = tables.get("instances", {})
    if len(found) < 2:
        raise ConfigError(f"{path}: give at least two tables such as [instances.blue]")
    made = tuple(_instance(str(path), name, table, ca_file) for name, table in found.items())
    common = _table(str(path), "switch", tables.get("switch", {}), _SWITCH)
    proxy = _table(str(path), "haproxy", tables.get("haproxy", {}), _HAPROXY)
    fleet = Fleet(made, path=str(path), **common, **proxy)
    _check(fleet)
    return fleet


def _instance(path: str, name: str, table: object, ca_file: str) -> Instance:
    where = f"instances.{name}"
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [{where}] must be a table")
    values = _table(path, where, table, _INSTANCE)
    if "address" not in values:
        raise ConfigError(f"{path}: [{where}] needs address, where this instance alone is pinged")
    values["address"] = str(parse_target(values["address"]))
    if "unit" in values:
        values["unit"] = values["unit"].removesuffix(".service")
    made = Instance(name, **{"server": name, "ca_file": ca_file} | values)
    if bool(made.unit) == bool(made.start or made.stop) or bool(made.start) != bool(made.stop):
        raise ConfigError(f"{path}: [{where}] needs either unit, or both start and stop")
    if made.ready and not made.ready.startswith("http://"):
        raise ConfigError(f"{path}: [{where}] ready = {made.ready!r}: must be a URL such as http://127.0.0.1:9433/readyz")
    return made


def _check(fleet: Fleet) -> None:
    if fleet.traffic not in KINDS:
        raise ConfigError(f"{fleet.path}: [switch] traffic = {fleet.traffic!r}: must be one of {', '.join(KINDS)}")
    if fleet.traffic == "haproxy" and not fleet.sockets:
        raise ConfigError(f"{fleet.path}: [haproxy] needs sockets, such as [\"unix:/run/haproxy/admin.sock\"]")
    if (fleet.traffic == "command") != bool(fleet.move):
        raise ConfigError(f"{fleet.path}: [switch] move is needed with traffic = \"command\", and only there")
    for text in fleet.sockets:
        parse_address(text)
    for what in ("address", "unit", "server"):
        values = [getattr(each, what) for each in fleet.instances if getattr(each, what)]
        if len(set(values)) < len(values):
            raise ConfigError(f"{fleet.path}: two instances have the same {what}: {', '.join(values)}")


_SWITCH: Mapping[str, type] = {
    "traffic": str, "start_s": float, "steady_s": float, "drain_s": float, "canary": bool, "enable": bool,
    "auth_token_file": str, "move": tuple,
}  # fmt: skip
_HAPROXY: Mapping[str, type] = {"sockets": tuple, "backend": str}
_INSTANCE: Mapping[str, type] = {
    "address": str, "ready": str, "unit": str, "start": tuple, "stop": tuple, "server": str,
    "ca_file": str,
}  # fmt: skip
_WORDS = {str: "a text", float: "seconds, above 0", bool: "true or false", tuple: "a list of texts"}


def _table(path: str, where: str, table: Mapping[str, object], kinds: Mapping[str, type]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{path}: unknown key {key!r} in [{where}]{_close(key, kinds)}")
        values[key] = _value(value, kinds[key])
        if values[key] is None:
            raise ConfigError(f"{path}: [{where}] {key} = {value!r}: must be {_WORDS[kinds[key]]}")
    return values


def _value(value: object, kind: type) -> Any:
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        return float(value) if number else None  # type: ignore[arg-type]
    if kind is tuple:
        texts = isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
        return tuple(value) if texts else None  # type: ignore[arg-type]
    return value if isinstance(value, kind) else None


def _close(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)  # type: ignore[call-overload]
    return f": did you mean {close[0]!r}?" if close else ""
