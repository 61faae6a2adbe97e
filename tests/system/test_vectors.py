"""Every vector of tests/data/vectors against a real server: what index.json says, however the bytes are cut."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from zl.errors import Code
from zl.net.codec import decode_response
from zl.net.frames import FrameDecoder, Ping

pytestmark = pytest.mark.system

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text())


def cuts_of(data: bytes, how: str) -> list[bytes]:
    if how == "one write":
        return [data]
    if how == "byte by byte":
        return [data[i : i + 1] for i in range(len(data))]
    rng = random.Random(len(data))
    places = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(4))})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def exchange(port: int, pieces: list[bytes]) -> tuple[list, bool]:
    """Send the pieces, close our side, read to the end; return the events and whether the server closed by itself."""
    decoder, events = FrameDecoder(), []
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65_536):
            events += decoder.feed(data)
    assert decoder.eof() is None
    return events


def check(name: str, events: list) -> None:
    wanted = INDEX[name]
    if wanted.get("reply") == "ping":
        assert events == [Ping()] * wanted.get("count", 1)
        return
    frames = [decode_response(event.data) for event in events]
    assert frames[-1].is_finished
    assert sum(frame.is_finished for frame in frames) == 1
    last = frames[-1]
    if "error" in wanted:
        assert last.error is not None
        assert last.error.code == Code[wanted["error"]]
        assert last.error.message
    elif wanted["outcome"] == "ok":
        assert last.error is None, last.error
    if "request_id" in wanted:
        assert {frame.request_id for frame in frames} == {wanted["request_id"]}
    if "seed" in wanted:
        assert frames[0].seed == wanted["seed"]
    if "max_completion_tokens" in wanted:
        assert sum(len(frame.token_ids) for frame in frames) <= wanted["max_completion_tokens"]
    if last.usage is not None:
        assert last.usage.completion_tokens == sum(len(frame.token_ids) for frame in frames)
    b"".join(frame.text for frame in frames).decode()


@pytest.mark.parametrize("how", ["one write", "byte by byte", "random cuts"])
@pytest.mark.parametrize("name", sorted(INDEX))
def test_vector_gets_what_the_index_says(server, name, how):
    data = (VECTORS / f"{name}.bin").read_bytes()
    check(name, exchange(server.port, cuts_of(data, how)))


@pytest.mark.parametrize("name", [name for name, wanted in sorted(INDEX.items()) if wanted.get("closes")])
def test_framing_error_closes_the_connection(server, name):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall((VECTORS / f"{name}.bin").read_bytes())
        while sock.recv(65_536):
            pass


def test_the_server_reads_with_native_code(server):
    """Else the vectors above would have tried protobuf alone."""
    assert "INFO memory: " in server.text()  # this level is logged
    assert "without native code" not in server.text()


def test_vectors_through_nc(server):
    """`cat vector.bin | nc -N 127.0.0.1 PORT | xxd` as the README has it."""
    assert shutil.which("nc"), "install netcat-openbsd"
    assert shutil.which("xxd"), "install xxd"
    command = f"cat {VECTORS / 'minimal.bin'} | nc -N 127.0.0.1 {server.port} | xxd -p -c0"
    out = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert out.stderr == ""
    check("minimal", FrameDecoder().feed(bytes.fromhex(out.stdout.replace("\n", ""))))


def test_all_vectors_that_keep_the_connection_pipelined_on_one(server):
    """One connection, every request at once: each id gets its own answer."""
    names = [n for n, w in INDEX.items() if "request_id" in w]
    ids = [INDEX[name]["request_id"] for name in names]
    assert len(set(ids)) == len(ids)
    events = exchange(server.port, [b"".join((VECTORS / f"{name}.bin").read_bytes() for name in names)])
    by_id: dict[int, list] = {}
    for event in events:
        by_id.setdefault(decode_response(event.data).request_id, []).append(event)
    for name in names:
        check(name, by_id[INDEX[name]["request_id"]])
