"""Cold start: seconds from exec to the first token that a client in another process reads from a socket.

`python -m bench.coldstart [MODEL] [--starts 5] [--without]`: builds an artifact where none is given, starts a server
on it several times, and prints each start, the median, and the phases that the server reports for the median start.
Owns the server processes that it starts. Standard library and zl's client only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.procs import Server, cpu_seconds
from zl.client import Client, ConnectionFailed

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Start:
    """One start, in seconds: exec to first token, CPU time of the server till then, the server's own phases."""

    first_token: float
    cpu: float
    phases: dict[str, float]


def start_once(model: str, folder: Path, flags: list[str]) -> Start:
    """Start a server, ask it as soon as its socket answers, stop it."""
    address = f"unix:{folder / 'zl.sock'}"
    command = [sys.executable, "-m", "zl", "serve", "--model", model, "--listen", address, "--metrics", "off", *flags]
    server = Server("zl", command, os.environ, folder / "zl.log")
    try:
        while True:
            server.check()
            try:
                with Client(address, timeout=PATIENCE_S) as client:
                    next(iter(client.stream("What is a cold start?", max_tokens=4)))
                    elapsed = time.perf_counter() - server.started
                    break
            except ConnectionFailed:
                if time.perf_counter() - server.started > PATIENCE_S:
                    raise
                time.sleep(0.01)
        cpu = cpu_seconds(server.pids())
    finally:
        server.stop()
    found = re.findall(r"^INFO   (.+?) +([0-9.]+) s$", server.log.read_text(), re.M)
    return Start(round(elapsed, 3), round(cpu, 2), {name: float(seconds) for name, seconds in found})


def make_artifact(model: str, out: Path) -> None:
    """Run `zl build` as a user does."""
    command = [sys.executable, "-m", "zl", "build", *([model] if model else []), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="artifact, or a model to build one of (default: embedded)")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--without", action="store_true", help="start from the model, with no artifact at all")
    parser.add_argument("flags", nargs="*", help="flags for zl serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zl-cold-") as name:
        folder = Path(name)
        model, flags = args.model, args.flags
        if args.without:
            model, flags = model or "smollm2-135m-instruct", [*flags, "--artifact", "off"]
        elif not (Path(model) / "manifest.json").is_file() or not model:
            make_artifact(model, folder / "artifact")
            model = str(folder / "artifact")
        starts = []
        for number in range(args.starts):
            starts.append(start_once(model, folder, flags))
            load = os.getloadavg()[0]
            made = starts[-1]
            print(f"start {number + 1}: first token after {made.first_token:.2f} s, {made.cpu:.2f} s of CPU, "
                  f"load {load:.1f}", flush=True)  # fmt: skip
    median = statistics.median_low([start.first_token for start in starts])
    shown = next(start for start in starts if start.first_token == median)
    for phase, seconds in shown.phases.items():
        print(f"  {phase:<26} {seconds:6.2f} s")
    print(f"median of {len(starts)}: {median:.2f} s from exec to the first token, on {os.cpu_count()} cores")
    print(json.dumps({"median_s": median, "starts": [asdict(start) for start in starts]}))


if __name__ == "__main__":
    main()
