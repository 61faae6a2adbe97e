"""The import map as a test: what a module must never load, directly or through others of zl; what a start costs.

Imports under TYPE_CHECKING do not count; those inside functions do, since they run. Foreign packages stay closed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVING = {"zl.server", "zl.process", "zl.cli"}
ASYNC_CLIENT = {"torch", "numpy", "zl.gpu", "zl.net.native", "zl.net.protocol", "zl.net.listen", "zl.net.rules",
                "zl.net.session"}  # fmt: skip

# The longest matching prefix counts. docs/design.md tells what each module is for.
NEVER: dict[str, set[str]] = {
    "zl.shapes": {"torch", "numpy", "os", "asyncio"},
    "zl.errors": {"torch", "numpy", "asyncio"},
    "zl.flags": {"torch", "numpy", "asyncio"},
    "zl.address": {"torch", "numpy", "asyncio", "ssl"},
    "zl.lease": {"torch", "numpy", "asyncio", "zl.net"},
    "zl.ids": {"torch", "asyncio", "zl.net", "zl.text"},
    "zl.ports": {"torch", "numpy", "asyncio", "ssl", "zl.net", "zl.errors"},
    "zl.streams": {"torch", "numpy", "asyncio", "socket", "zl.net"},
    "zl.readers": {"torch", "numpy", "asyncio"},
    "zl.policy": {"torch", "numpy", "asyncio", "zl.net"},
    "zl.access": {"torch", "asyncio", "zl.gpu", "zl.net"},
    "zl.journal": {"torch", "numpy", "asyncio", "zl.net"},
    "zl.spans": {"torch", "numpy", "asyncio", "zl.net"},
    "zl.span_search": {"torch", "numpy", "asyncio", "zl.errors", "zl.journal", "zl.net"},
    "zl.audit": {"torch", "asyncio", "zl.gpu", "zl.net"},
    "zl.config": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu"},
    "zl.config_sources": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu", "zl.config", "zl.readers", "zl.shapes"},
    "zl.exposure": {"torch", "numpy", "asyncio", "socket", "zl.net", "zl.gpu"},
    "zl.compiled": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu"},
    "zl.download": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu"},
    "zl.pull": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu"},
    "zl.net.schema_pb2": {"torch", "numpy", "asyncio"},
    "zl.net.frames": {"asyncio", "google", "torch", "numpy"},
    "zl.net.messages": {"asyncio", "google", "torch", "numpy"},
    "zl.net.codec": {"asyncio", "torch", "numpy", "zl.dispatch"},
    "zl.net.native": {"asyncio", "torch", "numpy", "zl.gpu", "zl.dispatch"},
    "zl.net.rules": {"asyncio", "torch", "numpy", "zl.dispatch"},
    "zl.net.session": {"asyncio", "torch", "numpy", "zl.dispatch"},
    "zl.net.host": {"asyncio", "torch", "zl.text", "zl.dispatch"},
    "zl.net.hangup": {"torch", "zl.text", "zl.dispatch"},
    "zl.net.peer": {"asyncio", "torch", "zl.text", "zl.dispatch"},
    "zl.net.protocol": {"torch", "zl.text", "zl.dispatch"},
    "zl.net.connections": {"torch", "zl.text", "zl.dispatch"},
    "zl.net.tls": {"torch", "asyncio", "zl.gpu", "zl.dispatch"},
    "zl.net.listen": {"zl.gpu", "zl.dispatch", "torch"},
    "zl.text": {"asyncio", "torch", "zl.net"},
    "zl.sampling.profiles": {"torch", "asyncio", "zl.net"},
    "zl.sampling.filter": {"torch", "asyncio", "zl.net", "zl.gpu"},
    "zl.sampling.rng": {"asyncio", "zl.gpu.programs"},
    "zl.sampling.sampler": {"asyncio", "zl.rows", "zl.gpu.programs"},
    "zl.rows": {"torch", "asyncio", "zl.net"},
    "zl.pages": {"torch", "asyncio", "zl.net"},
    "zl.dispatch": {"torch", "asyncio", "zl.net", "zl.gpu"},
    "zl.emit": {"torch", "asyncio", "zl.gpu", "zl.dispatch", "zl.net.protocol"},
    "zl.admission": {"torch", "asyncio", "zl.gpu", "zl.net.protocol"},
    "zl.service": {"torch", "asyncio", "zl.gpu", "zl.net.protocol"},
    "zl.gpu": {"zl.net", "zl.dispatch", "asyncio"},
    "zl.gpu.cuda": {"asyncio", "zl.net"},
    "zl.gpu.cpu": {"cuda", "asyncio", "zl.net"},
    "zl.gpu.device": {"asyncio", "zl.net"},
    "zl.gpu.addresses": {"torch", "triton", "zl.rows", "zl.net", "asyncio"},
    "zl.gpu.cuda_memory": {"triton", "cuda", "zl.rows", "zl.net", "asyncio"},
    "zl.gpu.cuda_buffers": {"zl.rows", "zl.dispatch", "zl.net", "asyncio"},
    "zl.gpu.cuda_guard": {"zl.rows", "zl.dispatch", "zl.net", "asyncio"},
    "zl.gpu.device_patrol": {"zl.rows", "zl.dispatch", "zl.net", "asyncio"},
    "zl.gpu.graphs": {"triton", "zl.rows", "zl.net", "asyncio"},
    "zl.gpu.guarded": {"torch", "zl.rows", "zl.dispatch", "zl.net", "asyncio"},
    "zl.gpu.mending": {"zl.rows", "zl.dispatch", "zl.net", "asyncio"},
    "zl.gpu.nvtx": {"triton", "zl.rows", "zl.dispatch", "zl.net", "asyncio"},
    "zl.gpu.renewal": {"zl.rows", "zl.dispatch", "zl.net", "asyncio"},
    "zl.gpu.native.needs": {"torch", "zl.rows", "zl.net", "zl.text", "asyncio"},
    "zl.gpu.upload": {"triton", "zl.rows", "zl.net", "asyncio"},
    "zl.gpu.arena": {"asyncio", "zl.net", "zl.rows"},
    "zl.gpu.pinned": {"asyncio", "zl.net", "zl.rows"},
    "zl.gpu.pool": {"zl.rows", "zl.pages", "zl.net", "asyncio"},
    "zl.gpu.weights": {"zl.net", "zl.text", "asyncio"},
    "zl.gpu.source": {"zl.net", "zl.text", "asyncio"},
    "zl.gpu.gguf_file": {"zl.net", "zl.text", "asyncio"},
    "zl.gpu.hf_folder": {"zl.net", "zl.text", "asyncio"},
    "zl.gpu.kernels": {"zl.gpu.model", "zl.rows", "zl.net", "asyncio"},
    "zl.gpu.native": {"zl.rows", "zl.pages", "zl.net", "zl.text", "asyncio"},
    "zl.gpu.model": {"zl.gpu.staging", "zl.gpu.programs", "zl.rows", "zl.net", "asyncio"},
    "zl.gpu.staging": {"zl.net", "zl.rows", "asyncio"},
    "zl.gpu.torch_step": {"zl.rows", "zl.net", "zl.text", "zl.dispatch", "asyncio"},
    "zl.gpu.programs": {"zl.rows", "zl.dispatch", "zl.net", "asyncio"},
    "zl.gpu.pacing": {"torch", "numpy", "triton", "asyncio", "zl.net", "zl.rows", "zl.dispatch"},
    "zl.gpu.patience": {"torch", "numpy", "triton", "asyncio", "zl.net", "zl.rows", "zl.dispatch"},
    "zl.gpu.chunks": {"torch", "triton", "asyncio", "zl.net", "zl.rows", "zl.dispatch"},
    "zl.gpu.loop": {"zl.net", "zl.text", "zl.dispatch", "asyncio"},
    "zl.build": {"zl.net", "zl.dispatch", "asyncio", "zl.gpu.loop", "zl.gpu.staging"},
    "zl.memory": {"triton", "zl.net", "zl.dispatch", "asyncio", "zl.gpu.loop"},
    "zl.builder": {"zl.net", "zl.dispatch", "asyncio", "zl.gpu.loop", "zl.gpu.staging"},
    "zl.artifact": {"torch", "gguf", "safetensors", "zl.net", "zl.dispatch", "asyncio", "zl.gpu.programs"},
    "zl.facts": {"torch", "gguf", "safetensors", "zl.net", "zl.dispatch", "asyncio", "zl.gpu.programs"},
    "zl.filehash": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu"},
    "zl.phases": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu"},
    "zl.warm": {"torch", "zl.gpu", "zl.net.protocol"},
    "zl.gpu.native.packed": {"torch", "zl.rows", "zl.net", "zl.text", "asyncio"},
    "zl.metrics": {"torch", "asyncio", "zl.gpu", "zl.net.protocol"},
    "zl.metrics.document": {"torch", "numpy", "asyncio", "prometheus_client", "zl.net", "zl.gpu", "zl.service"},
    "zl.metrics.catalog": {"torch", "numpy", "asyncio", "prometheus_client", "zl.net", "zl.gpu", "zl.service"},
    "zl.measures": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu", "zl.metrics"},
    "zl.histogram": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu", "zl.metrics"},
    "zl.threads": {"torch", "asyncio", "numpy"},
    "zl.health": {"torch", "asyncio", "zl.net"},
    "zl.ops": {"torch", "asyncio", "zl.gpu", "zl.dispatch", "zl.net.protocol", "zl.net.listen"},
    "zl.ops.notify": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu"},  # `zl serve --help` loads it
    "zl.ops.signals": {"torch", "numpy", "asyncio", "logging", "zl.errors", "zl.cli", "zl.net", "zl.gpu"},
    "zl.textfile": {"torch", "numpy", "asyncio", "zl.net", "zl.gpu", "zl.config"},
    "zl.client": ASYNC_CLIENT | {"asyncio"},
    "zl.client.aio": ASYNC_CLIENT,
    "zl.client.aio_channel": ASYNC_CLIENT,
    "zl.client.aio_pool": ASYNC_CLIENT,
    "zl.client.editing": ASYNC_CLIENT,
    "zl.client.tokens": {"torch", "zl.gpu.model", "zl.net.protocol", "zl.net.listen"},  # reads a model's own tokenizer
    "zl.tools.printers": {"torch", "numpy", "asyncio", "socket", "zl.client", "zl.gpu"},
    "zl.tools.hold": {"torch", "numpy", "zl.gpu", "zl.dispatch", "zl.net.protocol", "zl.net.session"},  # binds
    "zl.tools": {"torch", "numpy", "zl.gpu", "zl.dispatch", "zl.net.protocol", "zl.net.listen", "zl.net.session"},
}
# Empty packages, and those that wire.
FREE = ("zl", "zl.net", "zl.sampling", "zl.server", "zl.process", "zl.cli", "zl.__main__")
LAZY = {("zl.client", "zl.client.aio")}  # loaded at the first use of AsyncClient, which brings asyncio with it


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted((ROOT / "zl").rglob("*.py"))}


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the code that can run, which leaves out `if TYPE_CHECKING:`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from running(other)
        else:
            yield from running(child)


@cache
def imports_of(module: str) -> frozenset[str]:
    found: set[str] = set()
    for node in running(ast.parse(FILES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write the whole name"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    packages = {name.rpartition(".")[0] for name in found | {module} if name in FILES}
    return frozenset(found | packages - {module, ""})


def chains(module: str) -> dict[str, list[str]]:
    """Map everything that `module` loads to the way from it there."""
    ways = {module: [module]}
    queue = [module]
    while queue:
        here = queue.pop(0)
        for name in imports_of(here):
            if name not in ways and (here, name) not in LAZY:
                ways[name] = [*ways[here], name]
                if name in FILES:
                    queue.append(name)
    return ways


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule_of(module: str) -> str:
    return max((prefix for prefix in NEVER if within(module, prefix)), key=len, default="")


@pytest.mark.parametrize("module", sorted(FILES))
def test_module_loads_nothing_that_it_must_not(module):
    rule = rule_of(module)
    if not rule:
        assert module in FREE or within(module, "zl.cli"), f"{module} has no rule in NEVER"
        return
    for name, way in chains(module).items():
        for refused in NEVER[rule] | SERVING:
            assert not within(name, refused), f"{module} must never load {refused}: {' → '.join(way)}"


def test_the_walk_sees_what_it_should():
    """The test above would pass on an empty graph; this one would not."""
    loaded = chains("zl.server")
    assert {"asyncio", "torch", "google.protobuf.message", "zl.gpu.loop", "zl.net.frames", "zl.rows"} <= set(loaded)
    assert loaded["zl.net.frames"][0] == "zl.server"
    assert "zl.client.aio" not in chains("zl.client")
    assert "asyncio" in chains("zl.client.aio")


def test_rules_name_modules_that_exist_or_are_planned():
    planned = {"zl.gpu.staging"}
    assert {rule for rule in NEVER if rule not in FILES} <= planned


def test_one_door_to_cuda():
    doors = {module for module in FILES if any(within(name, "cuda") for name in imports_of(module))}
    assert doors == {"zl.gpu.cuda"}


def test_hot_paths_do_not_import_metrics():
    users = {module for module in FILES if any(within(name, "zl.metrics") for name in imports_of(module))}
    assert {module for module in users if not within(module, "zl.metrics")} <= {"zl.server"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)


def test_importing_the_client_loads_nothing_heavy():
    done = python("-c", "import json, sys, zl.client; print(json.dumps(sorted(sys.modules)))")
    loaded = json.loads(done.stdout)
    assert "google.protobuf.message" in loaded
    for heavy in ("torch", "numpy", "asyncio", "uvloop", "ssl", "zl.gpu", "zl.server", "zl.net.protocol", "triton"):
        assert not [name for name in loaded if within(name, heavy)], heavy


def cpu_ms_of_importing(name: str) -> float:
    code = f"import time; start = time.process_time_ns(); import {name}; print(time.process_time_ns() - start)"
    return int(python("-c", code).stdout) / 1e6


def test_importing_the_client_stays_under_100_ms():
    """A promise of the client, not a benchmark: one process of at most 24 keeps it, in CPU time.

    An import waits for nothing once its files are cached, so on an idle machine CPU time is what the clock shows; on a
    busy one the clock would show the neighbours. Machines of a shared host run at half their speed for minutes: where
    asyncio takes more than the 50 ms that it takes on the machine of the promise, the promise grows with it.
    """
    best, yardstick = 1e9, 1e9
    for _ in range(24):
        best, yardstick = min(best, cpu_ms_of_importing("zl.client")), min(yardstick, cpu_ms_of_importing("asyncio"))
        if best < 100:
            return
    slower = max(1.0, yardstick / 50)
    assert best < 100 * slower, f"import zl.client took {best:.0f} ms at best, asyncio {yardstick:.0f} ms"


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("ask", "--help"), ("serve", "--help")])
def test_help_loads_nothing_heavy(arguments):
    code = """
import sys
from zl.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""
    loaded = python("-c", code, *arguments).stderr.split()
    assert "argparse" in loaded
    assert not {"torch", "numpy", "google.protobuf", "zl.client", "zl.server", "asyncio"} & set(loaded)
