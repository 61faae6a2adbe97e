"""The `zl` command as a process: streams, exit statuses, one-line errors, Ctrl-C; against the fake server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.fake_server import FakeServer
from zl import __version__
from zl.cli import build_parser
from zl.cli.ask import limits_hit

COMMANDS = tuple(build_parser()[1])
ENV = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONUNBUFFERED": "1"}


def zl(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zl", *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False,
        env=ENV | (env or {}),
    )  # fmt: skip


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr, which is all that a failure may print there."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("zl: ")
    assert "Traceback" not in done.stderr
    return line


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


def test_version_and_help_say_what_a_newcomer_needs():
    assert zl("--version").stdout == f"zl {__version__}\n"
    text = zl("--help").stdout
    for name in COMMANDS:
        assert name in text
    assert "zl ask" in text
    nothing = zl()
    assert (nothing.returncode, nothing.stdout) == (2, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name):
    done = zl(name, "--help")
    assert done.returncode == 0
    assert f"  zl {name}" in done.stdout
    assert "example" in done.stdout


def test_unknown_commands_and_flags_end_with_2():
    assert zl("sevre").returncode == 2
    assert zl("ask", "hi", "--temprature", "1").returncode == 2


def test_ask_streams_the_answer(server):
    done = zl("ask", "say Paris it is", "--connect", server.address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Paris it is \n", "")


def test_ask_passes_options_and_prints_figures(server, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("on Tuesday")
    done = zl("ask", "say a b", "--connect", server.address, "--stats", "--seed", "7", "--temperature", "0", "--top-p",
              "0.5", "--system", "be kind", "--max-tokens", "5", "--stop", "x", "--stop", "y", "--type", "summarize",
              "--context", str(notes), "--deadline-ms", "9000", "--repetition-penalty", "1.2")  # fmt: skip
    assert done.returncode == 0
    assert done.stdout == "a b \n"
    assert "2 tokens" in done.stderr
    assert "seed 7" in done.stderr
    assert "prompt 7 tokens" in done.stderr
    (request,) = server.requests
    assert (request.seed, request.temperature, request.top_p, request.repetition_penalty) == (7, 0.0, 0.5, 1.2)
    assert (request.system, request.max_tokens, request.stop, request.type) == (b"be kind", 5, [b"x", b"y"], 1)
    assert (request.context, request.deadline_ms) == (b"on Tuesday", 9000)


def test_ask_says_when_what_was_sent_was_cut(server, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("x" * 1_001)
    done = zl("ask", "say a", "--connect", server.address, "--context", str(notes))
    assert (done.returncode, done.stdout) == (0, "a \n")
    assert error_line(done).endswith("was cut: send less, or raise its context_tokens")
    notes.write_text("x" * 1_000)
    assert zl("ask", "say a", "--connect", server.address, "--context", str(notes)).stderr == ""


@pytest.mark.parametrize(
    ("sent", "prompt_tokens", "limits"),
    [
        ([], 3_840, ["max_model_len"]),
        ([], 30, ["max_model_len"]),
        (["context"], 1_100, ["context_tokens"]),
        (["system"], 600, ["system_tokens"]),
        (["context"], 3_838, ["context_tokens", "max_model_len"]),
        (["system", "context"], 900, ["system_tokens", "context_tokens"]),
    ],
)
def test_what_was_cut_names_the_limits_that_can_have_been_hit(sent, prompt_tokens, limits):
    assert limits_hit(sent, prompt_tokens, 4_096) == limits


def test_ask_refuses_a_context_that_is_no_text(tmp_path):
    notes = tmp_path / "notes.bin"
    notes.write_bytes(b"ab\xff\x00")
    done = zl("ask", "hi", "--context", str(notes))
    assert done.returncode == 2
    assert f"--context {notes} is not a text file: byte 2 " in error_line(done)


def test_ask_is_greedy_until_something_is_said_about_drawing(server):
    for flags in ((), ("--system", "s"), ("--seed", "1"), ("--type", "chat"), ("--top-p", "0.5")):
        zl("ask", "say x", "--connect", server.address, *flags)
    assert [request.temperature for request in server.requests] == [0.0, 0.0, None, None, None]


def test_ask_reads_the_question_from_stdin(server):
    assert zl("ask", "-", "--connect", server.address, stdin="say piped\n").stdout == "piped \n"
    done = zl("ask", "-", "--connect", server.address, stdin=" \n")
    assert done.returncode == 2
    assert "no question" in error_line(done)


def test_ask_finds_the_server_by_environment_or_default_socket(server, tmp_path):
    assert zl("ask", "say found", env={"ZL_CONNECT": server.address}).stdout == "found \n"
    with FakeServer(tmp_path / "zl.sock"):
        assert zl("ask", "say found", env={"XDG_RUNTIME_DIR": str(tmp_path)}).stdout == "found \n"


def test_ask_without_a_server(tmp_path):
    done = zl("ask", "hi", "--connect", f"unix:{tmp_path}/none")
    assert done.returncode == 1
    assert "cannot connect" in error_line(done)
    assert "zl serve" in done.stderr
    wrong = zl("ask", "hi", "--connect", "localhost")
    assert wrong.returncode == 2
    assert "tcp:HOST:PORT" in error_line(wrong)


@pytest.mark.parametrize(
    ("question", "said", "words"),
    [
        ("fail OVERLOADED", "", "told to fail: OVERLOADED"),
        ("fail-late INTERNAL", "one two \n", "told to fail: INTERNAL"),
        ("break", "one two \n", "broke off"),
        ("hang", "one two \n", "no next token within 0.5 s"),
    ],
)
def test_ask_ends_failures_with_one_line(server, question, said, words):
    done = zl("ask", question, "--connect", server.address, "--timeout", "0.5")
    assert (done.returncode, done.stdout) == (1, said)
    assert words in error_line(done)


def test_ask_with_an_auth_token(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("hush\n")
    with FakeServer(auth_token=b"hush") as server:
        assert zl("ask", "say in", "--connect", server.address, "--auth-token-file", str(secret)).stdout == "in \n"
        assert zl("ask", "say in", "--connect", server.address, env={"ZL_AUTH_TOKEN": "hush"}).stdout == "in \n"
        done = zl("ask", "say in", "--connect", server.address)
        assert done.returncode == 1
        assert "auth_token" in error_line(done)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zl", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=ENV,
    )  # fmt: skip


def test_ctrl_c_ends_ask_with_130_and_cancels(server):
    with start("ask", "endless", "--connect", server.address) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "1 "
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert err == ""
    assert server.closed.wait(10)


def test_a_reader_who_leaves_ends_ask_quietly(server):
    with start("ask", "endless", "--connect", server.address) as process:
        assert process.stdout is not None
        process.stdout.read(2)
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert server.closed.wait(10)


def test_chat_keeps_the_turns_and_leaves_at_the_end_of_input(server):
    lines = "say one\n\nsay two\n/new\nsay three\n/help\n/what\n"
    done = zl("chat", "--connect", server.address, "--system", "s", stdin=lines)
    assert done.returncode == 0
    assert done.stdout == "one \ntwo \nthree \n"
    assert [request.messages for request in server.requests] == [
        [b"say one"],
        [b"say one", b"one ", b"say two"],
        [b"say three"],
    ]
    assert {request.system for request in server.requests} == {b"s"}
    assert "Ctrl-D leaves" in done.stderr
    assert "/what is no command" in done.stderr


def test_chat_survives_errors_and_reconnects(server):
    done = zl("chat", "--connect", server.address, stdin="fail OVERLOADED\nbreak\nsay on\n")
    assert done.returncode == 0
    assert done.stdout == "one two on \n"
    assert "zl: told to fail: OVERLOADED" in done.stderr
    assert "broke off" in done.stderr
    assert server.requests[-1].messages == [b"say on"]


def test_chat_drops_the_oldest_turns_when_the_wire_is_full(server):
    done = zl("chat", "--connect", server.address, stdin="".join(f"say {i}\n" for i in range(10)))
    assert done.returncode == 0
    assert [len(request.messages) for request in server.requests] == [1, 3, 5, 7, 9, 11, 13, 15, 15, 15]
    assert server.requests[-1].messages[0] == b"say 2"
    assert "oldest turns" in done.stderr


def test_ctrl_c_in_chat_ends_the_answer_and_keeps_the_chat(server):
    with start("chat", "--connect", server.address) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("endless\n")
        process.stdin.flush()
        assert process.stdout.read(2) == "1 "
        process.send_signal(signal.SIGINT)
        assert server.was_cancelled.wait(20)
        out, err = process.communicate("say still here\n", timeout=30)
        assert process.returncode == 0
        assert out.endswith("still here \n")
        assert "[stopped]" in err
    _, second = server.requests
    assert second.messages[0] == b"endless"
    assert second.messages[1].startswith(b"1 2 ") or second.messages[1] == b"1 "
    assert second.messages[2] == b"say still here"


def test_serve_refuses_wrong_settings_before_anything_heavy(tmp_path):
    config = tmp_path / "zl.toml"
    config.write_text("[limits]\nmax_row = 3\n")
    for arguments, words in (
        (("--config", str(config)), "did you mean 'max_rows'"),
        (("--max-rows", "many"), "--max-rows"),
        (("--model", str(tmp_path / "none.gguf")), "no file or folder"),
        (("--listen", "7433"), "tcp:HOST:PORT"),
    ):
        done = zl("serve", *arguments)
        assert done.returncode == 2
        assert words in error_line(done)


def test_doctor_reports_and_says_what_would_be_used(tmp_path):
    free = ("--listen", f"unix:{tmp_path}/s", "--device", "cpu")
    done = zl("doctor", *free, env={"XDG_CACHE_HOME": str(tmp_path), "ZL_METRICS": "off"})
    assert done.returncode == 0
    lines = {line[6:16].strip(): line[:5].strip() for line in done.stdout.splitlines()}
    assert {"zl", "packages", "cpu", "compiler", "cores", "memory", "memlock", "gpu", "listen", "model"} <= set(lines)
    assert set(lines.values()) <= {"ok", "warn"}
    assert lines["model"] == "warn"  # nothing in this cache
    assert "cpu with " in done.stdout.splitlines()[-1]
    assert "device is cpu" in done.stdout.splitlines()[-1]


def test_doctor_finds_what_would_stop_the_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = zl("doctor", "--listen", f"tcp:127.0.0.1:{port}", "--listen", "unix:/nonexistent/s", "--model",
                  str(tmp_path / "x"), env={"ZL_METRICS": "off"})  # fmt: skip
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert len(failed) == 3
    assert f"tcp:127.0.0.1:{port}" in failed[0]
    assert "in use" in failed[0]


@pytest.mark.parametrize("module", ["argparse", "zl.streams", "zl.config", "zl.cli.top", "zl.client"])
def test_ctrl_c_while_it_is_loaded_ends_it_without_a_word(module):
    code = f"""if True:
        import os, signal, sys

        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)

        for name in [name for name in sys.modules if name == {module!r}]:
            del sys.modules[name]
        sys.meta_path.insert(0, Finder())
        from zl.cli import main
        sys.exit(main(["ask", "hi", "--connect", "unix:/nonexistent"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=ENV
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
