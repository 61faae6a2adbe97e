"""llama.cpp on the same GGUF file: its batch interface (`llamacpp`) and its Python server (`llamacpp-server`).

The server answers one request at a time, so it is the right one for a single stream at most. Owns no state.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from bench.clients import Client, SseClient
from bench.drivers.base import HOST, ROOT, Plan, distributions, environment, python_of

VENV = ".venv-llamacpp"
MOST_SEQUENCES = 256
"""LLAMA_MAX_SEQ of the pinned release."""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """One of the two ways to serve with it."""

    batch: bool
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", "llamacpp" if self.batch else "llamacpp-server")

    def command(self, plan: Plan, port: int) -> tuple[list[str], dict[str, str]]:
        """A context of just the tokens that the run needs: a larger one only costs it memory."""
        python = str(python_of(VENV))
        env = environment(plan.threads)
        if self.batch:
            ctx = -(-plan.row_tokens // 256) * 256
            argv = [python, str(ROOT / "bench/peers/llamacpp_batch.py"), "--model", os.fspath(plan.gguf)]
            argv += ["--port", str(port), "--streams", str(min(plan.streams, MOST_SEQUENCES)), "--ctx", str(ctx)]
            return [*argv, "--threads", str(plan.threads)], env
        argv = [python, "-m", "llama_cpp.server", "--model", os.fspath(plan.gguf), "--host", HOST, "--port", str(port)]
        argv += ["--n_ctx", "4096", "--n_threads", str(plan.threads), "--n_threads_batch", str(plan.threads)]
        return [*argv, "--n_gpu_layers", "0", "--interrupt_requests", "False"], env

    def client(self, port: int) -> Client:
        """Streamed chat completions.

        The Python server has no ignore_eos: an answer may end early there, and tokens are counted as they come.
        """
        return SseClient(HOST, port, "model", "repeat_penalty", {})

    def versions(self) -> dict[str, str]:
        """The binding's version names the llama.cpp commit that it carries."""
        return distributions(python_of(VENV), "llama-cpp-python")

    def counts(self, _port: int, /) -> dict[str, float]:
        """Nothing that zl's figures are compared with."""
        return {}
