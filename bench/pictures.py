"""Make the pictures of docs/observability.md, in about a minute: `python -m bench.pictures`.

A server under load, `zl top` on a pseudo-terminal beside it, and a real Prometheus that scrapes it and is then asked
the dashboard's own queries. Owns no state.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.draw import draw_dashboard, draw_terminal
from bench.procs import Server, free_port
from bench.prometheus import Prometheus
from bench.terminal import Terminal
from zl.client import Client
from zl.client.errors import RequestRefused
from zl.tools import prompts

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy" / "grafana" / "zl.json"
SHOWN = (
    "Glue share", "Tokens/s", "First token, p99", "Gap, p99", "Busy rows", "Waiting", "Ready",
    "Time to first token", "Gap between tokens",
    "Program hits", "Where answers' time goes", "Pages",
    "Fragmentation", "Errors", "Glue by part",
    "Time to first token by profile", "Gap by profile", "Whole answers by profile", "Queue by profile",
)  # fmt: skip
"""The dashboard's main panels, in the order of the picture."""
PERIOD = "5s"
STEP_S = 1.0


def conversations(path: Path, kinds: tuple[str, ...], tokens: int, n: int = 200) -> Path:
    """Write n conversations of these profiles; lengths differ, so that streams do not go in step."""
    system = prompts.text(40, 0)
    lines = [{"system": system, "messages": [prompts.text(30 + i % 7 * 10, i)], "type": kinds[i % len(kinds)],
              "max_tokens": tokens + i % 5 * (tokens // 2)} for i in range(n)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@contextlib.contextmanager
def load(address: str, streams: int, conversations: Path) -> Iterator[None]:
    """Keep streams busy for as long as the block runs."""
    child = subprocess.Popen(
        [sys.executable, "-m", "zl", "load", "--streams", str(streams), "--per-stream", "1000", "--prompts",
         str(conversations), address],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
        if child.poll() is not None:
            raise RuntimeError(f"zl load ended by itself with status {child.returncode}")
    finally:
        child.kill()
        child.wait()


def wrong(address: str, n: int) -> None:
    """Send requests that are refused."""
    with Client(address) as client:
        for _ in range(n):
            with contextlib.suppress(RequestRefused):
                client.ask("hi", top_p=7.0)


def capture(metrics: str, seconds: float, columns: int = 110, lines: int = 24) -> Terminal:
    """Let `zl top` run on a terminal for a while; give what it then shows."""
    screen = Terminal(columns, lines)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    child = subprocess.Popen([sys.executable, "-m", "zl", "top", "--metrics", metrics], stdin=slave, stdout=slave,
                             env=os.environ | {"TERM": "xterm", "PYTHONUTF8": "1"})  # fmt: skip
    try:
        deadline, held = time.monotonic() + seconds, b""
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.2)[0]:
                # A read may end within a character: what is fed ends with a whole drawing.
                drawn, mark, held = (held + os.read(master, 65_536)).rpartition(b"\x1b[J")
                screen.feed((drawn + mark).decode())
        return screen
    finally:
        child.send_signal(signal.SIGINT)
        child.wait()
        os.close(slave)
        os.close(master)


def panels(prometheus: Prometheus, begin: float, end: float) -> list[tuple[dict[str, Any], list[list[dict[str, Any]]]]]:
    """Give each shown panel with the answers to its queries over the time from `begin` to `end`."""
    known = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]}
    found = []
    for title in SHOWN:
        panel = known[title]
        answers = []
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", PERIOD).replace("$instance", ".*")
            answers.append(prometheus.query_range(expression, begin, end, STEP_S))
        found.append((panel, answers))
    return found


def run(out: Path, seconds: float, streams: int) -> None:
    """Serve, load, scrape, and draw both pictures into `out`."""
    with tempfile.TemporaryDirectory(prefix="zl-pictures-") as name:
        folder = Path(name)
        address, metrics = f"unix:{folder / 's'}", f"127.0.0.1:{free_port()}"
        argv = [sys.executable, "-m", "zl", "serve", "--listen", address, "--metrics", metrics, "--kv-memory", "448MiB",
                "--heartbeat-s", "10"]  # fmt: skip
        server = Server("zl", argv, os.environ, folder / "zl.log")
        try:
            while b"zl: listening" not in (folder / "zl.log").read_bytes():
                server.check()
                time.sleep(0.1)
            data = folder / "prometheus"
            data.mkdir()
            with Prometheus(data, metrics) as prometheus:
                begin = time.time() + 2
                chat = conversations(folder / "chat.jsonl", ("CHAT",), 32)
                others = conversations(folder / "others.jsonl", ("SUMMARIZE", "CREATIVE"), 8)
                with load(address, streams, chat):
                    screen = capture(metrics, seconds * 0.45)
                    wrong(address, 6)
                    with load(address, streams // 6, others):
                        time.sleep(seconds * 0.25)
                    time.sleep(seconds * 0.3)
                    end = time.time()
                answers = panels(prometheus, begin, end)
        finally:
            server.stop()
    out.mkdir(parents=True, exist_ok=True)
    draw_terminal(screen, out / "zl-top.png")
    draw_dashboard(answers, out / "dashboard.png")


def main() -> None:
    """Read the flags and make the pictures."""
    parser = argparse.ArgumentParser(prog="python -m bench.pictures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of the load (default: 40)")
    parser.add_argument("--streams", type=int, default=120, help="streams of the load (default: 120)")
    args = parser.parse_args()
    run(args.out, args.seconds, args.streams)


if __name__ == "__main__":
    main()
