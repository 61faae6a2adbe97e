"""The composition root: wires socket, dispatcher, engine and metrics; owns readiness and drain.

State: one running server. Nothing imports this but `process`, benches and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

import zl
from zl import facts, journal, warm
from zl.access import Access
from zl.admission import Admission, Built
from zl.audit import MODE as AUDIT_MODE
from zl.audit import Audit
from zl.build import Build
from zl.config import Settings
from zl.dispatch import Dispatcher, Limits
from zl.errors import DeviceError
from zl.gpu.arena import Arena
from zl.gpu.guard import open_guard
from zl.gpu.guarded import Guarded
from zl.gpu.heartbeat import with_canary
from zl.gpu.loop import SAMPLED_BY, GenerationLoop, StepResult, no_inner_clock
from zl.gpu.native.step import NativeStep
from zl.gpu.nvtx import MarkedEngine, NvtxMark, unmarked
from zl.gpu.pinned import RowColumns, StepSlot
from zl.gpu.programs import N_SLOTS, Engine, open_engine
from zl.health import Health, Phase
from zl.journal import CLOSING_S
from zl.metrics.collect import Read
from zl.metrics.http import MetricsServer, check_address
from zl.metrics.nvml import Nvml, open_nvml
from zl.metrics.sources import Parts, sources
from zl.net import codec
from zl.net.connections import Net
from zl.net.host import Limits as NetLimits
from zl.net.listen import Bound, Listeners, listen
from zl.net.native.library import code_if_possible
from zl.net.protocol import LAST_CALL_S, TOLD_S
from zl.ops import descriptors
from zl.ops.logs import event
from zl.ops.notify import Notifier
from zl.ops.watchdog import Watchdog
from zl.pages import PageBooks
from zl.phases import Phases
from zl.rows import Rows
from zl.service import Service
from zl.threads import name_this_thread

log = logging.getLogger("zl")

FLUSH_S = 2.0
"""How long closing connections may take to send what is queued for them."""

STOP_S = 10.0
"""How long the step in flight may take to end."""

STUCK_S = 1.0
"""How long one may take that is stuck."""

CLOSE_S = 2 * LAST_CALL_S + FLUSH_S + STOP_S + 2 * CLOSING_S + 3.0
"""How long the service manager is to wait beyond the drain deadline."""


class Opened(NamedTuple):
    """An engine and the memory it shares with the event loop.

    run_ahead  steps that the loop may launch before the oldest has ended
    """

    engine: Engine
    columns: RowColumns
    slots: list[StepSlot]
    run_ahead: int
    arena: Arena


class Server:
    """One process that serves one model. `start`, then `wait`; `stop` ends it.

    notifier  the service manager; by default nobody
    """

    def __init__(
        self,
        build: Build,
        opened: Opened,
        notifier: Notifier | None = None,
    ):
        settings, shapes = build.settings, build.shapes
        engine, columns, slots, run_ahead, self.arena = opened
        loop = asyncio.get_running_loop()
        self.build = build
        self._loop = loop
        self._stop = asyncio.Event()
        self._hurry = False
        self.stuck = False  # known after `close`: a step does not end, so its thread and memory are still there
        self._drain_s = settings.drain_s
        self._notifier = notifier or Notifier({}, 0)
        self._failure: BaseException | None = None
        self.engine = engine
        self.rows = Rows(shapes.max_rows)
        self.pages = PageBooks(shapes.n_pages)
        self._guard = engine if isinstance(engine, Guarded) else None
        mark = NvtxMark() if settings.nvtx == "on" else unmarked
        guard = self._guard
        self.generation = GenerationLoop(
            shapes, MarkedEngine(engine, mark) if settings.nvtx == "on" else engine, slots, self.rows.control,
            mark("publish", self._publish), self._engine_failed, run_ahead=run_ahead, mark=mark,
            between=mark("heartbeat", guard.between) if guard is not None else None,
            due=guard.due if guard is not None else None,
            inner_ns=guard.inner_ns if guard is not None else no_inner_clock,
        )  # fmt: skip
        if guard is not None:
            guard.on_retire(self.pages.distrust)
        self.dispatcher = Dispatcher(
            shapes, self.rows, self.pages, columns, self.generation.seat, Limits(max_queue=settings.max_queue)
        )
        self.health = Health(self._turned_at, lambda: self.generation.counters.patience_s)
        self.watchdog = Watchdog(self.health, self._notifier, loop.call_later, self._status)
        self._prompt_thread = ThreadPoolExecutor(1, "zl-prompt", name_this_thread, ("zl-prompt",))
        wire = code_if_possible(log.info)
        self.service = Service(
            admission=Admission(
                prompts=build.prompts, tokens=build.tokens, vocab_size=build.text.vocab_size, policy=build.policy,
                dispatcher=self.dispatcher, arena=columns.arena,
            ),
            dispatcher=self.dispatcher,
            info=codec.pack_server_info(self._info()),
            call_at=lambda when, function: loop.call_at(when, function),
            offload=self._offload,
            engine_nudge=self.generation.nudge,
            health=self.health,
            clock=time.monotonic,
            encode_token=wire.encode_token,
        )  # fmt: skip
        self.net = Net(
            loop=loop,
            app=self.service,
            arena=self.arena,
            limits=NetLimits(max_frame=settings.max_frame, frame_timeout_s=settings.frame_timeout_s),
            auth_token=settings.auth_token.encode() or None,
            decode=wire.decode,
            max_files=descriptors.limit(),
        )
        self._access = self._open_access()
        self._audit = self._open_audit()
        self.listeners: Listeners | None = None
        self.metrics: MetricsServer | None = None
        self._nvml: Nvml | None = None

    async def start(self, bounds: list[Bound], tls: ssl.SSLContext | None, phases: Phases) -> bool:
        """Prove the engine, compute the configured system prompts, then let peers in; False where `stop` came before.

        Raises  ZlError: one of these failed
        """
        settings = self.build.settings
        if settings.metrics != "off":
            self._nvml = open_nvml()
            self.metrics = MetricsServer(settings.metrics, self._sources(), self.health)
        self.generation.start()
        with phases("first request"):
            try:
                await warm.prove(self.service, self._stop)
            except DeviceError as error:
                if self._stop.is_set() and self._failure is None:
                    return False
                why = f" ({self._failure})" if self._failure is not None else ""
                raise DeviceError(f"{error}{why}") from self._failure
        with phases("system prompts"):
            texts, shapes = settings.system_prompts, self.build.shapes
            n_kept, kept = await warm.keep_prompts(self.service, self.build.prompts, texts, shapes, self._stop)
        if self._stop.is_set():
            return False
        if kept:
            log.info("system prompts: %d kept, %d tokens on constant pages", n_kept, kept)
        self.service.start_counting()
        self.service.access, self.service.audit = self._access, self._audit
        self.listeners = await listen(bounds, self.net.connection, tls=tls)
        self.health.phase = Phase.READY
        self._notifier.ready(self._status())
        self.watchdog.start()
        return True

    async def wait(self) -> int:
        """Serve until `stop`, then drain; return the exit status."""
        await self._stop.wait()
        await self._drain()
        return 1 if self._failure is not None else 0

    def stop(self, hurry: bool = True) -> None:
        """Ask for the end: the first time drains, the second time ends at once, unless it is said without `hurry`."""
        if self._stop.is_set():
            self._hurry = self._hurry or hurry
            return
        event(log, logging.INFO, "draining", in_flight=self.service.in_flight, deadline_s=self._drain_s,
              second_signal="ends at once")  # fmt: skip
        self._notifier.stopping(f"draining {self.service.in_flight} requests", extend_s=self._drain_s + CLOSE_S)
        self._stop.set()

    def apply(self, settings: Settings) -> None:
        """Put into force what `ops.reload` may change here: token, limits, drain deadline."""
        self.net.auth_token = settings.auth_token.encode() or None
        self.net.limits = dataclasses.replace(self.net.limits, frame_timeout_s=settings.frame_timeout_s)
        self.dispatcher.limits = dataclasses.replace(self.dispatcher.limits, max_queue=settings.max_queue)
        self._drain_s = settings.drain_s

    def tell_ready(self) -> None:
        """Tell the service manager where the server is, after a reload."""
        self._notifier.ready(self._status() if self.health.live else self.health.reason)

    def reopen_logs(self) -> None:
        """Open the files of the journals anew, after a log rotator has moved them away."""
        for each in (self._access, self._audit):
            if each is not None:
                each.journal.reopen()

    async def close(self) -> None:
        """Give everything back, unless a step does not end: `stuck` then says so, and the process is to exit."""
        self.watchdog.stop()
        if self.listeners is not None:
            self.listeners.close()
        self.net.close_connections()
        begun = self._loop.time()
        while self.net.telling and self._loop.time() < begun + (TOLD_S if self._hurry else FLUSH_S):
            await asyncio.sleep(0.005)
        for each in (self._access, self._audit):  # every request has ended: nothing is put any more
            if each is not None:
                each.close()
        ending = asyncio.ensure_future(asyncio.to_thread(self.generation.stop))
        await asyncio.wait({ending}, timeout=STUCK_S if self.health.stuck else STOP_S)
        self.stuck = not ending.done()
        if self.stuck:
            log.error("the engine is stuck in a step and cannot be closed")
        else:
            await asyncio.sleep(0)  # results that the engine published while it stopped
            self.engine.close()
        self._prompt_thread.shutdown(cancel_futures=True)
        self.net.close()
        if self.metrics is not None:
            self.metrics.close()
        if self._nvml is not None:
            self._nvml.close()

    def _open_access(self) -> Access | None:
        settings = self.build.settings
        if settings.access_log == "off":
            return None
        return Access(settings.access_log, max_bytes=settings.log_bytes, keep=settings.access_files)

    def _open_audit(self) -> Audit | None:
        settings, build = self.build.settings, self.build
        if settings.audit_log == "off":
            return None
        return Audit(
            settings.audit_log, settings.audit_patterns, build.tokens, build.build_id,
            max_bytes=settings.log_bytes, keep=settings.audit_files,
        )  # fmt: skip

    def _status(self) -> str:
        names = " and ".join(self.listeners.names) if self.listeners is not None else "nothing"
        return f"{self.build.model.name} on {self.build.device.name}, listening on {names}"

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
        deadline = self._loop.time() + self._drain_s
        if self.listeners is not None:
            await self.listeners.finish(LAST_CALL_S, lambda: self._hurry)
        # An answer that is whole has still to reach a peer that reads slowly.
        while (self.service.in_flight or self.net.sending) and not self._hurry and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        if self.service.in_flight:
            log.warning("ending %d requests that did not finish", self.service.in_flight)
            self.service.end_all("the server stopped before the answer was complete")
        # Who has just connected, or asks again and again, is to hear DRAINING, not an end without a word.
        deadline = self._loop.time() + LAST_CALL_S
        while self.net.expecting and not self._hurry and self._loop.time() < deadline:
            await asyncio.sleep(0.005)

    def _info(self) -> codec.ServerInfo:
        build = self.build
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

    def _sources(self) -> dict[str, Read]:
        build, plan = self.build, self.build.memory
        planned = {"weights": plan.weights, "kv_pool": plan.kv_pool, "buffers": plan.buffers}
        parts = Parts(
            service=self.service,
            dispatcher=self.dispatcher,
            pages=self.pages,
            net=self.net.counters,
            health=self.health,
            generation=self.generation,
            arena=self.arena,
            guard=self._guard,
            memory=planned | (self._guard.memory if self._guard is not None else {}),
            sampled_by=SAMPLED_BY,
            build=(zl.__version__, build.model.name, build.build_id, build.device.name, self.engine.name),
        )
        return sources(parts) | (self._nvml.sources() if self._nvml is not None else {})


def check_ports(settings: Settings) -> None:
    """Refuse, before the model loads, a metrics port that cannot be had. Raises as MetricsServer."""
    if settings.metrics != "off":
        check_address(settings.metrics)


def check_journals(settings: Settings) -> None:
    """Refuse, before the model loads, a log of requests that cannot be written. Raises ConfigError."""
    if settings.access_log != "off":
        journal.check(settings.access_log, "access_log")
    if settings.audit_log != "off":
        journal.check(settings.audit_log, "audit_log", AUDIT_MODE)


def open_build(build: Build, say: Callable[[str], None]) -> Opened:
    """Allocate arena and columns and open the engine of a build."""
    run_ahead, settings = build.device.run_ahead, build.settings
    arena = Arena(settings.berths, settings.max_frame, register=build.device.register)
    # A guarded program has a row, a page and a slot more: the heartbeat's.
    captured = build.device.kind == "cuda" and build.dtype == "bfloat16"
    guarded = build.device.kind == "cpu" or captured
    shapes = with_canary(build.shapes) if guarded else build.shapes
    columns = RowColumns(shapes, build.device.allocate, np.frombuffer(arena.memory, np.uint8))
    n_slots = max(N_SLOTS, run_ahead + 1 + captured)
    slots = [StepSlot(shapes, build.device.allocate) for _ in range(n_slots)]
    engine = open_engine(
        build.device, build.model, build.weights, build.dtype, shapes, columns, slots,
        threads=settings.threads, level=settings.cpu_level, kv=settings.kv, say=say, canary=captured,
        penalty_filter=facts.filter_of(settings), debug_addresses=settings.debug_addresses == "on",
        mark=NvtxMark() if settings.nvtx == "on" else unmarked,
    )  # fmt: skip
    if isinstance(engine, NativeStep):
        guard = open_guard(engine, build.weights, columns, slots, shapes, settings.heartbeat_s)
        return Opened(guard, columns, slots[:-1], 0, arena)
    if captured:
        from zl.gpu.cuda_guard import open_cuda_guard  # here: it brings triton

        cuda_guard = open_cuda_guard(engine, build.weights, columns, slots, shapes, settings.heartbeat_s)
        return Opened(cuda_guard, columns, slots[:-1], run_ahead, arena)
    return Opened(engine, columns, slots, run_ahead, arena)
