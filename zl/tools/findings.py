"""What `zl doctor` says: one line a finding. Owns no state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what is, and where that is not as it should be, what to do.

    level   OK; WARN: works, but slower or not as asked; FAIL: `zl serve` would not start
    """

    level: str
    topic: str
    text: str


def read(path: str | Path) -> str:
    """Return a small file of the kernel's without white space at its ends; "" where it cannot be read."""
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""
