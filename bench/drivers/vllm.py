"""vLLM's CPU build with the settings found fastest on such machines (docs/benchmarks.md). Owns no state."""

from __future__ import annotations

import glob
from dataclasses import dataclass

from bench.clients import Client, SseClient
from bench.drivers.base import HOST, ROOT, Plan, distributions, environment, python_of

VENV = ".venv-vllm"
KV_GIB = 4
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Vllm:
    """Its OpenAI server, prefix cache on as by default, no request log."""

    name: str = "vllm"

    def command(self, plan: Plan, port: int) -> tuple[list[str], dict[str, str]]:
        """Both cores for compute, tcmalloc and Intel's OpenMP preloaded: without them it is half as fast."""
        python = python_of(VENV)
        preload = [*glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4"), str(ROOT / VENV / "lib" / "libiomp5.so")]
        env = environment(
            plan.threads,
            LD_PRELOAD=":".join(preload),
            VLLM_TARGET_DEVICE="cpu",
            VLLM_CPU_OMP_THREADS_BIND=f"0-{plan.threads - 1}",
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_CPU_KVCACHE_SPACE=str(KV_GIB),
            VLLM_NO_USAGE_STATS="1",
            VLLM_HTTP_TIMEOUT_KEEP_ALIVE="600",  # it is stopped while others run: its 5 s would end idle connections
            PATH=f"{ROOT / VENV / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        )
        argv = [str(python), str(ROOT / VENV / "bin" / "vllm"), "serve", str(plan.hf_folder)]
        argv += ["--host", HOST, "--port", str(port), "--served-model-name", MODEL, "--dtype", "bfloat16"]
        argv += ["--max-num-seqs", "256", "--max-model-len", "4096", "--generation-config", "vllm"]
        argv += ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
        return argv, env

    def client(self, port: int) -> Client:
        """Streamed chat completions. No seed: per-request seeds make vLLM's sampler slower."""
        fields = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        return SseClient(HOST, port, MODEL, "repetition_penalty", fields)

    def versions(self) -> dict[str, str]:
        """vLLM's version and its runtime's."""
        return distributions(python_of(VENV), "vllm-cpu", "torch", "transformers", "pydantic", "intel-openmp")

    def counts(self, _port: int, /) -> dict[str, float]:
        """Nothing that zl's figures are compared with."""
        return {}
