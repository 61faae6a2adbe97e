"""What a driver of one system gives: how to start its server, a client for it, and its versions. Owns no state."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.clients import Client

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will ask of a server, so that each is set up as well as it can be.

    gguf        the model file; hf_folder the same weights as bf16 safetensors
    streams     most answers at a time; row_tokens most tokens of one, prompt and answer
    """

    gguf: Path
    hf_folder: Path
    streams: int
    row_tokens: int
    threads: int


class Driver(Protocol):
    """One system under test."""

    name: str

    def command(self, plan: Plan, port: int) -> tuple[list[str], dict[str, str]]:
        """Give command line and environment of a server on HOST:port.

        Raises  MissingPeerError: it is not installed
        """

    def client(self, port: int) -> Client:
        """Give a client for the server on that port."""

    def versions(self) -> dict[str, str]:
        """Say what was measured."""

    def counts(self, port: int, /) -> dict[str, float]:
        """Give what the server on that port has counted since its start, by name; empty where it tells nothing."""


class MissingPeerError(Exception):
    """A system that was asked for is not installed; the text says how to install it."""


def python_of(venv: str) -> Path:
    """Find a peer's interpreter.

    Raises  MissingPeerError: its virtual environment is not there
    """
    python = ROOT / venv / "bin" / "python"
    if not python.exists():
        raise MissingPeerError(f"{venv} is not there; `make bench-peers` installs what zl is compared with")
    return python


def environment(threads: int, **more: str) -> dict[str, str]:
    """Give a child's environment: this one's, offline, without what only slows current numpy and torch builds."""
    env = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    env.pop("PYTHONPATH", None)
    return env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)} | more


def distributions(python: Path, *names: str) -> dict[str, str]:
    """Ask an interpreter for the versions of installed distributions."""
    code = "import importlib.metadata as m, sys\nfor n in sys.argv[1:]: print(n, m.version(n))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())
