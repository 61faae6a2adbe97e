"""Signals from the first moment of a server to its last: a start that is ended, a second TERM, the first process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.procs import free_port
from tests.ops.kit import ROOT, Service
from zl.client import Client, ZlClientError
from zl.ops.signals import ALL, Signals, Stopped

# --- the handlers alone -----------------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in ALL}
    made = Signals()
    made.install()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_is_ended_once_and_what_it_takes_apart_is_left_in_peace(signals, number):
    with pytest.raises(Stopped) as caught:
        signal.raise_signal(number)
    assert caught.value.code == 0
    for _ in range(10):
        signal.raise_signal(number)
    with pytest.raises(Stopped):
        signals.check()


def test_one_that_got_lost_is_raised_at_the_next_phase(signals, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    class Thing:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    Thing()
    with pytest.raises(Stopped):
        signals.check()


def test_what_must_not_be_torn_apart_ends_first(signals):
    done = []
    with pytest.raises(Stopped), signals.held():
        signal.raise_signal(signal.SIGTERM)
        signals.check()
        done.append(True)
    assert done


def test_a_hangup_has_nothing_to_reload_yet(signals):
    signals.hangup_stops = False
    signal.raise_signal(signal.SIGHUP)
    signals.check()


def test_a_terminal_that_goes_ends_a_start_too(signals, monkeypatch):
    signals.hangup_stops = True
    monkeypatch.setattr("zl.ops.signals.has_terminal", lambda: False)
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGHUP)


def test_while_it_serves_calls_are_made_and_afterwards_none(signals):
    calls: list[str] = []
    signals.hold()
    signal.raise_signal(signal.SIGTERM)  # between the start and its loop
    with signals.serving(lambda call: call(), lambda: calls.append("stop"), lambda: calls.append("reload")):
        assert calls == ["stop"]
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
    for number in ALL:
        signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_IGN
    signals.check()
    signals.restore()  # what was told to stop stays deaf
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert calls == ["stop", "reload", "stop"]


def test_a_failed_start_gives_the_handlers_back():
    before = {number: signal.getsignal(number) for number in ALL}
    made = Signals()
    made.install()
    made.restore()
    assert {number: signal.getsignal(number) for number in ALL} == before


# --- processes --------------------------------------------------------------------------------------------------------


def until(condition, what: Service, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what.text()
        time.sleep(0.002)


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_more_signals_change_nothing_however_late_they_come(service, small, tmp_path, second):
    server = service(tmp_path / "run", *small, "--listen", f"unix:{tmp_path}/s").ready()
    server.send(second)
    while server.process.poll() is None:  # through the whole of the end, the interpreter's included
        server.send(second)
        server.send(signal.SIGHUP)
        time.sleep(0.005)
    assert server.wait() == 0
    assert "Traceback" not in server.text()
    assert "Warning" not in server.text()
    server.close()


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["as early as it can hear", "bound", "loading"])
def test_a_start_is_ended_with_status_0_and_leaves_no_socket(service, small, tmp_path, number, moment):
    path = tmp_path / "s"
    server = service(tmp_path / "run", *small, "--listen", f"unix:{path}")
    if moment == "as early as it can hear":
        until(lambda: caught_by(server.process.pid, number), server)
        assert not path.exists()
    else:
        until(path.exists, server)
        if moment == "loading":
            until(lambda: server.manager.said("STATUS"), server)
    server.send(signal.SIGHUP)
    at = server.send(number)
    server.send(number)
    assert server.wait(30) == 0, server.text()
    assert time.monotonic() - at < 20
    assert not path.exists()
    assert "Traceback" not in server.text()
    assert not server.manager.said("READY")
    if moment == "loading":
        assert "told to stop while starting" in server.text()
        assert server.manager.said("STOPPING")
    server.close()


def caught_by(pid: int, number: int) -> bool:
    """Say whether a process has a handler of its own for a signal: SigCgt in /proc/PID/status, proc(5)."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    # Python itself catches INT from its own start on; TERM is what says that ours are there.
    return bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & int(status["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_hangup_does_not_end_a_start(service, small, tmp_path):
    server = service(tmp_path / "run", *small, "--listen", f"unix:{tmp_path}/s")
    until(lambda: caught_by(server.process.pid, signal.SIGTERM), server)
    while not server.manager.said("READY"):
        assert server.process.poll() is None, server.text()
        server.send(signal.SIGHUP)
        time.sleep(0.02)
    server.ready()
    assert server.close() == 0


def own_pid_namespace() -> list[str]:
    """The command that makes a process the first of a namespace; none where this system lets nobody do so."""
    for more in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *more, "--fork", "--pid", "--mount-proc", "--kill-child"]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return []


@pytest.mark.system
@pytest.mark.timeout(120)
def test_the_first_process_of_a_container_hears_term_while_it_starts(service, small, tmp_path):
    unshare = own_pid_namespace()
    if not unshare:
        pytest.skip("no right to make a PID namespace")
    command = [*unshare, sys.executable, "-m", "zl", "serve", *small, "--listen", f"unix:{tmp_path}/s"]
    server = service(tmp_path / "run", instead=command)
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    until(lambda: (tmp_path / "s").exists(), server)
    (first,) = map(int, children.read_text().split())
    os.kill(first, signal.SIGTERM)
    assert server.wait(30) == 0
    assert not (tmp_path / "s").exists()
    assert not server.manager.said("READY")
    server.close()


# --- reload -----------------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_reload_after_a_full_disk_is_whole_and_tells_the_manager(service, small, tmp_path):
    config, address = tmp_path / "zl.toml", f"unix:{tmp_path}/s"
    config.write_text('[server]\nauth_token = "first"\n')
    server = service(tmp_path / "run", *small, "--config", str(config), "--listen", address).ready()
    config.write_text('[server]\nauth_token = "second"\nlog_file = "/dev/full"\n')
    server.reload()
    config.write_text('[server]\nauth_token = "third"\n')
    server.reload()
    for token, good in (("first", False), ("second", False), ("third", True)):
        with contextlib.ExitStack() as stack:
            if not good:
                stack.enter_context(pytest.raises(ZlClientError))
            with Client(address, auth_token=token) as client:
                client.ask("Hi", max_tokens=1)
    assert "WARNING log_file /dev/full: No space left on device, lines were lost lost=1" in server.text()
    assert "INFO reloaded changed=auth_token,log_file" in server.text()
    assert "Traceback" not in server.text()
    assert server.close() == 0


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize("which", ["config", "auth_token_file", "tls_key", "tls_cert", "log_file"])
def test_a_pipe_in_the_way_of_a_reload_stops_nothing(service, small, tmp_path, which):
    config, pipe, port = tmp_path / "zl.toml", tmp_path / "pipe", free_port()
    config.write_text("")
    server = service(tmp_path / "run", *small, "--config", str(config), "--listen", f"tcp:127.0.0.1:{port}").ready()
    os.mkfifo(pipe)
    if which == "config":
        pipe.replace(config)
    elif which.startswith("tls"):
        other = "tls_cert" if which == "tls_key" else "tls_key"
        config.write_text(f'[server]\n{which} = "{pipe}"\n{other} = "{sys.executable}"\n')
    else:
        config.write_text(f'[server]\n{which} = "{pipe}"\n')
    server.reload()
    with Client(f"tcp:127.0.0.1:{port}", timeout=10) as client:
        client.ask("Hi", max_tokens=1)
    if not which.startswith("tls"):  # without TLS from the start, its files wait for a restart
        assert "reload refused, the old configuration stays" in server.text()
    assert server.close() == 0


def test_the_script_and_the_module_run_the_same():
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"zl": "zl.__main__:main"}
