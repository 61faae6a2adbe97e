"""zl/artifact.py and zl/builder.py: the same bits with and without, resumed builds, and what is refused in one line."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import native_kit
from tests.tiny_model import write_tiny
from zl import artifact as artifacts
from zl import builder as builders
from zl import warm
from zl.artifact import FILES, MANIFEST, PROGRESS
from zl.build import _decide, prepare
from zl.builder import Builder
from zl.compiled import cache_dir
from zl.config import Settings
from zl.errors import ConfigError, ModelError
from zl.gpu.native import build as native
from zl.gpu.native.build import have_compiler, pick_level
from zl.net import codec
from zl.phases import Phases
from zl.server import Server, open_build

pytestmark = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler or no native level here")

ROOT = Path(__file__).parent.parent
SMALL = Settings(
    device="cpu", metrics="off", listen=(), max_rows=4, max_model_len=256, max_tokens=64, default_tokens=16,
    system_tokens=128, context_tokens=64, step_tokens=64, kv_memory=16 << 20, berths=4, threads=1,
)  # fmt: skip
SYSTEM = "You are a careful assistant who answers in one short sentence."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory) -> Path:
    """One artifact of the tiny model; copy it before damaging it."""
    out = tmp_path_factory.mktemp("artifacts") / "tiny"
    build(tiny, out)
    return out


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own that shares compiled libraries with the real one."""
    real = cache_dir()
    real.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache" / "zl").mkdir(parents=True)
    (tmp_path / "cache" / "zl" / "native").symlink_to(real)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zl" / "builds"


def build(model: Path, out: Path | None, settings: Settings = SMALL, progress=None) -> artifacts.Artifact:
    return Builder(model, settings, pick_level("auto"), Phases(), progress).build(out)


def requests(**more) -> list[codec.Request]:
    texts = (b"What is a page?", b"Name three colours and say why you like each of them.", b"x")
    return [
        codec.Request(
            request_id=i + 1, messages=[text], type=i % 3, seed=i, logprobs=True, max_tokens=24, ignore_eos=True, **more
        )
        for i, text in enumerate(texts)
    ]  # fmt: skip


def serve(settings: Settings, path: Path, asked: list[codec.Request], said: list[str] | None = None):
    """Start a server in this process, answer requests, stop it; return frames by request and the server."""

    async def main():
        found = prepare(settings, path, (said if said is not None else []).append)
        server = Server(found, open_build(found, lambda line: None))
        try:
            await server.start([], None, Phases())
            frames = await warm.ask(server.service, asked, asyncio.Event())
        finally:
            await server.close()
        server.dispatcher.check()
        return frames, server

    frames, server = asyncio.run(main())
    answers = {}
    for frame in frames:
        assert frame.error is None
        ids, logprobs, usages = answers.setdefault(frame.request_id, ([], [], []))
        ids += frame.token_ids
        logprobs += frame.logprobs
        if frame.usage is not None:
            usages.append(frame.usage)
    return answers, server


def bits(answers):
    return {number: (ids, logprobs) for number, (ids, logprobs, _) in answers.items()}


def refused(kind: type[Exception], path: Path, settings: Settings = SMALL) -> str:
    """Open, expect a refusal, return its one line."""
    with pytest.raises(kind) as caught:
        prepare(settings, path, lambda line: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def edit_manifest(folder: Path, change) -> None:
    """Change a manifest as a build would have written it: its own hash and the build id agree again."""
    values = json.loads((folder / MANIFEST).read_text())
    del values["check"]
    change(values)
    values["build_id"] = artifacts.facts.build_id(values["facts"])
    (folder / MANIFEST).write_text(json.dumps(values | {"check": artifacts.check_of(values)}))


def test_a_length_that_the_model_does_not_have_is_cut_and_said(tiny):
    for asked, said in ((100_000, ["max_model_len 100000: cut to 512, all that tiny takes"]), (512, [])):
        lines: list[str] = []
        prepare(dataclasses.replace(SMALL, max_model_len=asked, artifact="off", cpu_level="torch"), tiny, lines.append)
        assert [line for line in lines if line.startswith("max_model_len")] == said


# The same bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bias", [False, True])
def test_tokens_and_logprobs_are_the_same_with_and_without(tmp_path, cache, dtype, bias):
    model = write_tiny(tmp_path / "model", seed=3, bias=bias)
    settings = dataclasses.replace(SMALL, dtype=dtype)
    plain, without = serve(dataclasses.replace(settings, artifact="off"), model, requests())
    build(model, tmp_path / "out", settings)
    packed, with_one = serve(SMALL, tmp_path / "out", requests())
    assert bits(plain) == bits(packed)
    assert all(len(ids) == 24 == len(logprobs) for ids, logprobs in bits(plain).values())
    assert with_one.build.build_id == without.build.build_id
    assert not cache.exists()


def test_packed_weights_serve_any_number_of_rows_and_pages(made):
    few, _ = serve(SMALL, made, requests()[:1])
    many, _ = serve(dataclasses.replace(SMALL, max_rows=12, kv_memory=64 << 20, threads=2), made, requests()[:1])
    assert bits(few) == bits(many)


def test_artifact_starts_without_loading_torch(made):
    code = f"""
import sys
from pathlib import Path
from zl.build import prepare
from zl.config import Settings
from zl.server import open_build
found = prepare(Settings(device="cpu", max_rows=4, step_tokens=64, kv_memory=16 << 20), Path({str(made)!r}), print)
engine = open_build(found, print)[0]
engine.close()
print("loaded:", *{{"torch", "transformers", "gguf", "safetensors", "triton"}} & set(sys.modules))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_limits_of_a_named_artifact_are_its_own_where_nothing_else_is_asked(made):
    found = prepare(Settings(device="cpu", step_tokens=512, kv_memory=16 << 20), made, lambda line: None)
    assert (found.shapes.max_model_len, found.shapes.max_tokens, found.shapes.system_tokens) == (256, 64, 128)


# The cache


def test_first_start_makes_an_artifact_and_the_next_one_takes_it(tiny, cache):
    said: list[str] = []
    first, _ = serve(SMALL, tiny, requests(), said)
    (folder,) = cache.iterdir()
    assert any("first start of this build" in line for line in said)
    assert any(re.search(r"made in .* s \(load torch .*pack the weights ", line) for line in said)
    said.clear()
    second, server = serve(SMALL, tiny, requests(), said)
    assert any(str(folder) in line for line in said)
    assert not any("first start" in line for line in said)
    assert bits(first) == bits(second)
    assert folder.name == server.build.build_id[:16]


def test_what_making_it_took_and_why_this_device_are_told(tiny, cache, monkeypatch):
    monkeypatch.setattr("zl.gpu.device.device_count", lambda: 0)
    said: list[str] = []
    phases = Phases()
    prepare(dataclasses.replace(SMALL, device="auto"), tiny, said.append, phases)
    assert phases.seconds["make the artifact"] > 0
    assert any(line.startswith("device ") for line in said)
    assert not any("as asked" in line for line in said)


def test_other_settings_and_other_weights_are_other_builds(tiny, tmp_path, cache):
    ids = {build(tiny, None).build_id}
    ids.add(build(tiny, None, dataclasses.replace(SMALL, dtype="float32")).build_id)
    ids.add(build(tiny, None, dataclasses.replace(SMALL, system_tokens=100)).build_id)
    ids.add(build(tiny, None, dataclasses.replace(SMALL, on_system_tokens="reject")).build_id)
    ids.add(build(write_tiny(tmp_path / "other", seed=9), None).build_id)
    assert len(ids) == 5 == len(list(cache.iterdir()))
    same = dataclasses.replace(SMALL, max_rows=2, kv_memory=8 << 20, threads=2, step_tokens=40)
    assert artifacts.find(tiny, same, pick_level("auto")).build_id in ids


def test_a_changed_config_file_is_another_model(tiny, tmp_path, cache):
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    before = build(model, None)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    assert artifacts.find(model, SMALL, pick_level("auto")) is None
    assert build(model, None).build_id != before.build_id


def test_a_damaged_artifact_of_the_cache_is_made_again(tiny, cache):
    first, _ = serve(SMALL, tiny, requests())
    (folder,) = cache.iterdir()
    flip(folder / artifacts.WEIGHTS)
    said: list[str] = []
    second, _ = serve(SMALL, tiny, requests(), said)
    assert any("damaged" in line for line in said)
    assert bits(first) == bits(second)
    assert bits(serve(SMALL, folder, requests())[0]) == bits(first)


def test_without_a_compiler_the_cache_still_serves(tiny, cache, monkeypatch):
    first, _ = serve(SMALL, tiny, requests())
    monkeypatch.setenv("CXX", "/nowhere/g++")
    second, server = serve(SMALL, tiny, requests())
    assert bits(first) == bits(second)
    assert server.engine.name.startswith("native")


def test_only_the_artifacts_used_last_are_kept(tiny, cache):
    assert builders.KEEP == 4, "docs/configuration.md and docs/design.md say four"
    wishes = [dataclasses.replace(SMALL, system_tokens=100 + i) for i in range(builders.KEEP + 2)]
    made = [build(tiny, None, wish).folder for wish in wishes]
    for age, folder in enumerate(made):
        os.utime(folder, (time.time() - age, time.time() - age))
    newest = made[-1]
    gone = builders.prune(newest)
    assert sorted(gone) == sorted(made[builders.KEEP - 1 : -1])
    assert set(cache.iterdir()) == {*made[: builders.KEEP - 1], newest}


# Building


class Cut(BaseException):
    """Stands in for the end of the process."""


def test_a_build_that_was_cut_goes_on_where_it_ended(tiny, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def die(*_):
        raise Cut

    monkeypatch.setattr("zl.gpu.programs.pack", die)
    with pytest.raises(Cut):
        build(tiny, out)
    monkeypatch.undo()
    assert (out / PROGRESS).is_file()
    assert "did not finish" in refused(ModelError, out)
    before = {name: (out / name).stat().st_ino for name in FILES if name != artifacts.WEIGHTS}
    found = build(tiny, out)
    assert {name: (out / name).stat().st_ino for name in before} == before
    assert not (out / PROGRESS).exists()
    found.check_sizes()
    artifacts.HashCheck(found, FILES).wait()


def test_a_killed_build_goes_on_and_mistrusts_what_it_finds(tiny, tmp_path):
    out = tmp_path / "out"
    code = f"""
import sys, time
from pathlib import Path
import zl.gpu.programs
from tests.test_artifact import build
def stuck(*_):
    print("packing", flush=True)
    time.sleep(600)
zl.gpu.programs.pack = stuck
build(Path({str(tiny)!r}), Path({str(out)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "packing\n"
        process.send_signal(signal.SIGKILL)
    kept = (out / artifacts.TOKENIZER).stat().st_ino
    flip(out / artifacts.PROGRAM)
    damaged = (out / artifacts.PROGRAM).stat().st_ino
    found = build(tiny, out)
    assert (out / artifacts.TOKENIZER).stat().st_ino == kept
    assert (out / artifacts.PROGRAM).stat().st_ino != damaged
    artifacts.HashCheck(found, FILES).wait()


def test_a_finished_build_is_not_redone(tiny, made):
    before = {name: (made / name).stat().st_mtime_ns for name in (*FILES, MANIFEST)}
    build(tiny, made)
    assert {name: (made / name).stat().st_mtime_ns for name in before} == before


def test_progress_goes_up_to_the_whole(tiny, tmp_path):
    seen: list[tuple[str, int, int]] = []
    build(tiny, tmp_path / "out", progress=lambda *step: seen.append(step))
    packing = [(done, total) for what, done, total in seen if what == "packing weights"]
    assert packing == sorted(packing)
    assert packing[-1][0] == packing[-1][1] > 0


def test_out_and_a_cache_that_cannot_be_written_name_the_right_remedy(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    remedy = r"cannot write the artifact: Not a directory; name with --out a folder that this user can write"
    with pytest.raises(ConfigError, match=remedy):
        build(tiny, tmp_path / "file" / "out")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot write the artifact: Not a directory; set XDG_CACHE_HOME to a folder"):
        build(tiny, None)


def test_a_server_does_without_an_artifact_where_the_cache_of_builds_cannot_be_written(tiny, cache):
    cache.touch()  # a file in the way, for root may write anywhere
    said: list[str] = []
    answers, _ = serve(SMALL, tiny, requests(), said)
    assert len(answers) == 3
    assert any(line.startswith("no artifact: ") and "set XDG_CACHE_HOME to a folder" in line for line in said)


def test_out_that_holds_something_else_is_refused(tiny, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no artifact"):
        build(tiny, tmp_path)
    assert os.listdir(tmp_path) == ["precious.txt"]


# Refusals


def flip(path: Path) -> None:
    """Change one byte in the middle, in place."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damage_to_any_file_is_refused(made, tmp_path, name, damage):
    folder = copy(made, tmp_path)
    path = folder / name
    if damage == "flip":
        flip(path)
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    line = refused(ModelError, folder)
    assert str(path if (name, damage) != (MANIFEST, "missing") else folder) in line


def test_weights_of_another_model_are_refused_by_the_program_too(made, tiny, tmp_path):
    """The hash is the guard; this is the second one, for files that agree with their manifest."""
    folder = copy(made, tmp_path)
    with (folder / artifacts.WEIGHTS).open("r+b") as file:
        file.seek(3 * 8)
        file.write(b"\1")
    sha = artifacts.sha256_of(folder / artifacts.WEIGHTS)
    edit_manifest(folder, lambda values: values["files"][artifacts.WEIGHTS].update(sha256=sha))
    found = prepare(SMALL, folder, lambda line: None)
    with pytest.raises(ModelError, match="no packed weights of this model"):
        open_build(found, lambda line: None)


def test_another_format_is_refused(made, tmp_path):
    folder = copy(made, tmp_path)
    edit_manifest(folder, lambda values: values.update(format=artifacts.FORMAT + 1))
    assert f"format {artifacts.FORMAT + 1}" in refused(ModelError, folder)


def test_a_machine_without_the_features_is_refused(made, monkeypatch):
    level = artifacts.read(made).level
    lost = sorted(native.needed_flags(level))[0]
    flags = native.cpu_flags() - {lost}
    monkeypatch.setattr(native, "cpu_flags", lambda: flags)
    monkeypatch.setattr(artifacts, "cpu_flags", lambda: flags)
    line = refused(ModelError, made)
    assert lost in line
    assert level in line


def test_another_architecture_is_refused(made, monkeypatch):
    monkeypatch.setattr("zl.artifact.platform.machine", lambda: "riscv64")
    assert "this machine is riscv64" in refused(ModelError, made)


@pytest.mark.parametrize(
    ("fact", "value", "word"),
    [("code", "0" * 64, "code"), ("profiles", "1" * 64, "profiles"), ("versions", {"zl": "0.0.0"}, "zl was '0.0.0'")],
)
def test_another_build_of_zl_is_refused(made, tmp_path, fact, value, word):
    folder = copy(made, tmp_path)

    def change(values):
        values["facts"][fact] = values["facts"][fact] | value if isinstance(value, dict) else value

    edit_manifest(folder, change)
    line = refused(ModelError, folder)
    assert "another build of zl" in line
    assert word in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("device", "cuda"),
        ("cpu_level", "torch"),
        ("kv", "int8"),
        ("penalty_filter", "bloom"),
        ("max_model_len", 128),
        ("on_system_tokens", "reject"),
    ],
)
def test_settings_that_it_was_not_built_for_are_refused(made, name, value):
    settings = dataclasses.replace(SMALL, max_tokens=64, **{name: value})
    assert name in refused(ConfigError, made, settings)


def test_int8_keys_and_values_are_another_build_which_auto_takes(tmp_path, cache):
    model = write_tiny(tmp_path / "model", seed=3)
    eight = dataclasses.replace(SMALL, kv="int8")
    plain, eights = (build(model, tmp_path / kv, settings) for kv, settings in (("auto", SMALL), ("int8", eight)))
    assert plain.build_id != eights.build_id
    assert (plain.facts["kv"], eights.facts["kv"]) == ("bfloat16", "int8")
    said: list[str] = []
    here, server = serve(SMALL, eights.folder, requests(), said)
    assert server.engine.name.endswith(", int8 KV")
    assert any(" in int8 (" in line for line in said)
    there, _ = serve(dataclasses.replace(eight, artifact="off"), model, requests())
    assert bits(here) == bits(there)


def test_a_bloom_filter_is_another_build_which_its_artifact_brings_back(tmp_path, cache):
    model = write_tiny(tmp_path / "model", seed=3)
    bloom = dataclasses.replace(SMALL, penalty_filter="bloom")
    made = [build(model, tmp_path / each.penalty_filter, each) for each in (SMALL, bloom)]
    assert made[0].build_id != made[1].build_id
    here, server = serve(SMALL, made[1].folder, requests())
    assert server.engine.name.endswith(", Bloom penalty filter")
    there, _ = serve(dataclasses.replace(bloom, artifact="off"), model, requests())
    assert bits(here) == bits(there)
    exact = dataclasses.replace(SMALL, penalty_filter="exact")
    assert "penalty_filter = 'exact'" in refused(ConfigError, made[1].folder, exact)
    assert build(model, tmp_path / "exact", exact).build_id == made[0].build_id


def test_int8_keys_and_values_without_the_native_program_are_refused(tmp_path):
    model = write_tiny(tmp_path / "model", seed=3)
    line = refused(ConfigError, model, dataclasses.replace(SMALL, kv="int8", cpu_level="torch"))
    assert "kv = 'int8': only the native CPU program" in line


def test_int8_keys_and_values_are_refused_on_a_gpu():
    gpu, text = SimpleNamespace(kind="cuda", name="a GPU"), SimpleNamespace(vocab_size=100)
    settings = dataclasses.replace(SMALL, device="cuda", kv="int8")
    with pytest.raises(ConfigError, match=r"kv = 'int8'.*a GPU without it.*--device cpu"):
        _decide(settings, gpu, "", SimpleNamespace(), native_kit.tiny(), text, None, "", lambda line: None, Phases())


# System prompts


def test_a_configured_system_prompt_is_constant_at_its_first_use(made, caplog):
    caplog.set_level("INFO")
    asked = requests(system=SYSTEM.encode())
    cold, _ = serve(SMALL, made, asked)
    warm_ones, server = serve(dataclasses.replace(SMALL, system_prompts=(SYSTEM, "tiny")), made, asked)
    assert cold[1][2][-1].constant_tokens == 0
    for number in warm_ones:
        assert warm_ones[number][2][-1].constant_tokens >= len(SYSTEM) // 32 * 32 > 0
    assert bits(cold) == bits(warm_ones)
    pinned = [prefix for prefix in server.pages._prefixes.values() if prefix.pinned]
    assert len(pinned) == 1, "the second prompt is shorter than a page"
    assert "system prompts: 1 kept, " in caplog.text


def test_system_prompts_of_the_build_are_the_default_of_its_server(tiny, tmp_path):
    out = tmp_path / "out"
    build(tiny, out, dataclasses.replace(SMALL, system_prompts=(SYSTEM,)))
    answers, _ = serve(SMALL, out, requests(system=SYSTEM.encode())[:1])
    assert answers[1][2][-1].constant_tokens > 0


def test_pinned_prompts_outlive_every_other_prefix(made):
    systems = [f"{i} {SYSTEM}".encode() for i in range(80)]
    others = [codec.Request(request_id=i, system=s, messages=[b"Hi"], max_tokens=2) for i, s in enumerate(systems)]
    last = codec.Request(request_id=99, system=SYSTEM.encode(), messages=[b"Hi"], max_tokens=2)
    settings = dataclasses.replace(SMALL, system_prompts=(SYSTEM,), kv_memory=2 << 20)
    answers, server = serve(settings, made, [*others, last])
    assert server.pages.evictions > 0
    assert answers[99][2][-1].constant_tokens > 0


def test_system_prompts_that_leave_no_room_are_refused(made):
    texts = tuple(f"{i} " + "word " * 20 for i in range(30))
    settings = dataclasses.replace(SMALL, system_prompts=texts, kv_memory=1 << 20)
    with pytest.raises(ConfigError, match="leave no room"):
        serve(settings, made, requests())

