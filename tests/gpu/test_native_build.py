"""zl/gpu/native/build.py: a cache that cannot be written, a disk that is full; nothing is compiled here."""

from __future__ import annotations

import errno

import pytest

from zl.errors import ConfigError, DeviceError
from zl.gpu.native import build

FULL = """#!/bin/sh
[ "$1" = --version ] && { echo "test compiler 1"; exit 0; }
echo "$TMPDIR" >> "$0.places"
echo "/x/ccY.s: Assembler messages:" >&2
echo "/x/ccY.s: Error: can't write 23 bytes to section .text: 'No space left on device'" >&2
exit 1
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    program = tmp_path / "compiler"
    program.write_text(FULL)
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return program


@pytest.mark.parametrize("place", ["cache", "cache/zl/native"])
def test_a_cache_that_cannot_be_written_names_folder_reason_and_remedy(compiler, tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("a file in the way, for root may write anywhere")
    with pytest.raises(ConfigError) as caught:
        build.library("avx2")
    folder = tmp_path / "cache" / "zl" / "native" / build.fingerprint("avx2")
    assert str(caught.value).startswith(f"cannot write below {folder}: ")
    assert str(caught.value).endswith("; set XDG_CACHE_HOME to a folder that can be written")
    assert caught.value.exit_status == 2


def test_a_full_disk_is_said_in_words_of_ours_and_leaves_nothing(compiler, tmp_path):
    with pytest.raises(DeviceError) as caught:
        build.library("avx2")
    folder = tmp_path / "cache" / "zl" / "native" / build.fingerprint("avx2")
    assert str(caught.value) == (
        f"cannot write below {folder}: No space left on device; free some room there, or set XDG_CACHE_HOME to a "
        "folder that has it"
    )
    assert caught.value.exit_status == 1
    assert list(folder.iterdir()) == []
    places = (tmp_path / "compiler.places").read_text().split()
    assert places  # the compiler's own temporary files lie in the folder that the error names
    assert all(place.startswith(f"{folder}/") for place in places)


def test_no_room_for_the_finished_library_is_said_as_well(compiler, monkeypatch):
    def full(level, work):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build, "_compile", full)
    with pytest.raises(DeviceError, match="free some room"):
        build.library("avx2")
