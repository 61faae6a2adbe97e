"""Names for threads that the kernel knows too, so that `top -H` and our benches can tell glue from compute.

State: none. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path


def name_this_thread(name: str) -> None:
    """Give the calling thread its name for the kernel: at most 15 characters are kept. Does nothing off Linux."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
