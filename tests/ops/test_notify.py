"""sd_notify over a real datagram socket."""

from __future__ import annotations

import logging
import os
import socket

import pytest

from zl.ops.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def ear(request, tmp_path):
    """A manager's socket, and the NOTIFY_SOCKET that names it."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@zl-test-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        sock.settimeout(5)
        yield sock, address


def test_what_is_said_arrives_in_order(ear):
    sock, address = ear
    notifier = Notifier({"NOTIFY_SOCKET": address}, 1, monotonic=lambda: 12.5)
    notifier.status("starting:\nweights ", extend_s=2)
    notifier.ready("all is well")
    notifier.watchdog()
    notifier.reloading()
    notifier.stopping("draining 3 requests", extend_s=0.5)
    heard = [sock.recv(4096).decode().split("\n") for _ in range(5)]
    assert heard == [
        ["STATUS=starting: weights", "EXTEND_TIMEOUT_USEC=2000000"],
        ["READY=1", "STATUS=all is well"],
        ["WATCHDOG=1"],
        ["RELOADING=1", "MONOTONIC_USEC=12500000", "STATUS=reading the configuration"],
        ["STOPPING=1", "STATUS=draining 3 requests", "EXTEND_TIMEOUT_USEC=500000"],
    ]


def test_without_a_manager_nothing_happens():
    notifier = Notifier({"WATCHDOG_USEC": "1000000"}, 1)
    assert not notifier.listening
    assert notifier.watchdog_s == 0
    notifier.ready("x")
    notifier.watchdog()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "77"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "78"}, 0),  # another process of the service is watched
        ({"WATCHDOG_USEC": "0"}, 0),
        ({"WATCHDOG_USEC": "soon"}, 0),
        ({}, 0),
    ],
)
def test_the_watchdogs_period(environ, seconds):
    assert Notifier({"NOTIFY_SOCKET": "/run/x"} | environ, 77).watchdog_s == seconds


def test_a_manager_that_is_gone_is_complained_of_once_and_survived(tmp_path, caplog):
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}, 1)
    with caplog.at_level(logging.WARNING):
        notifier.ready("x")
        notifier.status("y")
    assert [record.getMessage() for record in caplog.records] == [
        "the service manager at NOTIFY_SOCKET cannot be told: No such file or directory"
    ]
    assert not Notifier({"NOTIFY_SOCKET": "vsock:2:1"}, 1).listening


def test_food_never_waits_for_a_manager_that_does_not_read(ear):
    sock, address = ear
    notifier = Notifier({"NOTIFY_SOCKET": address}, 1)
    for _ in range(2_000):  # net.unix.max_dgram_qlen is 512 at most by default: far past it
        notifier.watchdog()
    assert sock.recv(64) == b"WATCHDOG=1"
