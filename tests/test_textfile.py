"""zl/textfile.py: only what can be read without waiting is read."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest

from zl.config import load
from zl.errors import ConfigError
from zl.readers import read_token
from zl.textfile import MAX_BYTES, read_text


@pytest.fixture(autouse=True)
def _no_waiting():
    """A test that waits for a pipe ends with an error instead."""

    def ring(*_) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_regular_file_is_read_through_links_too(tmp_path):
    (tmp_path / "a").write_text("é\n")
    (tmp_path / "b").symlink_to("a")
    assert read_text("file", tmp_path / "b") == "é\n"


@pytest.mark.parametrize("kind", ["pipe", "pipe with a silent writer", "socket", "folder", "device", "terminal"])
def test_what_may_make_us_wait_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "x"
    kept: list[int] = []
    words = "is no regular file but a pipe; a server reads it again at each reload: name one that stays"
    if kind.startswith("pipe"):
        os.mkfifo(path)
        if kind != "pipe":
            kept.append(os.open(path, os.O_RDWR))
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
        words = "No such device or address"
    elif kind == "folder":
        path.mkdir()
        words = "but a folder"
    elif kind == "device":
        path.symlink_to("/dev/zero")
        words = "but a device"
    else:
        kept += os.openpty()
        path.symlink_to(os.ttyname(kept[1]))
        words = "but a device"
    n_open = len(os.listdir("/proc/self/fd"))
    for said, read in (
        ("config file", lambda: load({}, file=path, environ={})),
        ("auth_token_file (--auth-token-file)", lambda: load({"auth_token_file": str(path)}, environ={})),
    ):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value).startswith(f"{said} {path}: ")
        assert words in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == n_open
    for fd in kept:
        os.close(fd)


def test_a_command_that_reads_once_takes_a_pipe(tmp_path):
    path = tmp_path / "p"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("secret\n",))
    writer.start()
    assert read_token(str(path), "--auth-token-file", once=True) == "secret"
    writer.join()
    with pytest.raises(ConfigError, match=r"but a device$"):
        read_token("/dev/zero", "--auth-token-file", once=True)


def test_a_file_that_nobody_wrote_by_hand_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    os.truncate(path, MAX_BYTES + 1)
    with pytest.raises(ConfigError, match=f"config file {path}: has {MAX_BYTES + 1} bytes, more than {MAX_BYTES}"):
        load({}, file=path, environ={})


def test_odd_contents_and_paths_are_errors_of_the_configuration(tmp_path):
    path = tmp_path / "c.toml"
    for text, words in (
        ('[server]\nlog_file = "a\\u0000b"\n', "log_file = .* a text without a NUL byte"),
        ('[server]\ntls_cert = "a\\u0000b"\ntls_key = "k"\n', "tls_cert = .* a text without a NUL byte"),
        ("x = " + "[" * 20_000 + "]" * 20_000, "too deep"),
        ("\udcff", "can't decode"),
    ):
        path.write_text(text, "utf-8", "surrogateescape")
        with pytest.raises(ConfigError, match=words):
            load({}, file=path, environ={})
    with pytest.raises(ConfigError, match="embedded null"):
        read_text("file", "a\0b")
