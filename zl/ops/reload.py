"""Reading the configuration again while the server runs: what takes effect, what needs a restart, what is wrong.

State: the settings in force. A configuration that cannot be used changes nothing. Refuses torch, asyncio and whatever
serves: how a setting takes effect comes in by constructor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from zl.config import SETTINGS, Settings
from zl.errors import ZlError
from zl.ops.logs import event

log = logging.getLogger("zl")

LIVE = frozenset({
    "auth_token", "auth_token_file", "tls_cert", "tls_key", "drain_s", "frame_timeout_s", "max_queue",
    "log_level", "log_format", "log_file",
})  # fmt: skip
"""The settings that a reload can change; all others are decided at start."""

FILES = ("log_file", "access_log", "audit_log")
"""The settings whose files whoever serves opens anew at each reload, changed or not: a rotator may have moved them."""

SECRET = frozenset({"auth_token"})


def changed(old: Settings, new: Settings) -> list[str]:
    """Name the settings that differ, in the order of `--help`."""
    return [each.name for each in SETTINGS if getattr(old, each.name) != getattr(new, each.name)]


def needs_restart(old: Settings, new: Settings) -> list[str]:
    """Name the settings that differ and that a reload cannot change."""
    names = [name for name in changed(old, new) if name not in LIVE]
    if bool(old.tls_cert) != bool(new.tls_cert):
        names.append("tls_cert")  # a listener speaks TLS or does not, from its first peer on
    return names


class Reloader:
    """Read the settings again and put those that may change into force.

    settings  in force now
    read      gives the settings as a start would find them now
    apply     apply(settings) puts the LIVE ones into force, all or none; raises ZlError where one cannot be used
    """

    def __init__(self, settings: Settings, read: Callable[[], Settings], apply: Callable[[Settings], None]):
        self.settings = settings
        self._read = read
        self._apply = apply

    def reload(self) -> bool:
        """Take what can be taken and log what was; False where the old configuration stays."""
        old = self.settings
        try:
            new = self._read()
            waiting = needs_restart(old, new)
            wanted = replace(old, **{name: getattr(new, name) for name in LIVE - set(waiting)})
            if "tls_cert" in waiting:
                wanted = replace(wanted, tls_cert=old.tls_cert, tls_key=old.tls_key)
            self._apply(wanted)
        except ZlError as error:
            event(log, logging.ERROR, f"reload refused, the old configuration stays: {error}")
            return False
        except Exception as failure:  # a fault of ours is no reason to leave the manager waiting
            log.error("reload failed, the old configuration stays", exc_info=failure)
            return False
        self.settings = wanted
        taken = changed(old, wanted)
        opened = [name for name in FILES if getattr(wanted, name) not in ("", "off")]
        event(log, logging.INFO, "reloaded", changed=",".join(taken) or "nothing", reopened=",".join(opened) or None)
        for name in waiting:
            event(log, logging.WARNING, f"{name} has changed and needs a restart", setting=name,
                  **_values(name, old, new))  # fmt: skip
        return True


def _values(name: str, old: Settings, new: Settings) -> dict[str, object]:
    if name in SECRET or _long((getattr(old, name), getattr(new, name))):
        return {}
    return {"running": _shown(getattr(old, name)), "configured": _shown(getattr(new, name))}


def _shown(value: object) -> object:
    return ",".join(value) if isinstance(value, tuple) else value


def _long(values: Iterable[object]) -> bool:
    """System prompts are texts that belong in no log."""
    return any(isinstance(value, tuple | str) and len(str(value)) > 200 for value in values)
