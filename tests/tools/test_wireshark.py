"""tools/wireshark/zl.lua in tshark: field names and values of a session that was recorded between client and server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.fake_server import FakeServer
from tests.tools import pcap
from zl.client import Client, Overloaded
from zl.net.codec import encode_request

SCRIPT = Path(__file__).parents[2] / "tools" / "wireshark" / "zl.lua"

pytestmark = pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed (apt install tshark)")


def tshark(file: Path, *arguments: str) -> str:
    done = subprocess.run(["tshark", "-X", f"lua_script:{SCRIPT}", "-r", str(file), *arguments], capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    # tshark names the super-user on stderr; anything about Lua there is an error in the script.
    assert "lua" not in done.stderr.lower() or "dangerous" in done.stderr, done.stderr
    return done.stdout


class Tap:
    """Stands between client and server and writes down who sent what."""

    def __init__(self, address: str):
        host, port = address.removeprefix("tcp:").rsplit(":", 1)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._server = socket.create_connection((host, int(port)))
        self.address = f"tcp:127.0.0.1:{self._listening.getsockname()[1]}"
        self.segments: list[tuple[str, bytes]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._thread.join(10)
        for each in (self._listening, self._server, self._client):
            each.close()

    def _run(self):
        self._client, _ = self._listening.accept()
        back = threading.Thread(target=self._copy, args=(self._server, self._client, "server"))
        back.start()
        self._copy(self._client, self._server, "client")
        back.join(10)

    def _copy(self, source, target, side):
        with contextlib.suppress(OSError):  # one side may have left without reading all
            while data := source.recv(65_536):
                self.segments.append((side, data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def session():
    """A conversation with a ping, a hello, an answer, an error and a cancel, as it went over the socket."""
    with FakeServer() as server, Tap(server.address) as tap, Client(tap.address, timeout=10) as client:
        client.ping()
        client.hello()
        client.ask("say hello world", system="be kind", temperature=0.7, seed=5, stop="x", logprobs=True)
        with pytest.raises(Overloaded):
            client.ask("fail OVERLOADED")
        with client.stream("endless") as stream:
            next(stream)
    return tap.segments


def test_a_recorded_session_is_shown_with_field_names(session, tmp_path):
    pcap.write(tmp_path / "s.pcap", session)
    text = tshark(tmp_path / "s.pcap", "-O", "zl")
    for words in (
        "Request", "Response", "Ping: True", "operation: HELLO (2)", "messages: say hello world", "seed: 5",
        "system_prompt: be kind", "temperature: 0.7", "stop: x", "text: hello ", "token_ids: [1]", "logprobs: [-0.5]",
        "finish_reason: STOP (1)", "prompt_tokens: 7", "code: OVERLOADED (5)", "retry_after_ms: 1500", "model: fake",
        "operation: CANCEL (1)",
    ):  # fmt: skip
        assert words in text, words
    assert "Malformed" not in text
    assert "Wrong" not in text
    columns = tshark(tmp_path / "s.pcap", "-Y", "zl.response.text", "-T", "fields", "-e", "zl.response.text", "-e",
                     "zl.response.request_id")  # fmt: skip
    assert "hello ,world " in columns or "hello \t" in columns
    summary = tshark(tmp_path / "s.pcap", "-Y", "zl")
    assert "GENERATE 2;" in summary
    assert "error OVERLOADED 3;" in summary
    assert "ping;" in summary


def test_frames_are_put_together_across_segments(session, tmp_path):
    """The same bytes a few at a time, or all at once, show the same fields."""
    def fields(name: str) -> list[str]:
        out = tshark(tmp_path / name, "-T", "fields", "-e", "zl.length", "-e", "zl.request.messages", "-e",
                     "zl.response.text")  # fmt: skip
        return [value for line in out.split() for value in line.split(",") if value]

    whole = {side: b"".join(data for each, data in session if each == side) for side in ("client", "server")}
    joined = [(side, whole[side]) for side in whole]
    cut = [(side, data[i : i + 7]) for side, data in joined for i in range(0, len(data), 7)]
    pcap.write(tmp_path / "joined.pcap", joined)
    pcap.write(tmp_path / "cut.pcap", cut)
    assert len(fields("joined.pcap")) > 20
    assert sorted(fields("joined.pcap")) == sorted(fields("cut.pcap"))


def test_broken_and_foreign_bytes_are_called_malformed(tmp_path):
    bad = b"\0\0\0\x08\x12\xf4\x03short"
    pcap.write(tmp_path / "bad.pcap", [("client", encode_request(request_id=1, messages=["hi"])), ("client", bad),
                                       ("client", b"GET / HTTP/1.1\r\n\r\n")])  # fmt: skip
    text = tshark(tmp_path / "bad.pcap", "-O", "zl")
    assert "messages: hi" in text
    assert "length 500, but 5 bytes are left" in text
    assert text.count("malformed") == 2


def test_another_port_is_a_matter_of_decode_as(session, tmp_path):
    pcap.write(tmp_path / "other.pcap", session, server_port=9_000)
    assert "messages: say hello world" not in tshark(tmp_path / "other.pcap", "-O", "zl")
    text = tshark(tmp_path / "other.pcap", "-d", "tcp.port==9000,zl", "-O", "zl")
    assert "messages: say hello world" in text
    assert "text: hello" in text
