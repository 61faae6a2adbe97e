"""`zl doctor` on the service manager: are zl's unit files installed, and what runs. Reads only. Owns no state."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from zl.tools.findings import OK, WARN, Finding

FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system")
"""Where systemd looks for units, in the order of systemd.unit(5)."""

UNITS = ("zl.service", "zl.socket", "zl@.service", "zl@.socket")


def examine(folders: Sequence[str] = FOLDERS, booted: str = "/run/systemd/system") -> Iterator[Finding]:
    """Say which units are installed, and what those that run are doing."""
    found = {unit: folder for unit in UNITS for folder in reversed(folders) if os.path.exists(f"{folder}/{unit}")}
    if not found:
        yield Finding(OK, "units", "not installed; docs/operations.md says how zl runs as a service")
        return
    lacking = [unit for unit in UNITS if unit not in found]
    places = ", ".join(f"{unit} in {folder}" for unit, folder in found.items())
    if lacking:
        yield Finding(WARN, "units", f"{places}; missing {', '.join(lacking)}: install all of systemd/")
    else:
        yield Finding(OK, "units", places)
    yield from _programs(found)
    if os.path.isdir(booted):
        yield _states()


def _programs(found: dict[str, str]) -> Iterator[Finding]:
    """Say where a unit starts a program that is not there."""
    for unit, folder in found.items():
        for line in Path(folder, unit).read_text("utf-8", "replace").splitlines():
            program = line.removeprefix("ExecStart=").split(" ")[0].lstrip("@-:+!")
            if line.startswith("ExecStart=") and not os.access(program, os.X_OK):
                yield Finding(WARN, "units", f"{unit} starts {program}, which is not there: install zl, or name the "
                                             f"right path with `systemctl edit {unit}`")  # fmt: skip


def _states() -> Finding:
    """Ask systemd what it knows of zl's units."""
    command = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", "zl.*", "zl@*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(WARN, "running", f"systemctl does not answer: {error}")
    states = [line.split() for line in done.stdout.splitlines() if len(line.split()) >= 4]
    if not states:
        return Finding(OK, "running", "no unit of zl is loaded; systemctl enable --now zl.socket starts it")
    text = ", ".join(f"{words[0]} {words[2]} ({words[3]})" for words in states)
    failed = [words[0] for words in states if words[2] == "failed"]
    if failed:
        return Finding(WARN, "running", f"{text}; journalctl -u {failed[0]} -e says why, then systemctl reset-failed")
    return Finding(OK, "running", text)
