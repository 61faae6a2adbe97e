"""The limit of open files: each connection is one, and at the limit the kernel's and the loop's answer is silence.

Owns no state. Refuses torch, asyncio and everything of zl.
"""

from __future__ import annotations

import contextlib
import resource


def raise_limit() -> None:
    """Take as many descriptors as this process may: the soft limit is low (1,024) for the sake of select() alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a hard limit above what the kernel takes by now
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """Return the limit in force."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 31
