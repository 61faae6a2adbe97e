"""`zl frame`, `zl nc`, `zl dissect`, `zl load` as processes in pipes, against the fake server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.certificates import make
from tests.fake_server import FakeServer
from zl.errors import Code, RequestError
from zl.net.codec import decode_request, encode_error, encode_request, encode_tokens, pack_tokens
from zl.net.frames import PING
from zl.tools.netcat import exchange

ENV = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONUNBUFFERED": "1"}


def zl(*arguments: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "zl", *arguments], input=stdin, capture_output=True, timeout=60,
                          check=False, env=ENV | env)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with FakeServer() as running:
        yield running


def request(done: subprocess.CompletedProcess[bytes]):
    assert done.returncode == 0, done.stderr
    assert int.from_bytes(done.stdout[:4], "big") == len(done.stdout) - 4
    return decode_request(done.stdout[4:])


def test_frame_from_flags_has_every_field():
    flags = ("--id 9 --system s --context c --type creative --temperature 0 --top-p 0.5 --repetition-penalty 1.25 "
             "--max-tokens 3 --seed 7 --deadline-ms 50 --stop x --stop y --ignore-eos --logprobs")  # fmt: skip
    made = request(zl("frame", "Hi", "Hello", "Bye", *flags.split()))
    assert made == decode_request(encode_request(
        request_id=9, messages=["Hi", "Hello", "Bye"], system="s", context="c", type=2, temperature=0, top_p=0.5,
        repetition_penalty=1.25, max_tokens=3, seed=7, deadline_ms=50, stop=["x", "y"], ignore_eos=True, logprobs=True,
    )[4:])  # fmt: skip


def test_frame_makes_pings_cancels_hellos_and_token_requests():
    assert zl("frame", "--ping").stdout == PING
    assert request(zl("frame", "--cancel", "--id", "5")).operation == 1
    hello = request(zl("frame", "--hello", "--auth-token", "t"))
    assert (hello.operation, hello.auth_token) == (2, b"t")
    tokens = request(zl("frame", "--tokens", "504 3575", "--system", "1,2"))
    assert (tokens.encoding, tokens.messages, tokens.system) == (1, [pack_tokens([504, 3575])], pack_tokens([1, 2]))


def test_frame_reads_json_objects_and_proto_text():
    records = b'{"system": "s", "messages": ["Hi"], "temperature": 0.7}\n{"id": 40, "messages": [[5, 6]]} ' \
              b'{"messages": [{"base64": "/w=="}], "type": "SUMMARIZE"}'  # fmt: skip
    done = zl("frame", "--json", stdin=records)
    made = [encode_request(request_id=1, system="s", messages=["Hi"], temperature=0.7),
            encode_request(request_id=40, messages=[pack_tokens([5, 6])], encoding=1),
            encode_request(request_id=2, messages=[b"\xff"], type=1)]  # fmt: skip
    assert done.stdout == b"".join(made)
    done = zl("frame", "--proto", stdin=b'messages: "Hi" temperature: 700000 request_id: 3')
    assert done.stdout == encode_request(request_id=3, messages=["Hi"], temperature=0.7)


@pytest.mark.parametrize(("closed", "words"), [("<&-", "input is closed"), (">&-", "output is closed")])
def test_nc_without_a_standard_stream_says_so(server, closed, words):
    command = f"{sys.executable} -m zl nc {server.address} {closed}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr.count(b"Traceback")) == (2, 0)
    assert words in done.stderr.decode()



@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (("--json",), b'{"message": ["Hi"]}', "no field is called 'message'"),
        (("--json",), b'{"messages": ["Hi"]} [1]', "no JSON object"),
        (("--json",), b'{"messages": ["Hi"],\n "seed" 7}', "line 2, column 9"),
        (("--json",), b'{"messages": [{"image": 1}]}', "messages cannot be"),
        (("--json",), b'{"messages": ["Hi"], "max_tokens": -1}', "object 1"),
        (("--proto",), b'message: "Hi"', "1:1"),
        (("--tokens", "five"), b"", "no list of numbers"),
        (("--ping", "Hi"), b"", "leave one of them out"),
    ],
)
def test_frame_ends_wrong_use_with_2_and_says_where(arguments, stdin, words):
    done = zl("frame", *arguments, stdin=stdin)
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr.decode()


def test_nc_prints_text_json_or_raw(server):
    frames = encode_request(request_id=1, messages=["say a b"]) + PING
    frames += encode_request(request_id=2, messages=["say c"])
    done = zl("nc", server.address, stdin=frames)
    assert done.returncode == 0
    assert sorted(done.stdout.decode().splitlines()) == ["a b ", "c ", "pong"]
    done = zl("nc", "--output", "json", server.address, stdin=encode_request(request_id=1, messages=["say a"]))
    first, last = map(json.loads, done.stdout.splitlines())
    assert first == {"request_id": 1, "token_ids": [1], "seed": 99, "text": "a "}
    assert (last["is_finished"], last["finish_reason"], last["usage"]["prompt_tokens"]) == (True, "STOP", 7)
    raw = zl("nc", "--output", "raw", server.address, stdin=encode_request(request_id=1, messages=["say a"]))
    assert raw.stdout.startswith(encode_tokens(1, [1], b"a ", None, 99))


def test_nc_sends_files_in_order_and_keeps_answers_apart(server, tmp_path):
    for i in (1, 2, 3):
        (tmp_path / str(i)).write_bytes(encode_request(request_id=i, messages=[f"say {i} {i}"]))
    done = zl("nc", server.address, *(str(tmp_path / str(i)) for i in (1, 2, 3)))
    assert done.returncode == 0
    assert sorted(done.stdout.decode().splitlines()) == ["1 1 ", "2 2 ", "3 3 "]


@pytest.mark.parametrize(
    ("question", "status", "words"),
    [
        ("say fine", 0, ""),
        ("fail OVERLOADED", 3, "request 1: OVERLOADED: told to fail: OVERLOADED (retry after 1500 ms)"),
        ("fail-late INTERNAL", 3, "INTERNAL"),
        ("break", 4, "before request 1 was answered"),
        ("garbage", 4, "does not speak zl's protocol"),
        ("silent", 4, "before request 1 was answered"),
    ],
)
def test_nc_status_says_how_it_went(server, question, status, words):
    frame = encode_request(request_id=1, messages=[question])
    done = zl("nc", "--timeout", "1", server.address, stdin=frame)
    assert (done.returncode, words in done.stderr.decode()) == (status, True), done.stderr


def test_nc_gives_up_on_a_server_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        done = zl("nc", "--timeout", "0.3", f"tcp:127.0.0.1:{listening.getsockname()[1]}", stdin=PING)
    assert (done.returncode, done.stdout) == (4, b"")
    assert b"silent for too long" in done.stderr


@pytest.mark.parametrize("pongs", [b"", PING])
def test_nc_says_when_a_ping_is_not_answered(tmp_path, pongs):
    path = str(tmp_path / "s")

    def close_on_pings(sock: socket.socket) -> None:
        with sock, sock.accept()[0] as peer:
            peer.recv(100)
            peer.sendall(pongs)
            peer.shutdown(socket.SHUT_WR)
            peer.recv(100)

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    thread = threading.Thread(target=close_on_pings, args=(listening,))
    thread.start()
    done = zl("nc", f"unix:{path}", stdin=PING * 2)
    thread.join()
    assert (done.returncode, done.stdout) == (4, b"pong\n" if pongs else b"")
    assert b"instead of answering a ping" in done.stderr


def test_nc_without_a_server_ends_with_4_and_wrong_use_with_2(tmp_path):
    assert zl("nc", f"unix:{tmp_path}/none").returncode == 4
    assert zl("nc", "localhost").returncode == 2
    assert zl("nc", f"unix:{tmp_path}/none", str(tmp_path / "nothing")).returncode == 2


@pytest.mark.parametrize("arguments", [("nc",), ("ask", "say x", "--connect"), ("chat", "--connect"), ("load",)])
def test_a_tcp_address_of_a_server_with_tls_is_corrected(arguments, tmp_path):
    with FakeServer(tls=make(tmp_path, "here").context()) as server:
        question = b"say x\n" if arguments[0] == "chat" else encode_request(request_id=1, messages=["say x"])
        done = zl(*arguments, server.address.replace("tls:", "tcp:"), stdin=question)
        (line,) = done.stderr.decode().splitlines()
        assert line.endswith(server.address)
        assert "certificate and must be called" in line if arguments[0] == "load" else "speaks TLS: use" in line
        assert done.returncode == {"nc": 4, "ask": 1, "chat": 0, "load": 4}[arguments[0]]
        pinged = zl("nc", server.address.replace("tls:", "tcp:"), stdin=PING)
        assert (pinged.returncode, b"speaks TLS: use" in pinged.stderr) == (4, True)


def test_nc_streams_what_a_slow_pipe_gives(server):
    with subprocess.Popen([sys.executable, "-m", "zl", "nc", server.address], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, env=ENV) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(PING)
        process.stdin.flush()
        assert process.stdout.readline() == b"pong\n"  # while stdin is still open
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_nc_ends_at_once_and_quietly_when_the_server_closes_first(kind, tmp_path):
    pair = make(tmp_path, "here")
    with (
        FakeServer(tls=pair.context() if kind == "tls" else None) as server,
        subprocess.Popen([sys.executable, "-m", "zl", "nc", "--ca", pair.cert, server.address], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV) as process,
    ):  # fmt: skip
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(encode_request(request_id=1, messages=["break"]))
        process.stdin.flush()
        assert process.wait(30) == 4  # while stdin is still open
        (line,) = process.stderr.read().decode().splitlines()
        assert line == "zl: the server closed the connection before request 1 was answered"


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_the_sender_of_nc_is_gone_when_nc_is(kind, tmp_path, capfd):
    """Also where it has sent all, and waits for answers before it says goodbye."""
    pair = make(tmp_path, "here")
    (tmp_path / "frame").write_bytes(encode_request(request_id=1, messages=["break"]))
    before = threading.active_count()
    with FakeServer(tls=pair.context() if kind == "tls" else None) as server:
        assert exchange(server.address, [str(tmp_path / "frame")], "text", 10, pair.cert) == 4
        assert threading.active_count() == before + 1  # the server's
    assert capfd.readouterr().out == "one two \n"


def test_a_pipe_of_the_three_explains_an_answer(server):
    frame = zl("frame", "say hello")
    answer = zl("nc", "--output", "raw", server.address, stdin=frame.stdout)
    shown = zl("dissect", "-", stdin=answer.stdout)
    assert shown.returncode == 0
    lines = shown.stdout.decode().splitlines()
    assert lines[0].startswith("from the server")
    assert lines[-1] == "fine"
    assert any("text (LEN field 5): 6 bytes: 'hello '" in line for line in lines)


def test_dissect_shows_what_an_error_says_whole():
    words = "messages[0]: 812 tokens and 300 to generate are more than the 1,024 that this server has room for, café"
    answer = encode_error(RequestError(Code.LIMIT_EXCEEDED, words), 1)
    assert words in zl("dissect", "-", stdin=answer).stdout.decode()


def test_dissect_names_what_is_wrong_and_ends_with_1(tmp_path):
    file = tmp_path / "bad.bin"
    file.write_bytes(b"\0\0\0\x08\x12\xf4\x03short")
    done = zl("dissect", str(file))
    text = done.stdout.decode()
    assert done.returncode == 1
    assert "length 500, but 5 bytes are left" in text
    assert text.splitlines()[-1].startswith("wrong at offset 5, in frame 1")
    assert "\x1b" not in text  # colour is for terminals
    assert zl("dissect", "-", stdin=PING).stdout.decode().splitlines()[0].endswith(" 4 bytes, 1 frame")
    quiet = zl("dissect", "-q", "--from", "client", str(file)).stdout.decode()
    assert quiet.splitlines() == text.splitlines()[-1:]
    assert zl("dissect", str(tmp_path / "none")).returncode == 2


def test_dissect_colours_on_a_terminal():
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "zl", "dissect", "-"], stdin=subprocess.PIPE, stdout=slave,
                          env=ENV) as process:  # fmt: skip
        os.close(slave)
        process.communicate(b"\0\0\0\x02\0\1", timeout=30)
        assert process.returncode == 1
    fcntl.fcntl(master, fcntl.F_SETFL, os.O_NONBLOCK)
    shown = os.read(master, 65_536)
    os.close(master)
    assert b"\x1b[1;31m" in shown
    assert b"field number 0" in shown


def test_load_against_the_echo_server_counts_every_frame():
    done = zl("load", "--echo", "--streams", "8", "--tokens", "20", "--per-stream", "2", "--json")
    figures = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (figures["requests"], figures["failed"], figures["tokens"], figures["frames"]) == (16, 0, 320, 320)
    assert figures["client_cpu_s"] > 0
    assert figures["server_cpu_s"] >= 0
    for arguments in (("--connections", "1"), ("--client",), ("--shared-words", "40"),
                      ("--rate", "40", "--seconds", "1"), ("--idle", "20"), ("--long-words", "100")):  # fmt: skip
        done = zl("load", "--echo", "--streams", "4", "--tokens", "20", *arguments)
        assert done.returncode == 0, done.stderr
        text = done.stdout.decode()
        assert " 0 failed" in text
        assert "time to first token" in text
        assert "#" in text


@pytest.mark.parametrize("line", ["{nc} --output json FILE", "--output json {nc} FILE", "{nc} FILE --output json",
                                  "{nc} FILE --output json FILE", "{nc} --output json -- FILE", "{nc} --output json -"])
def test_files_may_stand_behind_flags(server, tmp_path, line):
    file = tmp_path / "hi.bin"
    file.write_bytes(zl("frame", "say a").stdout)
    words = line.format(nc=server.address).replace("FILE", str(file)).split()
    done = zl("nc", *words, stdin=file.read_bytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert all(b"request_id" in each for each in done.stdout.splitlines())


def test_turns_may_stand_behind_flags_and_a_flag_that_is_none_is_refused():
    made = request(zl("frame", "a", "--id", "3", "b", "--seed", "1", "c"))
    assert (made.request_id, made.messages) == (3, [b"a", b"b", b"c"])
    assert request(zl("frame", "a", "--id", "3", "--", "--sed")).messages == [b"a", b"--sed"]
    wrong = zl("frame", "a", "--id", "3", "b", "--sed", "1")
    assert (wrong.returncode, b"unknown flag --sed" in wrong.stderr) == (2, True)
    bare = zl("nc")
    assert (bare.returncode, b"required: ADDR\n" in bare.stderr) == (2, True)


def test_ctrl_c_ends_load_and_its_echo_server_without_a_word():
    command = [sys.executable, "-m", "zl", "load", "--echo", "--streams", "4", "--tokens", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (found := children.read_text().split()):
        threading.Event().wait(0.01)
    threading.Event().wait(0.5)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 130
    assert not os.path.exists(f"/proc/{found[0]}")


def test_the_echo_server_ends_with_whoever_started_it(tmp_path):
    with subprocess.Popen([sys.executable, "-m", "zl.tools.echo", str(tmp_path / "s")], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, env=ENV) as process:  # fmt: skip
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        assert process.wait(30) == 0


def test_load_reads_prompts_with_their_own_lengths(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": ["a"], "max_tokens": 3}\n{"system": "s", "messages": ["b"], "max_tokens": 5}\n')
    done = zl("load", "--echo", "--scenario", "mixed", "--streams", "2", "--prompts", str(file), "--json")
    assert json.loads(done.stdout)["tokens"] == 8
    file.write_text("{}\n")
    done = zl("load", "--echo", "--prompts", str(file))
    assert (done.returncode, b"max_tokens" in done.stderr) == (2, True)
    assert zl("load", "--echo", "--scenario", "mixed").returncode == 2
    both = zl("load", "--echo", "unix:/x")
    assert (both.returncode, b"leave unix:/x out, or --echo" in both.stderr) == (2, True)
    assert zl("load", f"unix:{tmp_path}/none").returncode == 4


def test_load_says_the_token_and_names_the_refusal_where_it_has_none(tmp_path):
    file = tmp_path / "token"
    file.write_text("hush\n")
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"messages": ["say a"], "max_tokens": 3}\n' * 2)
    load = ["load", "--streams", "2", "--prompts", str(asked)]
    with FakeServer(auth_token=b"hush") as locked:
        for more, env in ((["--auth-token-file", str(file)], {}), ([], {"ZL_AUTH_TOKEN": "hush"}),
                          (["--client"], {"ZL_AUTH_TOKEN": "hush"})):  # fmt: skip
            done = zl(*load, locked.address, *more, **env)
            assert (done.returncode, b" 0 failed" in done.stdout) == (0, True), done.stderr
        for env in ({}, {"ZL_AUTH_TOKEN": "wrong"}):
            done = zl(*load, locked.address, **env)
            assert (done.returncode, b"UNAUTHENTICATED" in done.stderr) == (4, True), done.stderr


def test_load_finds_the_server_as_ask_does(tmp_path):
    done = zl("load", "--streams", "1", ZL_CONNECT=f"unix:{tmp_path}/none")
    assert (done.returncode, f"unix:{tmp_path}/none" in done.stderr.decode()) == (4, True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "zl.sock"))
    done = zl("load", "--streams", "1", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, f"unix:{tmp_path}/zl.sock" in done.stderr.decode()) == (4, True)


def test_load_reports_a_server_that_hangs_up_or_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp:127.0.0.1:{listening.getsockname()[1]}"
        done = zl("load", address, "--streams", "1", "--tokens", "4", "--timeout", "0.2")
        assert (done.returncode, b"no token has come for 0.2 s" in done.stderr) == (4, True)

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    listening.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        done = zl("load", address, "--streams", "1", "--tokens", "4")
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert done.returncode == 4
        assert b"requests failed" in done.stderr


def test_load_shows_progress_on_a_terminal(server):
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "zl", "load", server.address, "--prompts", "/dev/stdin", "--streams",
                           "1", "--timeout", "1.2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=slave,
                          env=ENV) as process:  # fmt: skip
        os.close(slave)
        process.communicate(b'{"messages": ["hang"], "max_tokens": 9}', timeout=30)
        assert process.returncode == 4
    fcntl.fcntl(master, fcntl.F_SETFL, os.O_NONBLOCK)
    shown = os.read(master, 65_536)
    os.close(master)
    assert b"2 tokens" in shown
    assert b"no token has come" in shown
