"""zl/metrics/http.py: scrapes and probes over a real port."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.error
import urllib.request

import pytest

from zl.address import parse_host_port
from zl.errors import ConfigError, ZlError
from zl.health import Health, Phase
from zl.metrics.http import MetricsServer, check_address


class Clock:
    now = 100.0
    turned_at = 100.0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    health = Health(lambda: clock.turned_at, clock=lambda: clock.now)
    health.phase = Phase.READY
    return health


@pytest.fixture
def server(health):
    server = MetricsServer("127.0.0.1:0", {"zl_queue_depth": lambda: 3}, health)
    yield server
    server.close()


def get(server, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers["Content-Type"], refused.read().decode()


def test_metrics_in_the_format_that_was_asked_for(server):
    status, kind, body = get(server, "/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert "zl_queue_depth 3.0\n" in body
    assert "process_resident_memory_bytes " in body
    status, kind, body = get(server, "/metrics?x=1", Accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_probes_of_a_server_that_is_well(server):
    assert get(server, "/livez") == (200, "text/plain; charset=utf-8", "alive\n")
    assert get(server, "/readyz") == (200, "text/plain; charset=utf-8", "ready\n")


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING])
def test_starting_and_draining_are_alive_and_not_ready(server, health, phase):
    health.phase = phase
    assert get(server, "/livez")[0] == 200
    assert get(server, "/readyz")[::2] == (503, f"{phase.value}\n")


def test_a_failed_engine_is_neither(server, health):
    health.phase = Phase.FAILED
    assert get(server, "/livez")[::2] == get(server, "/readyz")[::2] == (503, "failed\n")


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DRAINING])
def test_a_stalled_engine_flips_both_probes_within_two_seconds(server, health, clock, phase):
    health.phase = phase
    clock.now = clock.turned_at + 1.0
    assert get(server, "/livez")[0] == 200
    clock.now = clock.turned_at + 2.0
    reason = "the engine has made no progress for 2.0 s\n"
    assert get(server, "/livez")[::2] == get(server, "/readyz")[::2] == (503, reason)
    clock.turned_at = clock.now
    assert get(server, "/livez")[0] == 200


def test_another_path_names_those_there_are(server):
    status, _, body = get(server, "/")
    assert status == 404
    assert "/metrics, /livez and /readyz" in body


def test_a_figure_that_cannot_be_read_is_an_error_and_not_silence(health, caplog):
    server = MetricsServer("127.0.0.1:0", {"zl_queue_depth": lambda: 1 / 0}, health)
    try:
        status, _, body = get(server, "/metrics")
        assert (status, "ZeroDivisionError" in body) == (500, True)
        assert "could not be read" in caplog.text
        assert get(server, "/livez")[0] == 200
    finally:
        server.close()


def test_a_peer_that_says_nothing_holds_up_neither_others_nor_the_end(server):
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server, "/livez")[0] == 200
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize("address", ["9433", "host:", ":9433", "h:p", "::1:9433", "127.0.0.1:65536", "127.0.0.1:²"])
def test_an_address_that_is_none_is_refused_as_everywhere(health, address):
    with pytest.raises(ConfigError) as said:
        parse_host_port(address, port_zero=True, example=9433)
    for take in (check_address, lambda address: MetricsServer(address, {}, health)):
        with pytest.raises(ConfigError) as caught:
            take(address)
        assert str(caught.value) == f"metrics: {said.value}; or say off"


def test_a_port_in_use_is_named(server, health):
    with pytest.raises(ZlError, match=f"127.0.0.1:{server.port} is in use") as caught:
        MetricsServer(f"127.0.0.1:{server.port}", {}, health)
    assert caught.value.exit_status == 1  # whoever has it may let go of it before the next start


def test_a_port_in_use_is_known_before_anything_is_served(server):
    with pytest.raises(ZlError, match=f"127.0.0.1:{server.port} is in use"):
        check_address(f"127.0.0.1:{server.port}")
    check_address("127.0.0.1:0")


@pytest.mark.parametrize("wrong", [BrokenPipeError(32, "Broken pipe"), ConnectionResetError(), TimeoutError()])
def test_a_scraper_that_leaves_before_its_answer_is_not_our_failure(server, monkeypatch, capfd, caplog, wrong):
    def broken(self, body):
        raise wrong

    monkeypatch.setattr("socketserver._SocketWriter.write", broken)
    with pytest.raises(http.client.RemoteDisconnected):
        get(server, "/metrics")
    monkeypatch.undo()
    assert get(server, "/metrics")[0] == 200
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_a_connection_that_fails_by_our_mistake_is_in_the_log(server, monkeypatch, caplog):
    monkeypatch.setattr("zl.metrics.http._Handler._metrics", lambda self: 1 / 0)
    with pytest.raises(http.client.RemoteDisconnected):
        get(server, "/metrics")
    assert "could not be served" in caplog.text
    assert "ZeroDivisionError" in caplog.text
