"""A real `zl serve` process for each dtype, started once for all tests of this folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.procs import free_port

READY_S = 120

CONSTANT_PROMPT = (
    "You are a travel guide for the Alps. Answer in at most three sentences, name heights in metres, and never advise "
    "a route that needs a rope. If you do not know a place, say so."
)


class ServerProcess:
    """A running server: its addresses, its metrics, its log."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None):
        self.unix = f"unix:{folder / 'zl.sock'}"
        self.port, self.metrics_port = free_port(), free_port()
        self.tcp = f"tcp:127.0.0.1:{self.port}"
        self.log = folder / "zl.log"
        command = [
            sys.executable, "-m", "zl", "serve", "--listen", self.unix, "--listen", self.tcp,
            "--metrics", f"127.0.0.1:{self.metrics_port}", *flags,
        ]  # fmt: skip
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | (env or {}))
        deadline = time.monotonic() + READY_S
        while "zl: listening on" not in self.text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"the server did not start:\n{self.text()}")
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text()

    def figures(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            body = answer.read().decode()
        return {m[1]: float(m[2]) for m in re.finditer(r"^(\w+(?:\{[^}]*\})?) ([0-9.e+-]+)$", body, re.M)}

    def in_use(self) -> tuple[float, float, float]:
        figures = self.figures()
        rows = figures['zl_rows{state="live"}'] + figures['zl_rows{state="ending"}']
        berths = figures['zl_berths{state="used"}'] + figures['zl_berths{state="lent"}']
        return rows, figures['zl_pages{state="used"}'], berths

    def settle(self, seconds: float = 20.0) -> tuple[float, float, float]:
        """Wait until nothing is in use; return what still is."""
        deadline = time.monotonic() + seconds
        while any(self.in_use()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.in_use()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not stop:\n{self.text()}") from None



def serving(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    server = ServerProcess(folder, *flags, env=env)
    yield server
    in_use = server.settle()
    status = server.stop()
    assert in_use == (0, 0, 0), f"rows, pages, berths still in use at the end: {in_use}"
    assert status == 0, server.text()
    assert "Traceback" not in server.text(), server.text()


@pytest.fixture(scope="session")
def server(tmp_path_factory, gguf_path) -> Iterator[ServerProcess]:
    """The embedded model in float32: what can be compared with transformers to the last token."""
    yield from serving(tmp_path_factory.mktemp("float32"), "--model", str(gguf_path), "--dtype", "float32")


@pytest.fixture(scope="session")
def default_server(tmp_path_factory, gguf_path) -> Iterator[ServerProcess]:
    """The embedded model as a user gets it."""
    yield from serving(tmp_path_factory.mktemp("default"), "--model", str(gguf_path))


@pytest.fixture(scope="session")
def artifact(tmp_path_factory, gguf_path) -> Path:
    """An artifact of the embedded model, made by `zl build`."""
    out = tmp_path_factory.mktemp("built") / "artifact"
    command = [sys.executable, "-m", "zl", "build", str(gguf_path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    return out


@pytest.fixture(scope="session")
def artifact_server(tmp_path_factory, artifact) -> Iterator[ServerProcess]:
    """The artifact, with a constant system prompt."""
    env = {"ZL_SYSTEM_PROMPTS": json.dumps([CONSTANT_PROMPT])}
    yield from serving(tmp_path_factory.mktemp("from-artifact"), "--model", str(artifact), env=env)


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory, gguf_path) -> Iterator[ServerProcess]:
    """The embedded model without any artifact."""
    yield from serving(tmp_path_factory.mktemp("plain"), "--model", str(gguf_path), "--artifact", "off")


@pytest.fixture(scope="session")
def constant_prompt() -> str:
    return CONSTANT_PROMPT


@pytest.fixture(scope="session")
def tiny_artifacts(tmp_path_factory) -> list[Path]:
    """Three tiny models that answer differently, as artifacts: servers that start in two seconds."""
    from bench.fleet import make_artifacts

    return make_artifacts(tmp_path_factory.mktemp("tiny"), 3)
