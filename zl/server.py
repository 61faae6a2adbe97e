"""The composition root: wires socket, dispatcher, engine and metrics; owns signals, readiness and drain.

State: one running server. Nothing imports this but the command line and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

import zl
from zl import warm
from zl.access import Access
from zl.address import parse_address
from zl.audit import Audit
from zl.build import Build, prepare
from zl.config import Settings
from zl.dispatch import Dispatcher, Limits
from zl.errors import DeviceError
from zl.gpu.arena import Arena
from zl.gpu.guard import Guard, open_guard
from zl.gpu.heartbeat import with_canary
from zl.gpu.loop import SAMPLED_BY, GenerationLoop, StepResult, no_inner_clock
from zl.gpu.native.step import NativeStep
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.programs import N_SLOTS, Engine, open_engine
from zl.health import Health, Phase
from zl.metrics.collect import Read
from zl.metrics.http import MetricsServer
from zl.metrics.nvml import Nvml, open_nvml
from zl.metrics.sources import Parts, sources
from zl.net import codec
from zl.net.host import Limits as NetLimits
from zl.net.listen import Bound, Listeners, bind_all, listen, systemd_sockets, tls_context, unbind
from zl.net.protocol import Net
from zl.pages import PageBooks
from zl.phases import Phases, since_exec
from zl.rows import Rows
from zl.service import Built, Service
from zl.shapes import PAGE
from zl.threads import name_this_thread

log = logging.getLogger("zl")

FLUSH_S = 2.0
"""How long closing connections may take to send what is queued for them."""


class Server:
    """One process that serves one model. `start`, then `wait`; `drain` or a signal ends it."""

    def __init__(self, build: Build, engine: Engine, columns: RowColumns, slots: list[StepSlot], run_ahead: int):
        settings, shapes = build.settings, build.shapes
        loop = asyncio.get_running_loop()
        self._build = build
        self._loop = loop
        self._stop = asyncio.Event()
        self._hurry = False
        self._failure: BaseException | None = None
        self.engine = engine
        self.arena = Arena(settings.berths, settings.max_frame, register=build.device.register)
        self.rows = Rows(shapes.max_rows)
        self.pages = PageBooks(shapes.n_pages)
        self._guard = engine if isinstance(engine, Guard) else None
        self.generation = GenerationLoop(
            shapes, engine, slots, self.rows.control, self._publish, self._engine_failed, run_ahead=run_ahead,
            between=self._guard.between if self._guard is not None else None,
            inner_ns=self._guard.inner_ns if self._guard is not None else no_inner_clock,
        )  # fmt: skip
        if self._guard is not None:
            self._guard.on_retire(self.pages.distrust)
        self.dispatcher = Dispatcher(
            shapes, self.rows, self.pages, columns, self.generation.seat, Limits(max_queue=settings.max_queue)
        )
        self.health = Health(self._turned_at)
        self._prompt_thread = ThreadPoolExecutor(1, "zl-prompt", name_this_thread, ("zl-prompt",))
        self.service = Service(
            prompts=build.prompts,
            tokens=build.tokens,
            vocab_size=build.text.vocab_size,
            policy=build.policy,
            dispatcher=self.dispatcher,
            info=codec.pack_server_info(self._info()),
            call_at=lambda when, function: loop.call_at(when, function),
            offload=self._offload,
            engine_nudge=self.generation.nudge,
            health=self.health,
            clock=time.monotonic,
        )
        self.net = Net(
            loop=loop,
            app=self.service,
            arena=self.arena,
            limits=NetLimits(max_frame=settings.max_frame, frame_timeout_s=settings.frame_timeout_s),
            auth_token=settings.auth_token.encode() or None,
        )
        self._access = self._open_access()
        self._audit = self._open_audit()
        self.listeners: Listeners | None = None
        self.metrics: MetricsServer | None = None
        self._nvml: Nvml | None = None

    async def start(self, bounds: list[Bound], tls: ssl.SSLContext | None, phases: Phases) -> None:
        """Prove the engine, compute the configured system prompts, then let peers in. ZlError: one of these failed."""
        settings = self._build.settings
        if settings.metrics != "off":
            self._nvml = open_nvml()
            self.metrics = MetricsServer(settings.metrics, self._sources(), self.health)
        self.generation.start()
        with phases("first request"):
            try:
                await warm.prove(self.service, self._stop)
            except DeviceError as error:
                why = f" ({self._failure})" if self._failure is not None else ""
                raise DeviceError(f"{error}{why}") from self._failure
        with phases("system prompts"):
            texts, shapes = settings.system_prompts, self._build.shapes
            kept = await warm.keep_prompts(self.service, self._build.prompts, texts, shapes, self._stop)
        if kept:
            log.info("system prompts: %d kept, %d tokens on constant pages", len(settings.system_prompts), kept)
        self.service.start_counting()
        self.service.access, self.service.audit = self._access, self._audit
        self.listeners = await listen(bounds, self.net.connection, tls=tls)
        self.health.phase = Phase.READY

    async def wait(self) -> int:
        """Serve until `stop`, then drain; return the exit status."""
        await self._stop.wait()
        await self._drain()
        return 1 if self._failure is not None else 0

    def stop(self) -> None:
        """Ask for the end: the first time drains, the second time ends at once."""
        if self._stop.is_set():
            self._hurry = True
        else:
            log.info("draining: %d requests in flight", self.service.in_flight)
        self._stop.set()

    def reopen_logs(self) -> None:
        """Open the files of the journals anew, after a log rotator has moved them away."""
        for journal in (self._access, self._audit):
            if journal is not None:
                journal.journal.reopen()

    async def close(self) -> None:
        """Give everything back; books that do not balance are reported."""
        if self.listeners is not None:
            self.listeners.close()
        self.net.close_connections()
        deadline = self._loop.time() + FLUSH_S
        while self.net.connections and self._loop.time() < deadline:
            await asyncio.sleep(0.005)
        self.generation.stop()
        await asyncio.sleep(0)  # results that the engine published while it stopped
        self.engine.close()
        self._prompt_thread.shutdown(cancel_futures=True)
        self.net.close()
        for journal in (self._access, self._audit):
            if journal is not None:
                journal.close()
        if self.metrics is not None:
            self.metrics.close()
        if self._nvml is not None:
            self._nvml.close()

    def _open_access(self) -> Access | None:
        settings = self._build.settings
        if settings.access_log == "off":
            return None
        return Access(settings.access_log, max_bytes=settings.log_bytes, keep=settings.access_files)

    def _open_audit(self) -> Audit | None:
        settings, build = self._build.settings, self._build
        if settings.audit_log == "off":
            return None
        return Audit(
            settings.audit_log, settings.audit_patterns, build.tokens, build.build_id,
            max_bytes=settings.log_bytes, keep=settings.audit_files,
        )  # fmt: skip

    def _offload(self, work: Callable[[], Built], then: Callable[[Built], None]) -> None:
        done = self._loop.run_in_executor(self._prompt_thread, work)
        done.add_done_callback(lambda future: None if future.cancelled() else then(future.result()))

    def _turned_at(self) -> float:
        turned_at = self.generation.counters.turned_at
        return max(turned_at, self._guard.progress_at) if self._guard is not None else turned_at

    def _publish(self, result: StepResult) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self.service.on_step, result)

    def _engine_failed(self, failure: BaseException) -> None:
        def tell() -> None:
            self._failure = failure
            log.error("the engine stopped: %s: %s", type(failure).__name__, failure, exc_info=failure)
            self.service.engine_failed(failure)
            self._stop.set()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(tell)

    async def _drain(self) -> None:
        self.service.accepting = False
        if self.health.phase is Phase.READY:
            self.health.phase = Phase.DRAINING
        if self.listeners is not None:
            self.listeners.close()
        deadline = self._loop.time() + self._build.settings.drain_s
        while self.service.in_flight and not self._hurry and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        if self.service.in_flight:
            log.warning("ending %d requests that did not finish", self.service.in_flight)
            self.service.end_all("the server stopped before the answer was complete")

    def _info(self) -> codec.ServerInfo:
        build = self._build
        return codec.ServerInfo(
            version=zl.__version__,
            model=build.model.name,
            tokenizer_sha256=build.text.sha256,
            vocab_size=build.text.vocab_size,
            max_batch=build.shapes.max_rows,
            max_model_len=build.shapes.max_model_len,
            max_tokens=build.policy.max_tokens,
            max_messages=build.policy.max_messages,
            max_frame=build.settings.max_frame,
            device=build.device.name,
            build_id=build.build_id,
        )

    def _planned_memory(self) -> dict[str, int]:
        """Count what an engine that nothing watches holds, by the build's sizes."""
        from zl.gpu import cuda_memory  # here: it reads the kernels' sizes, which the CPU program never needs

        model, item = self._build.model, 2 if self._build.dtype == "bfloat16" else 4
        page = 2 * model.n_layers * model.n_kv_heads * PAGE * model.head_dim * item
        weights = cuda_memory.weight_bytes(model) * item // 2
        return {"weights": weights, "kv_pool": self._build.shapes.n_pages * page}

    def _sources(self) -> dict[str, Read]:
        build = self._build
        parts = Parts(
            service=self.service,
            dispatcher=self.dispatcher,
            pages=self.pages,
            net=self.net.counters,
            health=self.health,
            generation=self.generation,
            arena=self.arena,
            guard=self._guard,
            memory=self._guard.memory if self._guard is not None else self._planned_memory(),
            sampled_by=SAMPLED_BY,
            build=(zl.__version__, build.model.name, build.build_id, build.device.name, self.engine.name),
        )
        return sources(parts) | (self._nvml.sources() if self._nvml is not None else {})


def open_build(build: Build, say: Callable[[str], None]) -> tuple[Engine, RowColumns, list[StepSlot], int]:
    """Allocate the columns and open the engine of a build; returns also how far the loop may run ahead."""
    run_ahead = build.device.run_ahead
    shapes = with_canary(build.shapes) if build.device.kind == "cpu" else build.shapes
    columns = RowColumns(shapes, build.device.allocate)
    slots = [StepSlot(shapes, build.device.allocate) for _ in range(max(N_SLOTS, run_ahead + 1))]
    engine = open_engine(
        build.device, build.model, build.weights, build.dtype, shapes, columns, slots,
        threads=build.settings.threads, level=build.settings.cpu_level, say=say,
        debug_addresses=build.settings.debug_addresses == "on",
    )  # fmt: skip
    if isinstance(engine, NativeStep):
        guard = open_guard(engine, build.weights, columns, slots, shapes, build.settings.heartbeat_s)
        return guard, columns, slots[:-1], 0
    return engine, columns, slots, run_ahead


def run(settings: Settings) -> int:
    """Serve until a signal; return the exit status. `settings.model` is a path. ZlError: the start failed."""
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level.upper(), format="%(levelname)s %(message)s", force=True
    )
    phases = Phases()
    phases.add("interpreter and imports", since_exec())
    tls = tls_context(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    # Bound first: a port in use is known in a moment, and peers that connect while the model loads wait and are served.
    bounds = systemd_sockets(os.environ, os.getpid()) or bind_all(parse_address(text) for text in settings.listen)
    try:
        build = prepare(settings, Path(settings.model), log.info, phases)
        with phases("weights and KV pool"):
            engine, columns, slots, run_ahead = open_build(build, log.info)
    except BaseException:
        for bound in bounds:
            unbind(bound)
        raise

    async def main() -> int:
        with phases("arena and wiring"):
            server = Server(build, engine, columns, slots, run_ahead)
        try:
            with _signals(server):
                await server.start(bounds, tls, phases)
                assert server.listeners is not None
                elapsed = since_exec()
                for line in phases.lines("ready", elapsed):
                    log.info(line)
                print(
                    f"zl: listening on {' and '.join(server.listeners.names)}: {build.model.name}, {build.dtype} on "
                    f"{build.device.name}, {build.shapes.max_rows} rows, ready after {elapsed:.1f} s",
                    flush=True,
                )
                return await server.wait()
        finally:
            await server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


@contextlib.contextmanager
def _signals(server: Server) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    caught = {signal.SIGTERM: server.stop, signal.SIGINT: server.stop, signal.SIGHUP: server.reopen_logs}
    for number, function in caught.items():
        loop.add_signal_handler(number, function)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
