"""One serving process, from its first line of log to its exit status: sockets, build, server, signals, reload.

State: none that outlives `run`. Nothing imports this but the command line and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvloop

from zl.address import parse_address
from zl.build import prepare
from zl.config import Settings
from zl.errors import ZlError
from zl.exposure import warning
from zl.health import Phase
from zl.net.listen import Bound, bind_all, systemd_sockets, unbind
from zl.net.tls import Certificate, tls_context
from zl.ops import descriptors
from zl.ops.logs import Logs, event
from zl.ops.notify import Notifier
from zl.ops.reload import Reloader
from zl.ops.signals import Signals
from zl.phases import Phases, since_exec
from zl.server import Server, check_journals, check_ports, open_build
from zl.streams import Teller

log = logging.getLogger("zl")

PHASE_S = 600.0
"""How much longer the service manager is to wait from the beginning of each phase of a start."""


def run(settings: Settings, model: Path, notifier: Notifier, read: Callable[[], Settings], signals: Signals) -> int:
    """Serve `model` until a signal; return the exit status.

    read     gives the settings as a start would find them now, for a reload
    signals  installed
    Raises   ZlError: the start failed; Stopped: a signal has ended it
    """
    logs = Logs()
    logs.set(settings.log_level, settings.log_format, settings.log_file)
    # The watchdog ends a stuck server with SIGABRT: where each thread was then goes to stderr, native code included.
    faulthandler.enable(sys.stderr)

    def begun(name: str) -> None:
        signals.check()
        notifier.status(f"starting: {name}", extend_s=PHASE_S)

    phases = Phases(begun)
    descriptors.raise_limit()
    phases.add("interpreter and imports", since_exec())
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    bounds: list[Bound] = []
    try:
        with signals.held():  # a socket that is bound is in the list
            bounds += _bound(settings)
        if exposed := warning(((bound.name, bound.ip) for bound in bounds if bound.ip), settings):
            log.warning(exposed)
        check_ports(settings)
        check_journals(settings)
        build = prepare(replace(settings, model=str(model)), model, log.info, phases)
        with phases("weights and KV pool"):
            opened = open_build(build, log.info)
        signals.hold()
    except BaseException:
        try:
            signals.hold()
        finally:  # a signal that came in between is no reason to leave a socket file behind
            _unbind(bounds)
        raise

    async def main() -> int:
        try:
            with phases("wiring"):
                server = Server(build, opened, notifier)
        except BaseException:  # a log that cannot be opened, say
            _unbind(bounds)
            opened.engine.close()
            raise

        def apply(new: Settings) -> None:
            presented = tls_context(new.tls_cert, new.tls_key) if certificate is not None else None
            logs.set(new.log_level, new.log_format, new.log_file)
            if certificate is not None and presented is not None:
                certificate.use(presented)
            server.apply(new)

        reloader = Reloader(settings, read, apply)

        def hung_up() -> None:
            if signals.terminal_is_lost():
                log.info("the terminal is gone")
                server.stop(hurry=False)  # a shell and the kernel may both say so
                return
            serving = server.health.phase is Phase.READY
            if serving:
                notifier.reloading()
            try:
                if not reloader.reload():
                    now = reloader.settings
                    with contextlib.suppress(ZlError):  # a rotated file is let go of all the same
                        logs.set(now.log_level, now.log_format, now.log_file)
                server.reopen_logs()
            finally:
                if serving:
                    server.tell_ready()

        with signals.serving(asyncio.get_running_loop().call_soon_threadsafe, server.stop, hung_up):
            try:
                ready = await server.start(bounds, certificate.context if certificate else None, phases)
                if ready:
                    _announce(server, phases)
                status = await server.wait()
            finally:
                if server.listeners is None:
                    _unbind(bounds)
                await server.close()
        if server.stuck:
            logs.close()
            os._exit(1)  # leaving in the usual way would wait for a thread whose step does not end
        return status

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _bound(settings: Settings) -> list[Bound]:
    """Bind before the model loads: a port in use is known in a moment, and peers that connect meanwhile wait."""
    bounds = systemd_sockets(os.environ, os.getpid())
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)  # taken: no program that is started from here is to take them again
    if bounds:
        event(log, logging.INFO, "sockets come from the service manager; the setting listen is not used",
              sockets=", ".join(bound.name for bound in bounds))  # fmt: skip
        return bounds
    return bind_all(parse_address(text, port_zero=True) for text in settings.listen)


def _unbind(bounds: list[Bound]) -> None:
    for bound in bounds:
        unbind(bound)


def _announce(server: Server, phases: Phases) -> None:
    elapsed = since_exec()
    for line in phases.lines("ready", elapsed):
        log.info(line)
    assert server.listeners is not None
    build = server.build
    by = " by torch, the slow program" if server.engine.fallback else ""
    Teller()(
        f"zl: listening on {' and '.join(server.listeners.names)}: {build.model.name}, {build.dtype} on "
        f"{build.device.name}{by}, {build.shapes.max_rows} rows, ready after {elapsed:.1f} s"
    )
