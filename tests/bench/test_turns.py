"""bench.serve: whose turn it is, and what the one before has left running; bench.micro.tiles: its loops run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from bench import procs, serve
from bench.micro import tiles
from zl.compiled import compiler
from zl.gpu.native.build import runs

SPINS = "import time\nwhile time.process_time() < 1.2: pass\ntime.sleep(60)"


class Spinning:
    """A server that works on for a while when nobody asks any more."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", SPINS])

    def pids(self) -> list[int]:
        return [self.child.pid]


class Nothing:
    def versions(self) -> dict[str, str]:
        return {}


def test_a_turn_begins_when_the_server_before_has_come_to_rest(tmp_path):
    subject = serve.Subject(Nothing(), None, tmp_path)  # type: ignore[arg-type]
    subject.server = server = Spinning()  # type: ignore[assignment]
    try:
        asyncio.run(subject.rest())
        spent = procs.cpu_seconds(server.pids())
        time.sleep(0.3)
        assert spent >= 1.0, "rest ended while the server was still busy"
        assert procs.cpu_seconds(server.pids()) - spent <= 0.02
    finally:
        server.child.kill()
        server.child.wait()


@pytest.mark.skipif(not runs("amx") or compiler() is None, reason="no tiles on this CPU, or no compiler")
def test_tile_loops_give_a_time_for_each_number_of_live_tiles(tmp_path):
    found = tiles.measure(tiles.build(tmp_path), min(os.sched_getaffinity(0)), 0.05)
    assert list(found) == [4, 5, 7, 8]
    assert all(0 < low <= mid <= high for low, mid, high in found.values())
