"""A whole server with a certificate: commands reach it, and it is exchanged under clients that reconnect."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench.procs import free_port
from tests.certificates import make
from tests.ops.kit import ROOT
from zl.client import Client, Pool, TlsFailed
from zl.net.codec import encode_request
from zl.net.frames import PING

ENV = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}


def zl(*arguments: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "zl", *arguments], input=stdin, capture_output=True, timeout=60,
                          check=False, env=ENV | env)  # fmt: skip


@pytest.fixture
def secure(service, small, tmp_path):
    """A server with a certificate; its address for clients, and the files of its certificate and the next."""
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    shutil.copy(first.cert, cert)
    shutil.copy(first.key, key)
    port = free_port()
    server = service(tmp_path / "run", *small, "--listen", f"tcp:127.0.0.1:{port}", "--listen", f"unix:{tmp_path}/s",
                     "--tls-cert", cert, "--tls-key", key).ready()  # fmt: skip
    yield server, f"tls:localhost:{port}", (cert, key), first, second
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    server.close()


def test_commands_over_tls(secure, tmp_path):
    server, address, _, first, _ = secure
    assert f"listening on tls:127.0.0.1:{address.rpartition(':')[2]} and unix:{tmp_path}/s: " in server.text()
    asked = zl("ask", "hi", "--max-tokens", "3", "--stats", "--connect", address, "--ca", first.cert)
    assert (asked.returncode, b"tokens, first after" in asked.stderr) == (0, True), asked.stderr
    assert zl("ask", "hi", "--max-tokens", "3", "--connect", address, ZL_CA=first.cert).stdout == asked.stdout
    refused = zl("ask", "hi", "--connect", address)
    assert refused.returncode == 1
    assert refused.stderr.count(b"\n") == 1
    assert b"not of an authority that this system knows" in refused.stderr

    sent = PING + b"".join(encode_request(request_id=i, messages=["hi"], max_tokens=3) for i in (1, 2))
    done = zl("nc", "--output", "json", "--ca", first.cert, address, stdin=sent)
    assert (done.returncode, done.stderr) == (0, b"")
    frames = [json.loads(line) for line in done.stdout.splitlines()]
    assert frames[0] == {"ping": True}
    assert sorted(each["request_id"] for each in frames if each.get("is_finished")) == [1, 2]
    cut = zl("nc", "--ca", first.cert, "--timeout", "20", address, stdin=PING + b"\0\0")
    assert cut.stdout == b"pong\n"
    assert cut.returncode in (3, 4)

    for more in ((), ("--client", "--connections", "2")):
        load = zl("load", "--streams", "8", "--tokens", "4", "--json", "--ca", first.cert, *more, address)
        assert load.returncode == 0, load.stderr
        assert json.loads(load.stdout)["requests"] >= 8

    (tmp_path / "switch.toml").write_text(f"""
[instances.blue]
address = "{address}"
unit = "blue"
[instances.green]
address = "tls:localhost:1"
unit = "green"
""")
    states = zl("switch", "--config", str(tmp_path / "switch.toml"), "--ca", first.cert)
    assert (states.returncode, states.stdout.splitlines()[0]) == (0, f"blue\tserves at {address}".encode())


def test_the_certificate_is_exchanged_while_clients_reconnect(secure, tmp_path):
    server, address, (cert, key), first, second = secure
    both = tmp_path / "both.pem"
    both.write_text(Path(first.cert).read_text() + Path(second.cert).read_text())
    stop = threading.Event()
    failures: list[BaseException] = []
    answers = [0, 0]

    def reconnect(i: int) -> None:
        try:
            while not stop.is_set():
                with Client(address, timeout=20, ca_file=both) as client:
                    answers[i] += bool(client.ask("hi", max_tokens=2, ignore_eos=True).token_ids)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=reconnect, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        with Client(address, ca_file=first.cert) as old, Pool(address, ca_file=second.cert) as early:
            with pytest.raises(TlsFailed, match="not of an authority in"):
                early.ask("hi")
            # One file after the other: a reload in between finds a key that is not the certificate's, and keeps both.
            shutil.copy(second.cert, cert)
            server.send(signal.SIGHUP)
            server.wait_log("old configuration stays")
            shutil.copy(second.key, key)
            server.reload()
            before = list(answers)
            assert old.ask("hi", max_tokens=2, ignore_eos=True).token_ids  # a connection from before lives on
            with pytest.raises(TlsFailed):
                Client(address, ca_file=first.cert)
            deadline = time.monotonic() + 10
            while True:
                try:
                    assert early.ask("hi", max_tokens=2, ignore_eos=True).token_ids  # the pool finds out by itself
                    break
                except TlsFailed:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            while min(a - b for a, b in zip(answers, before, strict=True)) < 3 and not failures:
                assert time.monotonic() < deadline + 10
                time.sleep(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not failures
