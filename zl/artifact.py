"""An artifact: one model, built for one kind of machine, in one folder that is read at start and never written.

`manifest.json` says what was decided and hashes every other file; it is written last: a folder that has one is whole.
An artifact holds native code: open only those that you or somebody you trust has built.

State: none. Refuses torch, net, dispatch and asyncio.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zl import facts
from zl.config import POLICY, Settings
from zl.errors import ConfigError, ModelError
from zl.filehash import cache_root, sha256_of
from zl.gpu.native.build import cpu_flags, needed_flags, runs
from zl.gpu.native.packed import Packed
from zl.shapes import ModelShape, RopeScaling
from zl.text.detok import TokenTable
from zl.text.frozen import thaw
from zl.text.tokenizer import TextModel

FORMAT = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
WEIGHTS, PROGRAM, TOKENIZER, TOKENS = "weights.bin", "program.so", "tokenizer.json", "tokens.bin"
FILES = (TOKENIZER, TOKENS, PROGRAM, WEIGHTS)

_AGAIN = "build it again with `zl build`"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says of one file."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A whole artifact whose manifest has been read; its files are still to be checked.

    facts    as zl.facts made them; `build_id` is their hash
    inputs   hashes of the files it was made from
    text     zl.text.frozen's plain values
    seconds  what each phase of the build took
    """

    folder: Path
    build_id: str
    facts: dict[str, Any]
    inputs: list[str]
    model: ModelShape
    text: dict[str, Any]
    system_prompts: tuple[str, ...]
    files: dict[str, FileEntry]
    seconds: dict[str, float]

    @property
    def level(self) -> str:
        """Name the instruction level of its program."""
        return str(self.facts["program"])

    @property
    def packed(self) -> Packed:
        """Name what the native step opens."""
        return Packed(self.folder / WEIGHTS, self.folder / PROGRAM, self.level, str(self.facts["dtype"]))

    def read_text(self) -> tuple[TextModel, TokenTable]:
        """Read tokenizer and token table. Raises ModelError: a damaged file."""
        return thaw(self.text, self._read(TOKENIZER), self._read(TOKENS))

    def check_sizes(self) -> None:
        """Compare every file's size with the manifest. Raises ModelError."""
        for name, entry in self.files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != entry.bytes:
                what = "is missing" if found is None else f"has {found} bytes, the manifest says {entry.bytes}"
                raise ModelError(f"{path}: {what}; {_AGAIN}")

    def _read(self, name: str) -> bytes:
        data = (self.folder / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.files[name].sha256:
            raise _damaged(self.folder / name)
        return data


class HashCheck:
    """Hash an artifact's large files on a thread of their own, while the start does something else.

    `wait` raises ModelError where one is damaged; nothing of them may be trusted before it has returned.
    """

    def __init__(self, artifact: Artifact, names: tuple[str, ...] = (PROGRAM, WEIGHTS)):
        self._bad: list[Path] = []
        # A start that a signal ends does not wait for it, nor does the process.
        self._thread = threading.Thread(target=self._run, args=(artifact, names), name="zl-hash", daemon=True)
        self._thread.start()

    def _run(self, artifact: Artifact, names: tuple[str, ...]) -> None:
        for name in names:
            path = artifact.folder / name
            try:
                good = sha256_of(path) == artifact.files[name].sha256
            except OSError:
                good = False
            if not good:
                self._bad.append(path)

    def wait(self) -> None:
        """Wait for the end."""
        self._thread.join()
        if self._bad:
            raise _damaged(self._bad[0])


def is_artifact(path: Path) -> bool:
    """Tell whether a path is an artifact; ModelError where its build did not finish."""
    if (path / MANIFEST).is_file():
        return True
    if (path / PROGRESS).is_file():
        raise ModelError(f"{path}: the build of this artifact did not finish; run `zl build` again, it goes on there")
    return False


def read(folder: Path) -> Artifact:
    """Read a manifest. Raises ModelError: damaged, or of another format."""
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text("utf-8"))
        form = values["format"]
        if form != FORMAT:
            raise ModelError(f"{path}: artifact format {form}, this zl reads {FORMAT}; {_AGAIN}")
        if values.pop("check") != check_of(values):
            raise _damaged(path)
        artifact = Artifact(
            folder=folder,
            build_id=values["build_id"],
            facts=values["facts"],
            inputs=values["inputs"],
            model=_shape(values["model"]),
            text=values["text"],
            system_prompts=tuple(values["system_prompts"]),
            files={name: FileEntry(**entry) for name, entry in values["files"].items()},
            seconds=values["seconds"],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if artifact.build_id != facts.build_id(artifact.facts) or set(artifact.files) != set(FILES):
        raise _damaged(path)
    return artifact


def check_of(values: dict[str, Any]) -> str:
    """Hash a manifest's values, so that no other file is needed to find it damaged."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def fit(artifact: Artifact, settings: Settings) -> Settings:
    """Settle the settings of a server on an artifact that was named: its own where nothing else was asked for.

    Raises  ConfigError: a setting asks for what it was not built for; ModelError: another machine's, or another build
    """
    made, where = artifact.facts, artifact.folder
    level = artifact.level
    asked = (("dtype", settings.dtype, made["dtype"]), ("device", settings.device, made["device"]),
             ("cpu_level", settings.cpu_level, level), ("kv", settings.kv, made.get("kv")),
             ("penalty_filter", settings.penalty_filter, made.get("penalty_filter", "exact")))  # fmt: skip
    for name, wish, has in asked:
        if wish not in ("auto", has):
            raise ConfigError(f"{name} = {wish!r}: {where} was built for {has}; leave {name} out, or {_AGAIN}")
    _fit_machine(artifact)
    chosen: dict[str, Any] = {}
    mine = facts.limits_of(settings, artifact.model)
    for name in (*facts.LIMITS, *POLICY):
        has = made["limits"][name]
        default = Settings.__dataclass_fields__[name].default
        if mine[name] != has and getattr(settings, name) != default:
            raise ConfigError(f"{name} = {getattr(settings, name)!r}: {where} was built for {has}; {_AGAIN}")
        chosen[name] = has
    settings = dataclasses.replace(
        settings, dtype=made["dtype"], device=made["device"], cpu_level=level, **chosen,
        kv="int8" if made.get("kv") == "int8" else "auto",
        penalty_filter=made.get("penalty_filter", "exact"),
        system_prompts=settings.system_prompts or artifact.system_prompts,
    )  # fmt: skip
    now = facts.plain(facts.known_facts(settings, artifact.model, level, made["device"]))
    for name, value in now.items():
        if made.get(name) != value:
            raise ModelError(f"{where}: of another build of zl: {_difference(name, made.get(name), value)}; {_AGAIN}")
    return settings


def builds_folder() -> Path:
    """Name the folder of the artifacts that `zl serve` makes for itself."""
    return cache_root() / "builds"


def folder_of(build_id: str) -> Path:
    """Name a cached artifact's folder."""
    return builds_folder() / build_id[:16]


def find(path: Path, settings: Settings, level: str) -> Artifact | None:
    """Find the cached artifact that a build of this model, with these settings, on this machine would make again."""
    inputs = None
    for artifact in cached():
        if artifact.level != level or artifact.facts["dtype"] != facts.dtype_of(settings):
            continue
        now = facts.plain(facts.known_facts(settings, artifact.model, level, "cpu"))
        if any(artifact.facts.get(name) != value for name, value in now.items()):
            continue
        inputs = inputs if inputs is not None else facts.inputs_of(path)
        if artifact.inputs == inputs:
            return artifact
    return None


def cached() -> Iterator[Artifact]:
    """List the cached artifacts that can be read."""
    root = builds_folder()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            if (folder / MANIFEST).is_file():
                yield read(folder)
        except ModelError:
            continue  # damaged, or of another format: the build makes it again


def _fit_machine(artifact: Artifact) -> None:
    level, here = artifact.level, platform.machine()
    kind = str(artifact.facts["machine"]).split()[0]
    if kind != here:
        raise ModelError(f"{artifact.folder}: built for {kind}, this machine is {here}; {_AGAIN} here")
    missing = needed_flags(level) - cpu_flags()
    if missing or not runs(level):
        lacks = f"the features {', '.join(sorted(missing))}" if missing else "the kernel's leave to use tile registers"
        raise ModelError(f"{artifact.folder}: built for a CPU with {level}, this machine lacks {lacks}; {_AGAIN} here")


def _shape(values: dict[str, Any]) -> ModelShape:
    scaling, factors = values["rope_scaling"], values["rope_factors"]
    back = {
        "eos_ids": tuple(values["eos_ids"]),
        "rope_scaling": None if scaling is None else RopeScaling(**scaling),
        "rope_factors": None if factors is None else tuple(factors),
    }
    return ModelShape(**values | back)


def _difference(name: str, made: Any, now: Any) -> str:
    if isinstance(made, dict) and isinstance(now, dict):
        for key in sorted({*made, *now}):
            if made.get(key) != now.get(key):
                return f"{name}: {key} was {made.get(key)!r}, here it is {now.get(key)!r}"
    short = [value[:12] if isinstance(value, str) and len(value) == 64 else repr(value) for value in (made, now)]
    return f"{name} was {short[0]}, here it is {short[1]}"


def _damaged(path: Path) -> ModelError:
    return ModelError(f"{path}: damaged or cut short; {_AGAIN}")
