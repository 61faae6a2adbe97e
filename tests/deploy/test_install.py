"""deploy/install.sh in a folder that stands for /: twice the same, upgrades beside what runs, nothing left behind.

pip gets a wheel and no dependencies, so nothing comes over the network.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import zl

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "deploy" / "install.sh"
PYTHON = getattr(sys, "_base_executable", sys.executable)


def make_wheel(folder: Path, version: str) -> Path:
    """Put the tree's own package into a wheel, under a version of the test's choice."""
    folder.mkdir(exist_ok=True)
    path = folder / f"zl-{version}-py3-none-any.whl"
    about = f"zl-{version}.dist-info"
    texts = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: zl\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "zl/__init__.py": (ROOT / "zl/__init__.py").read_text().replace(zl.__version__, version),
    }
    files = [file for file in (ROOT / "zl").rglob("*.py") if str(file.relative_to(ROOT)) not in texts]
    with zipfile.ZipFile(path, "w") as wheel:
        for file in files:
            wheel.write(file, str(file.relative_to(ROOT)))
        for name, text in texts.items():
            wheel.writestr(name, text)
        names = [*texts, *(str(file.relative_to(ROOT)) for file in files)]
        wheel.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in [*names, f"{about}/RECORD"]))
    return path


def install(root: Path, *arguments: object, ok: bool = True, script: Path = SCRIPT) -> str:
    command = ["bash", str(script), "--root", str(root), "--python", PYTHON, "--no-cuda", *map(str, arguments)]
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def snapshot(root: Path) -> dict[str, tuple]:
    """Tell of everything below: kind, size or target, and time of change."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            about = path.lstat()
            if "__pycache__" in path.parts:
                continue
            what = os.readlink(path) if path.is_symlink() else about.st_size if path.is_file() else "folder"
            found[str(path.relative_to(root))] = (what, about.st_mtime_ns if path.is_file() else 0)
    return found


def run_zl(root: Path, prefix: str = "opt/zl") -> str:
    command = [str(root / prefix / "bin" / "zl"), "--version"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # another zl that must not get in
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env, timeout=60)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return {version: make_wheel(folder, version) for version in ("1.0.0", "1.1.0")}


def test_install_again_upgrade_and_uninstall(tmp_path, wheels):
    root = tmp_path / "root"
    options = ["--wheel", wheels["1.0.0"], "--", "--no-deps", "--no-index"]
    assert "making release 1.0.0-" in install(root, *options)
    assert run_zl(root) == "zl 1.0.0"
    assert (root / "usr/local/bin/zl").resolve() == root / "opt/zl/bin/zl"
    assert set(os.listdir(tmp_path)) == {"root"}
    for file in (ROOT / "systemd").glob("*.service") if (ROOT / "systemd").is_dir() else ():
        assert "/opt/zl/bin/zl" in (root / "usr/local/lib/systemd/system" / file.name).read_text()
    settings = root / "etc/zl/zl.toml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("# mine\n")

    before = snapshot(root)
    assert "is there" in install(root, *options)
    again = snapshot(root)
    changed = {name for name in before.keys() | again.keys() if before.get(name) != again.get(name)}
    assert changed <= {"opt/zl/share/zl/manifest", "opt/zl/share/zl/install.sh"}

    old = (root / "opt/zl/current").resolve()
    install(root, "--wheel", wheels["1.1.0"], *options[2:])
    assert run_zl(root) == "zl 1.1.0"
    assert (old / "bin/python").exists()  # what runs from it goes on, and the way back is a link
    stale = root / "opt/zl/releases/0.9.0-gone"
    stale.mkdir()
    install(root, *options)
    assert run_zl(root) == "zl 1.0.0"
    assert not stale.exists()
    assert len(os.listdir(root / "opt/zl/releases")) == 2

    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    units = Path("/usr/local/lib/systemd/system")
    for name in ("zl.service", "zl@gpu1.service"):  # as `systemctl enable` leaves them
        (wants / name).symlink_to(units / name.replace("@gpu1", "@"))
    (wants / "zlib.service").symlink_to("/lib/systemd/system/zlib.service")

    installed = root / "opt/zl/share/zl/install.sh"
    assert stat.S_IMODE(installed.stat().st_mode) == 0o755
    assert "removed" in install(root, "--uninstall", script=installed)
    left = [name for name, (what, _) in snapshot(root).items() if what != "folder"]
    assert sorted(left) == ["etc/systemd/system/multi-user.target.wants/zlib.service", "etc/zl/zl.toml"]
    assert settings.read_text() == "# mine\n"
    assert not (root / "opt/zl").exists()


def test_another_prefix_purge_and_an_interrupted_install(tmp_path, wheels):
    root = tmp_path / "root"
    options = ["--prefix", "/srv/llm", "--wheel", wheels["1.0.0"], "--", "--no-deps", "--no-index"]
    assert "pip" in install(root, *options[:4], "--", "--no-such-option", ok=False)
    assert not (root / "srv/llm/current").exists()
    install(root, *options)
    assert run_zl(root, "srv/llm") == "zl 1.0.0"
    assert not (root / "opt").exists()
    for file in (root / "usr/local/lib").rglob("*.service"):
        assert "/opt/zl/" not in file.read_text()
    (root / "var/lib/zl").mkdir(parents=True)
    install(root, "--prefix", "/srv/llm", "--uninstall", "--purge")
    assert [name for name, (what, _) in snapshot(root).items() if what != "folder"] == []
    assert not (root / "var/lib/zl").exists()


def test_purge_after_an_uninstall_takes_what_that_left_and_no_other_installation_s(tmp_path, wheels):
    root = tmp_path / "root"
    options = ["--prefix", "/srv/llm", "--wheel", wheels["1.0.0"], "--", "--no-deps", "--no-index"]
    install(root, *options)
    said = install(root, "--uninstall", "--purge", ok=False)  # the wrong prefix
    assert f"nothing is installed at {root}/opt/zl, but " in said
    assert said.strip().endswith("--prefix /srv/llm")
    assert (root / "etc/zl/zl.toml").exists() == (ROOT / "systemd").is_dir()
    install(root, "--prefix", "/srv/llm", "--uninstall")
    (root / "etc/zl").mkdir(parents=True, exist_ok=True)
    (root / "var/log/zl").mkdir(parents=True)
    assert "nothing that this script installed is at" in install(root, "--uninstall", ok=False)
    for _ in range(2):
        assert "removed what an earlier --uninstall left" in install(root, "--uninstall", "--purge")
    assert not (root / "etc/zl").exists()
    assert not (root / "var/log/zl").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prefix", "opt"], "absolute path"),
        (["--wheel", "/none.whl"], "no such file"),
        (["--wheel", __file__], "no wheel of zl"),
        (["--frobnicate"], "unknown option --frobnicate"),
        (["--purge"], "goes with --uninstall"),
        (["--uninstall"], "--prefix names another place"),
        (["--python", "/bin/false"], "venv module"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, arguments, says):
    said = install(tmp_path / "root", *arguments, ok=False)
    assert says in said
    assert len(said.strip().splitlines()) == 1, said
    assert not (tmp_path / "root").exists()  # nothing was made before that was found
