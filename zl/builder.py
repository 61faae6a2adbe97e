"""The builder: makes an artifact of a model, file by file, and goes on where an earlier build of the same was cut off.

State: files in the artifact's folder: each written beside its place, hashed, renamed, and booked in `progress.json`; a
lock file keeps two builders apart. The manifest comes last. Refuses net, dispatch and asyncio; loads torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zl import artifact, facts
from zl.artifact import MANIFEST, PROGRAM, PROGRESS, TOKENIZER, TOKENS, WEIGHTS, Artifact
from zl.config import Settings
from zl.errors import ConfigError, ModelError, unwritable
from zl.filehash import sha256_of
from zl.phases import Phases

KEEP = 4
"""Artifacts that `zl serve` keeps in the cache: the ones used last."""

Progress = Callable[[str, int, int], None]
"""What is being made, bytes done, bytes in all."""


class Builder:
    """Build one model into one folder.

    path      GGUF file or Hugging Face folder
    level     instruction level of the program
    progress  called often
    """

    def __init__(self, path: Path, settings: Settings, level: str, phases: Phases, progress: Progress | None = None):
        from zl.text.tokenizer import text_model

        with phases("load torch"):
            from zl.gpu.weights import open_model
        self._settings, self._level, self._phases = settings, level, phases
        self._progress: Progress = progress or _unseen
        with phases("open the model"):
            self.source = open_model(path)
            self.text = text_model(self.source)
        with phases("hash the model"):
            self._inputs = facts.inputs_of(path)
            known = facts.known_facts(settings, self.source.shape, level, "cpu")
            self.facts = facts.whole_facts(known, self.source.sha256, self.text.sha256)
        self.build_id = facts.build_id(self.facts)
        self._done: dict[str, Any] = {}
        self._booked = ""

    def build(self, out: Path | None = None) -> Artifact:
        """Make what is missing in `out` (by default this build's place in the cache) and return the artifact.

        Raises  ConfigError: the folder holds something else, or is not this user's to write; TransferError: it has no
                room; DeviceError: no compiler
        """
        folder = out if out is not None else artifact.folder_of(self.build_id)
        try:
            self._claim(folder)
            with _locked(folder):
                return self._build(folder)
        except OSError as error:
            instead = "set XDG_CACHE_HOME to" if out is None else "name with --out"
            raise unwritable(f"{folder}: cannot write the artifact", error, instead) from error

    def _build(self, folder: Path) -> Artifact:
        found = self._finished(folder)
        if found is not None:
            return found
        (folder / MANIFEST).unlink(missing_ok=True)
        self._resume(folder)
        with self._phases("tokenizer"):
            values = self._tokenizer(folder)
        with self._phases("compile the program"):
            self._file(folder, PROGRAM, self._compile)
        with self._phases("pack the weights"):
            self._file(folder, WEIGHTS, self._pack)
        manifest = {
            "format": artifact.FORMAT,
            "build_id": self.build_id,
            "facts": self.facts,
            "inputs": self._inputs,
            "model": facts.plain(dataclasses.asdict(self.source.shape)),
            "text": values,
            "profiles": profile_table(),
            "system_prompts": list(self._settings.system_prompts),
            "files": self._done,
            "seconds": {name: round(seconds, 3) for name, seconds in self._phases.seconds.items()},
        }
        _write_json(folder / MANIFEST, manifest | {"check": artifact.check_of(facts.plain(manifest))})
        (folder / PROGRESS).unlink()
        return artifact.read(folder)

    def _claim(self, folder: Path) -> None:
        ours = any((folder / name).is_file() for name in (MANIFEST, PROGRESS, ".lock"))
        if folder.is_dir() and any(folder.iterdir()) and not ours:
            raise ConfigError(f"--out {folder}: holds files that are no artifact; name an empty or a new folder")
        folder.mkdir(parents=True, exist_ok=True)

    def _finished(self, folder: Path) -> Artifact | None:
        """Return the artifact that is already there, whole and of this very build."""
        try:
            if not (folder / MANIFEST).is_file():
                return None
            found = artifact.read(folder)
            found.check_sizes()
            check = artifact.HashCheck(found, artifact.FILES)
            with self._phases("check what is there"):
                check.wait()
        except ModelError:
            return None
        same = found.build_id == self.build_id and found.system_prompts == self._settings.system_prompts
        return found if same else None

    def _resume(self, folder: Path) -> None:
        """Read which files an earlier build of the same finished; another build's are made anew."""
        try:
            booked = json.loads((folder / PROGRESS).read_text("utf-8"))
            self._done = booked["files"] if booked["build_id"] == self.build_id else {}
        except (OSError, ValueError, LookupError, TypeError):
            self._done = {}
        _write_json(folder / PROGRESS, {"build_id": self.build_id, "files": self._done})

    def _file(self, folder: Path, name: str, make: Callable[[Path], None]) -> None:
        """Make one file unless it is there, booked, and as booked."""
        path = folder / name
        entry = self._done.get(name)
        if entry is not None and path.is_file() and sha256_of(path) == entry["sha256"]:
            self._progress(f"{name}, already made", entry["bytes"], entry["bytes"])
            return
        part = folder / (name + ".part")
        make(part)
        self._done[name] = {"sha256": sha256_of(part), "bytes": part.stat().st_size}
        part.replace(path)
        _write_json(folder / PROGRESS, {"build_id": self.build_id, "files": self._done})

    def _tokenizer(self, folder: Path) -> dict[str, Any]:
        from zl.text.detok import TokenTable
        from zl.text.frozen import freeze

        values, tokenizer, tokens = freeze(self.text, TokenTable(self.text))
        self._file(folder, TOKENIZER, lambda part: _write(part, tokenizer))
        self._file(folder, TOKENS, lambda part: _write(part, tokens))
        return values

    def _compile(self, part: Path) -> None:
        from zl.gpu.native.build import library

        self._progress("compiling", 0, 0)
        shutil.copyfile(library(self._level), part)

    def _pack(self, part: Path) -> None:
        from zl.gpu.programs import pack

        size = sum(file.stat().st_size for file in self.source.files)
        limits, dtype = self.facts["limits"], self.facts["dtype"]
        pack(self.source, dtype, limits["max_model_len"], self._level, part,
             lambda share: self._progress("packing weights", round(size * share), size))  # fmt: skip


def _unseen(what: str, done: int, total: int) -> None:
    """Show nothing."""


def level_for(settings: Settings, kind: str) -> str:
    """Settle the instruction level to build for. ConfigError: none is possible, and why."""
    from zl.gpu.native.build import lacking
    from zl.gpu.programs import program_of

    if kind != "cpu":
        raise ConfigError("artifacts hold programs of the CPU; on a GPU, zl serve starts from the model itself")
    level = program_of(kind, settings.cpu_level)
    if level == "torch":
        why = "cpu_level is torch" if settings.cpu_level == "torch" else lacking()
        raise ConfigError(f"there is no program to build: {why}")
    return level


def prune(keep: Path) -> list[Path]:
    """Delete all but the last used artifacts of the cache, never `keep`; return the folders that went.

    A server has read all that it needs before it is ready, so one that runs does not mind.
    """
    root = artifact.builds_folder()
    folders = [f for f in root.iterdir() if f.is_dir() and f != keep] if root.is_dir() else []
    folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    gone = []
    for folder in folders[KEEP - 1 :]:
        with contextlib.suppress(OSError), _locked(folder, fcntl.LOCK_NB):  # not one that is being built
            shutil.rmtree(folder)
            gone.append(folder)
    return gone


def used(folder: Path) -> None:
    """Note that an artifact of the cache was used now."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def profile_table() -> dict[str, dict[str, float]]:
    """List the compiled sampling settings by name."""
    from zl.sampling.profiles import PROFILES

    return {p.name: {"temperature": p.temperature, "top_p": p.top_p, "penalty": p.penalty} for p in PROFILES.values()}


@contextlib.contextmanager
def _locked(folder: Path, how: int = 0) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(values, indent=1, sort_keys=True), "utf-8")
    part.replace(path)
