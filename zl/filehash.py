"""Hashes of files, and the cache that saves hashing a large file again at every start.

State: one small file for each hashed file under the user's cache folder. Refuses everything of zl and torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


def cache_root() -> Path:
    """Name the folder of everything that zl may make again: `$XDG_CACHE_HOME/zl`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path here.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "zl"


def sha256_of(path: Path) -> str:
    """Hash a file; the interpreter's lock is free meanwhile."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamped_sha256(path: Path) -> str:
    """Hash one file, or take the hash from the cache while the file's size and time are the same."""
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns]
    resolved = str(path.resolve())
    folder = cache_root() / "sha256"
    entry = folder / f"{hashlib.sha256(resolved.encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(entry.read_text())
        if known["stamp"] == stamp and known["path"] == resolved:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no entry, or one that cannot be read: hash again
    value = sha256_of(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = entry.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"path": resolved, "stamp": stamp, "sha256": value}))
        part.replace(entry)
    except OSError:
        pass  # a read-only home costs one hash a start, nothing else
    return value
