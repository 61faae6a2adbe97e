"""A tiny model as an artifact, so that a service of these tests starts in about a second."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ops.kit import ROOT, Service


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """An artifact of a tiny model with random weights, made by `zl build`."""
    from tests.tiny_model import write_tiny

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder / "model")
    command = [sys.executable, "-m", "zl", "build", str(folder / "model"), "--out", str(folder / "artifact")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "artifact"


@pytest.fixture
def service() -> Iterator[Callable[..., Service]]:
    """Make services; whatever a failed test leaves of them is killed."""
    made: list[Service] = []

    def make(*arguments, **more) -> Service:
        made.append(Service(*arguments, **more))
        return made[-1]

    yield make
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
            each.manager.close()


@pytest.fixture
def small(tiny) -> tuple[str, ...]:
    """The flags of a server that starts quickly."""
    return ("--model", str(tiny), "--kv-memory", "8MiB", "--max-rows", "16", "--heartbeat-s", "0")
