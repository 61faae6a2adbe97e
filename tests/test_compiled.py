"""zl/compiled.py: a cache that cannot be written, a disk that is full; a signal meanwhile; nothing is compiled here."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from zl import compiled
from zl.errors import ConfigError, DeviceError

FULL = """#!/bin/sh
echo "$TMPDIR" >> "$0.places"
echo "/x/ccY.s: Assembler messages:" >&2
echo "/x/ccY.s: Error: can't write 23 bytes to section .text: 'No space left on device'" >&2
exit 1
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Ask for a library with a compiler whose disk is full."""
    program = tmp_path / "compiler"
    program.write_text(FULL)
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "a.cpp"
    source.write_text("int a;\n")
    return lambda: compiled.shared_library("a test", compiled.cache_dir() / "hash" / "a.so", [source], ["-O1"])


@pytest.mark.parametrize("place", ["cache", "cache/zl/native", "cache/zl/native/hash"])
def test_a_cache_that_cannot_be_written_names_folder_reason_and_remedy(make, tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("a file in the way, for root may write anywhere")
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(f"cannot write below {tmp_path}/cache/zl/native/hash: ")
    assert str(caught.value).endswith("; set XDG_CACHE_HOME to a folder that this user can write")
    assert caught.value.exit_status == 2


def full_error(tmp_path) -> str:
    return (
        f"cannot write below {tmp_path}/cache/zl/native/hash: No space left on device; free some room there, or set "
        "XDG_CACHE_HOME to a folder that has it"
    )


def test_a_full_disk_is_said_in_words_of_ours_and_leaves_nothing(make, tmp_path):
    with pytest.raises(DeviceError) as caught:
        make()
    assert str(caught.value) == full_error(tmp_path)
    assert caught.value.exit_status == 1  # there may be room at the next start
    folder = tmp_path / "cache" / "zl" / "native" / "hash"
    assert list(folder.iterdir()) == []
    places = (tmp_path / "compiler.places").read_text().split()
    assert places  # the compiler's own temporary files lie in the folder that the error names
    assert all(place.startswith(f"{folder}/") for place in places)


def test_no_room_for_the_finished_library_is_said_as_well(make, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiled.os, "replace", full)
    monkeypatch.setattr(compiled, "_compile", lambda *_: tmp_path / "made")
    with pytest.raises(DeviceError) as caught:
        make()
    assert str(caught.value) == full_error(tmp_path)


def test_a_source_that_is_refused_is_another_matter(make, tmp_path):
    (tmp_path / "compiler").write_text("#!/bin/sh\necho 'a.cpp:1: error: no' >&2\nexit 1\n")
    with pytest.raises(DeviceError, match=r"could not build a test: a\.cpp:1: error: no"):
        make()


HANGING = """#!/bin/sh
echo begun >> "$0.begun"
sleep 50 & wait  # the driver of a compiler starts others in turn
"""


def test_a_signal_ends_the_compilers_with_what_they_have_started(make, tmp_path):
    program = tmp_path / "compiler"
    program.write_text(HANGING)

    def stop(*_) -> None:
        raise SystemExit(0)

    def ring() -> None:
        while not (tmp_path / "compiler.begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, stop)
    thread = threading.Thread(target=ring)
    thread.start()
    at = time.monotonic()
    try:
        with pytest.raises(SystemExit):
            make()
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join()
    assert time.monotonic() - at < 20
    assert list((tmp_path / "cache" / "zl" / "native" / "hash").iterdir()) == []
    deadline = time.monotonic() + 10
    while left := [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path) in _environ(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _environ(pid: str) -> str:
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    return "".join(line for line in found.split("\0") if line.startswith("TMPDIR="))
