"""bench/alloc.py: the short form of the proof, and that it sees what it is to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.alloc import Outcome, Sample

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.system
@pytest.mark.timeout(600)
def test_three_hundred_requests_allocate_nothing_that_lasts(gguf_path):
    """A process of its own, so that its resident memory is the server's."""
    command = [sys.executable, "-m", "bench.alloc", "--requests", "300", "--rows", "16", "--model", str(gguf_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fixed buffers that moved: none" in done.stdout


def outcome(**changes) -> Outcome:
    still = [Sample(i * 30, 500 << 20, 900 << 20) for i in range(11)]
    fields = {"requests": 300, "cancelled": 0, "lasting": {"gpu/loop.py": 64}, "moved": [], "samples": still}
    return Outcome(**fields | changes)


def test_a_leak_is_no_proof():
    assert outcome().proved
    assert not outcome(lasting={"gpu/loop.py": 300 * 64}).proved
    assert not outcome(moved=["RowColumns.own_ids"]).proved
    leak = [Sample(i * 30, (500 << 20) + i * 30 * 1_000, 900 << 20) for i in range(11)]
    assert outcome(samples=leak).slope == pytest.approx(1_000)
    assert not outcome(samples=leak).proved
