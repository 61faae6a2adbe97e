"""Signals: TERM and INT end the server, the second at once; HUP reads the configuration again.

State: the handlers, while the context lasts. Refuses torch and gpu.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator


def hold_hangups() -> bool:
    """Ignore HUP until there is something to reload; say whether losing the terminal is to end this server.

    It is, unless whoever started it had HUP ignored already, as nohup(1) does.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return before != signal.SIG_IGN and has_terminal()


@contextlib.contextmanager
def handled(stop: Callable[[], None], reload: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at each TERM and INT, `reload` at each HUP, on the event loop's thread.

    Afterwards HUP stays ignored: a late one must not take a server that is closing down.
    """
    loop = asyncio.get_running_loop()
    calls = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
    for number, call in calls.items():
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in calls:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def has_terminal() -> bool:
    """Say whether this process has a controlling terminal (tty(4): opening /dev/tty fails without one)."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
