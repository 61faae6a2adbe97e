"""A step that never ends, in a real process: the watchdog's food and readiness stop, the event loop goes on."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.ops.kit import pings
from zl.client import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

SLOWED = str(Path(__file__).parent / "slowed.py")
KNOWN_S = 2.0


def stalled(service, tmp_path, small):
    """A server whose engine is stuck in a step since the returned time, a connection from before, and the blocker."""
    blocker, path = tmp_path / "blocker", str(tmp_path / "s")
    server = service(tmp_path / "run", *small, "--listen", f"unix:{path}", script=SLOWED, STEP_BLOCKER=str(blocker))
    server.ready()
    server.manager.wait_for("WATCHDOG")
    before = socket.socket(socket.AF_UNIX)
    before.connect(path)
    assert pings(path, before)
    blocker.touch()
    client = Client(f"unix:{path}", timeout=60)
    at = time.monotonic()
    stream = client.stream("Hi", max_tokens=4, ignore_eos=True)  # the step that will not end
    held = blocker.with_name("blocker.held")
    while not held.exists():
        assert time.monotonic() < at + 10, "no step has begun"
        time.sleep(0.01)
    return server, path, before, client, stream, blocker, at


def test_a_stall_stops_food_and_readiness_within_2_s_while_the_event_loop_answers(service, tmp_path, small, tell):
    server, path, before, client, stream, blocker, at = stalled(service, tmp_path, small)
    with before, client:
        unready_after = 0.0
        while time.monotonic() < at + 4:
            assert pings(path, before), "the event loop answers on a connection that is there"
            if not pings(path) and not unready_after:
                unready_after = time.monotonic() - at
            time.sleep(0.05)
        last_fed = max(m.at for m in server.manager.said("WATCHDOG")) - at
        assert 0 < unready_after <= KNOWN_S
        assert last_fed <= KNOWN_S
        status = server.manager.said("STATUS")[-1].fields["STATUS"]
        assert status.startswith("the engine has made no progress for ")
        assert "the watchdog is not fed" in server.text()

        blocker.unlink()
        assert sum(len(chunk.token_ids) for chunk in stream) == 4
        server.manager.wait_for("WATCHDOG", since=time.monotonic(), seconds=KNOWN_S)
        assert pings(path)
        assert "listening on" in server.manager.said("STATUS")[-1].fields["STATUS"]
    assert server.close() == 0
    tell(f"stall: new connections refused after {unready_after:.2f} s, last watchdog message after {last_fed:.2f} s")


def test_the_watchdogs_signal_says_where_every_thread_stood(service, tmp_path, small):
    server, _, before, client, _, _, _ = stalled(service, tmp_path, small)
    with before, client:
        server.send(signal.SIGABRT)  # what systemd sends when it is not fed
        assert server.wait() == -signal.SIGABRT
    text = server.text()
    assert "Fatal Python error: Aborted" in text
    assert "in slowed" in text  # the step that the engine thread was in
    server.manager.close()


def test_a_stuck_engine_does_not_keep_a_server_from_ending(service, tmp_path, small):
    server, _, before, client, stream, _, at = stalled(service, tmp_path, small)
    with before, client:
        server.wait_log("the engine has made no progress")
        server.send(signal.SIGTERM)
        server.manager.wait_for("STOPPING", since=at)
        server.send(signal.SIGTERM)
        with pytest.raises(Exception, match="server stopped before the answer was complete"):
            list(stream)
        assert server.wait(30) == 1
    assert time.monotonic() - at < 15
    assert "the engine is stuck in a step" in server.text()
    server.manager.close()
