"""zl itself: `zl serve` with its default settings, over its native protocol. Owns no state."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass

from bench.clients import Client, FrameClient
from bench.drivers.base import HOST, ROOT, Plan, environment
from zl.address import TcpAddress
from zl.tools.top_scrape import scrape

METRICS_HOST = "127.0.0.2"
"""Where the metrics are, on the same port: another address of this machine, so that no second port is to be found."""


@dataclass(frozen=True, slots=True)
class Zl:
    """The server of this checkout."""

    name: str = "zl"

    def command(self, plan: Plan, port: int) -> tuple[list[str], dict[str, str]]:
        """Default settings; no thread count in the environment, since zl places its own threads."""
        argv = [sys.executable, "-m", "zl", "serve", "--model", str(plan.gguf)]
        argv += ["--listen", f"tcp:{HOST}:{port}", "--metrics", f"{METRICS_HOST}:{port}"]
        env = environment(plan.threads, PYTHONPATH=str(ROOT))
        del env["OMP_NUM_THREADS"]
        return argv, env

    def client(self, port: int) -> Client:
        """Native frames."""
        return FrameClient(HOST, port)

    def versions(self) -> dict[str, str]:
        """zl's version and its runtime's."""
        import zl

        packages = ("torch", "uvloop", "protobuf", "numpy")
        return {"zl": zl.__version__} | {name: importlib.metadata.version(name) for name in packages}

    def counts(self, port: int, /) -> dict[str, float]:
        """Steps in all, and those that the slow twin computed because the program was not to be trusted."""
        page = scrape(TcpAddress(METRICS_HOST, port), timeout_s=10.0)
        names = {"steps": "zl_steps_total", "fallback_steps": "zl_fallback_steps_total"}
        return {key: page.value(name) or 0.0 for key, name in names.items()}
