"""The life of a real process: what it tells the service manager, drain, ends by signals, reload."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.procs import free_port
from tests.certificates import self_signed
from tests.ops.kit import Service, pings
from zl.client import Client, Draining, Unauthenticated, ZlClientError
from zl.errors import Code
from zl.net.codec import decode_response, encode_request
from zl.net.frames import FrameDecoder

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

SLOWED = str(Path(__file__).parent / "slowed.py")
LONG = {"max_tokens": 400, "ignore_eos": True}


class Asker(threading.Thread):
    """One long answer on its own thread: its tokens so far, and how it ended."""

    def __init__(self, address: str, **options):
        super().__init__(daemon=True)
        self.address, self.options = address, LONG | options
        self.n_tokens = 0
        self.failure: ZlClientError | None = None
        self.finished = False
        self.first = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with Client(self.address, timeout=60) as client, client.stream("Hi", **self.options) as stream:
                for chunk in stream:
                    self.n_tokens += len(chunk.token_ids)
                    self.first.set()
                self.finished = True
        except ZlClientError as failure:
            self.failure = failure
        finally:
            self.first.set()


@pytest.fixture
def started(service, tmp_path, small) -> Callable[..., tuple[Service, str]]:
    """Start a server on a Unix socket; give it and its address."""

    def start(*flags, **environ) -> tuple[Service, str]:
        address = f"unix:{tmp_path / 's'}"
        return service(tmp_path / "run", *small, "--listen", address, *flags, **environ), address

    return start


def test_the_service_manager_hears_the_life_in_order(started, tmp_path):
    server, address = started("--listen", "tcp:127.0.0.1:0")
    server.ready()
    server.manager.wait_for("WATCHDOG")
    with Client(address) as client:
        assert client.ask("Hi", max_tokens=3).usage.completion_tokens <= 3
    server.reload()
    time.sleep(0.6)  # some more of the watchdog's food
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    server.close()
    order = [name for name in server.manager.order() if name != "WATCHDOG"]
    assert order == ["STATUS", "READY", "RELOADING", "READY", "STOPPING"]
    starting = [m.fields for m in server.manager.messages if "STATUS" in m.fields and "READY" not in m.fields]
    phases = [fields["STATUS"] for fields in starting if fields["STATUS"].startswith("starting: ")]
    assert phases[-2:] == ["starting: first request", "starting: system prompts"]
    assert "starting: weights and KV pool" in phases
    assert all(int(f["EXTEND_TIMEOUT_USEC"]) > 0 for f in starting if f["STATUS"].startswith("starting: "))
    reloading = server.manager.said("RELOADING")[0]
    assert abs(int(reloading.fields["MONOTONIC_USEC"]) / 1e6 - reloading.at) < 1.0
    ready = server.manager.said("READY")[0]
    assert re.search(rf"unix:{tmp_path}/s and tcp:127\.0\.0\.1:[1-9]\d+$", ready.fields["STATUS"])
    assert not [m for m in server.manager.said("WATCHDOG") if m.at < ready.at - 0.001]
    assert int(server.manager.said("STOPPING")[0].fields["EXTEND_TIMEOUT_USEC"]) > 30e6


def test_term_finishes_what_runs_and_turns_away_what_comes(started):
    server, address = started(script=SLOWED, STEP_S="0.004")
    server.ready()
    running = Asker(address)
    with Client(address) as idle:
        idle.ping()
        assert running.first.wait(20)
        at = server.send(signal.SIGTERM)
        server.manager.wait_for("STOPPING", since=at)
        with pytest.raises(Draining):
            idle.ask("Hi", max_tokens=1)
        running.join(30)
    assert (running.finished, running.n_tokens, running.failure) == (True, 400, None)
    assert server.close() == 0
    assert "draining in_flight=1" in server.text()
    assert "ends at once" in server.text()


@pytest.mark.parametrize("drain_s", ["30", "0"])
@pytest.mark.parametrize("how", ["has said nothing", "asked a moment ago"])
def test_one_who_asks_just_after_term_hears_why_there_is_no_answer(started, how, drain_s):
    server, address = started("--drain-s", drain_s)
    server.ready()
    client = Client(address)
    if how == "asked a moment ago":
        client.ask("Hi", max_tokens=1)
    server.manager.wait_for("STOPPING", since=server.send(signal.SIGTERM))
    time.sleep(0.3)  # it is on its way, and its sender was not on a core for a while
    with client, pytest.raises(Draining):
        client.ask("Hi", max_tokens=1)
    assert server.close() == 0


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_who_was_connected_before_term_is_told_however_many_there_are(started, kind):
    port = free_port()
    server, address = started("--listen", f"tcp:127.0.0.1:{port}")
    server.ready()
    socks = [socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX) for _ in range(200)]
    for sock in socks:
        sock.connect(("127.0.0.1", port) if kind == "tcp" else address.removeprefix("unix:"))
    server.send(signal.SIGTERM)
    for sock in socks:
        sock.sendall(encode_request(request_id=1, messages=["Hi"], max_tokens=1))
    for sock in socks:
        decoder, last = FrameDecoder(), None
        while last is None or not last.is_finished:
            data = sock.recv(4096)
            assert data, "an end without a word"
            for event in decoder.feed(data):
                last = decode_response(event.data)
        assert last.error is None or last.error.code == Code.DRAINING
        sock.close()
    assert server.close() == 0


def test_one_who_says_nothing_holds_a_stop_up_for_no_more_than_a_moment(started):
    server, address = started("--drain-s", "60")
    server.ready()
    with Client(address) as client:
        client.ping()
        at = server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - at < 10
    server.close()


def test_past_the_drain_deadline_answers_end_with_a_last_frame(started):
    server, address = started("--drain-s", "0.3", script=SLOWED, STEP_S="0.05")
    server.ready()
    running = [Asker(address) for _ in range(3)]
    assert all(each.first.wait(20) for each in running)
    at = server.send(signal.SIGTERM)
    assert server.wait() == 0
    assert 0.3 <= time.monotonic() - at < 4
    for each in running:
        each.join(20)
        assert isinstance(each.failure, Draining), each.failure  # the server's own words, not a broken stream
        assert each.failure.tokens_received == each.n_tokens > 0
    server.close()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_with_last_frames(started, second):
    server, address = started("--drain-s", "60", script=SLOWED, STEP_S="0.05")
    server.ready()
    running = [Asker(address) for _ in range(3)]
    assert all(each.first.wait(20) for each in running)
    server.manager.wait_for("STOPPING", since=server.send(signal.SIGTERM))
    at = server.send(second)
    assert server.wait() == 0
    assert time.monotonic() - at < 3
    for each in running:
        each.join(20)
        assert isinstance(each.failure, Draining), each.failure
    server.close()


def test_term_while_starting_is_no_failure(started, tmp_path):
    blocker = tmp_path / "blocker"
    blocker.touch()
    server, _ = started(script=SLOWED, STEP_BLOCKER=str(blocker))
    deadline = time.monotonic() + 60
    while not any("first request" in m.fields.get("STATUS", "") for m in list(server.manager.messages)):
        assert time.monotonic() < deadline, server.text()
        time.sleep(0.01)
    server.send(signal.SIGHUP)  # nothing to reload yet, and no reason to end
    time.sleep(0.2)
    server.send(signal.SIGTERM)
    time.sleep(0.2)
    blocker.unlink()
    assert server.wait() == 0, server.text()
    server.close()
    assert not server.manager.said("READY")
    assert not (tmp_path / "s").exists()
    assert "Traceback" not in server.text()


# --- reload -----------------------------------------------------------------------------------------------------------


def presented(port: int) -> str:
    """The common name of the certificate that a new connection is shown."""
    done = subprocess.run(
        f"openssl s_client -connect 127.0.0.1:{port} </dev/null 2>/dev/null | openssl x509 -noout -subject",
        shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip().rpartition("=")[2].strip()


def test_hup_reloads_what_can_be_and_names_what_cannot(service, tmp_path, small):
    port, log, access = free_port(), tmp_path / "zl.log", tmp_path / "access"
    token = tmp_path / "token"
    token.write_text("first")
    one, two = (self_signed(tmp_path / "tls", name, "IP:127.0.0.1") for name in ("one", "two"))
    config = tmp_path / "zl.toml"

    def write(files: tuple[str, str], limits: str, more: str = "") -> None:
        config.write_text(
            f'[server]\nauth_token_file = "{token}"\nlog_file = "{log}"\ntls_cert = "{files[0]}"\n'
            f'tls_key = "{files[1]}"\nlisten = ["unix:{tmp_path}/s", "tcp:127.0.0.1:{port}"]\n{more}[limits]\n{limits}'
            f'[logs]\naccess_log = "{access}"\n'
        )

    write(one, "max_queue = 5\n")
    server = service(tmp_path / "run", *small, "--config", str(config)).ready()
    address = f"unix:{tmp_path / 's'}"
    assert presented(port) == "one"
    old = Client(address, auth_token="first")

    token.write_text("second")
    log.rename(tmp_path / "rotated.log")
    access.rename(tmp_path / "rotated.access")
    write(two, "max_queue = 6\nberths = 17\n", 'log_level = "debug"\n')
    server.reload()
    assert presented(port) == "two"
    with pytest.raises(Unauthenticated):
        Client(address, auth_token="first").ask("Hi")
    with Client(address, auth_token="second") as client:
        client.ask("my secret prompt", max_tokens=2, ignore_eos=True)
    old.ask("Hi", max_tokens=1, ignore_eos=True)  # a conversation that was opened before goes on
    old.close()
    lines = log.read_text().splitlines()  # a new file: the rotated one has been let go
    says = "INFO reloaded changed=auth_token,tls_cert,tls_key,log_level,max_queue reopened=log_file,access_log"
    assert says in lines
    waiting = [line for line in lines if "needs a restart" in line]
    assert waiting == ["WARNING berths has changed and needs a restart setting=berths running=256 configured=17"]
    deadline = time.monotonic() + 10
    while access.read_text().count("\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    asked = [json.loads(line) for line in access.read_text().splitlines()]
    assert [entry["outcome"] for entry in asked] == ["unauthenticated", "length", "length"]
    assert "secret" not in access.read_text() + log.read_text()
    assert not (tmp_path / "rotated.access").read_text()
    assert "reloaded" not in (tmp_path / "rotated.log").read_text()

    broken = {
        "not valid TOML": "[server\n",
        "max_queue = -1": config.read_text().replace("max_queue = 6", "max_queue = -1"),
        "cannot be used": config.read_text().replace(two[1], one[1]),
        "log_file /nonexistent/x": config.read_text().replace(str(log), "/nonexistent/x"),
    }
    for why, text in broken.items():
        config.write_text(text)
        server.reload()
        last = log.read_text().splitlines()[-1]
        assert "reload refused, the old configuration stays" in last
        assert why in last
    assert presented(port) == "two"
    with Client(address, auth_token="second") as client:
        client.ask("Hi", max_tokens=1)
    assert pings(("127.0.0.1", port)) is False  # no TLS, no answer
    assert server.close() == 0


def test_max_queue_takes_effect_at_once(service, tmp_path, small):
    config = tmp_path / "zl.toml"
    config.write_text("[limits]\nmax_queue = 8\nmax_rows = 1\n")
    flags = (*small[:4], "--heartbeat-s", "0", "--config", str(config))
    address = f"unix:{tmp_path / 's'}"
    server = service(tmp_path / "run", *flags, "--listen", address, script=SLOWED, STEP_S="0.01").ready()
    running = Asker(address, max_tokens=300)
    assert running.first.wait(20)
    waiting = Asker(address, max_tokens=10)
    time.sleep(0.8)
    config.write_text("[limits]\nmax_queue = 1\nmax_rows = 1\n")
    server.reload()
    refused = Asker(address)
    refused.join(20)
    assert refused.failure is not None
    assert refused.failure.code is Code.OVERLOADED
    running.join(30)
    waiting.join(30)
    assert running.finished
    assert waiting.finished
    assert server.close() == 0


# --- a terminal that is closed ----------------------------------------------------------------------------------------

WITH_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)
if sys.argv[2] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "zl", "serve", *sys.argv[3:]])
"""


@pytest.mark.parametrize("how", ["plain", "nohup"])
def test_losing_the_terminal_ends_a_server_that_has_one_unless_nohup_says_no(service, tmp_path, small, how):
    controller, terminal = os.openpty()
    address = f"unix:{tmp_path / 's'}"
    command = [sys.executable, "-c", WITH_TERMINAL, str(terminal), how, *small, "--listen", address]
    server = service(tmp_path / "run", instead=command, pass_fds=(terminal,)).ready()
    os.close(terminal)
    os.close(controller)  # the kernel sends HUP to the session's leader
    if how == "plain":
        assert server.wait() == 0
        assert "the terminal is gone" in server.text()
    else:
        server.wait_log("reloaded")
        with Client(address) as client:
            client.ask("Hi", max_tokens=1)
    assert server.close() == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_losing_the_terminal_does_not_hurry_a_stop(service, tmp_path, small, first):
    controller, terminal = os.openpty()
    address = f"unix:{tmp_path / 's'}"
    become = WITH_TERMINAL.replace('"-m", "zl"', repr(SLOWED))
    command = [sys.executable, "-c", become, str(terminal), "plain", *small, "--listen", address]
    server = service(tmp_path / "run", instead=command, pass_fds=(terminal,), STEP_S="0.004").ready()
    os.close(terminal)
    running = Asker(address)
    assert running.first.wait(20)
    if first == signal.SIGTERM:
        server.manager.wait_for("STOPPING", since=server.send(first))
    os.close(controller)
    server.wait_log("the terminal is gone")
    server.send(signal.SIGHUP)  # of a shell, which tells its children too
    running.join(30)
    assert (running.finished, running.n_tokens, running.failure) == (True, 400, None)
    assert server.close() == 0


def test_an_answer_that_is_whole_reaches_a_peer_that_reads_late(started, tmp_path):
    server, address = started()
    server.ready()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address.removeprefix("unix:"))
        n = 60
        for i in range(n):
            sock.sendall(encode_request(request_id=i + 1, messages=["Hi"], max_tokens=200, ignore_eos=True))
        time.sleep(1.0)
        at = server.send(signal.SIGTERM)
        server.manager.wait_for("STOPPING", since=at)
        time.sleep(max(0.0, at + 4.0 - time.monotonic()))  # more than closing connections are waited for
        decoder, ended = FrameDecoder(), 0
        while ended < n:
            data = sock.recv(65_536)
            assert data, f"{ended} of {n} answers"
            for event in decoder.feed(data):
                ended += decode_response(event.data).is_finished
    assert server.close() == 0
