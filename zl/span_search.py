"""Search texts for patterns: the process that `zl.spans` starts, by this file's path, and ends when it takes too long.

Python's `re` keeps the interpreter's lock for the whole of a search, so a pattern that backtracks without end would
stop every thread of a server; in a process of its own it stops nobody. Speaks JSON lines on the socket that is its
stdin: first the patterns, then texts in, and for each text one line a pattern out.

State: the compiled patterns. Imports nothing but the standard library, and little of it: it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket

NICE = 10
ORPHAN_S = 60
"""A search that nobody waits for any more, since the server was killed, ends the process after this."""


def main() -> None:
    """Answer until the other side closes; the server's signals are not its matter."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a service manager may forbid it
        os.nice(NICE)
    with socket.socket(fileno=os.dup(0)) as sock, sock.makefile("rwb") as lines:
        patterns = [re.compile(text) for _, text in json.loads(lines.readline())]
        for line in lines:
            asked = json.loads(line)
            signal.alarm(ORPHAN_S)
            for pattern in patterns[asked["first"] :]:
                spans = [match.span() for match in pattern.finditer(asked["text"]) if match.end() > match.start()]
                lines.write(json.dumps(spans).encode() + b"\n")
                lines.flush()
            signal.alarm(0)


if __name__ == "__main__":
    main()
