"""transformers' own generation, static and continuous batches, in bf16. Owns no state."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from bench.clients import Client, SseClient
from bench.drivers.base import HOST, ROOT, Plan, distributions, environment, python_of

VENV = ".venv-transformers"


@dataclass(frozen=True, slots=True)
class Transformers:
    """`mode` is static or continuous."""

    mode: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", "transformers" if self.mode == "static" else "transformers-cb")

    def command(self, plan: Plan, port: int) -> tuple[list[str], dict[str, str]]:
        """Run bench/peers/transformers_server.py in its environment."""
        argv = [str(python_of(VENV)), str(ROOT / "bench/peers/transformers_server.py"), "--mode", self.mode]
        argv += ["--model", os.fspath(plan.hf_folder), "--port", str(port), "--streams", str(plan.streams)]
        return [*argv, "--threads", str(plan.threads)], environment(plan.threads)

    def client(self, port: int) -> Client:
        """Streamed chat completions."""
        return SseClient(HOST, port, "model", "repetition_penalty", {})

    def versions(self) -> dict[str, str]:
        """The library's version and torch's."""
        return distributions(python_of(VENV), "transformers", "torch")

    def counts(self, _port: int, /) -> dict[str, float]:
        """Nothing that zl's figures are compared with."""
        return {}
