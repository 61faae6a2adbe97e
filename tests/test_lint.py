"""Lint, types and file sizes as tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 500
TEXTS = {".py", ".md", ".sh", ".yaml", ".yml", ".toml", ".mk", ".service", ".conf", ".txt"}


def check(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_is_clean():
    check("ruff", "check", ".")


def test_mypy_is_clean():
    check("mypy")


def test_files_of_zl_stay_short():
    files = [path for path in (ROOT / "zl").rglob("*") if path.suffix in (".py", ".cpp", ".h", ".hpp", ".proto")]
    assert len(files) > 20
    lengths = {path.relative_to(ROOT): len(path.read_text("utf-8").splitlines()) for path in files}
    long = {str(path): n for path, n in lengths.items() if n > MAX_LINES and not path.stem.endswith("_pb2")}
    assert not long


def test_nobody_is_told_to_install_zl_from_a_package_index():
    """There is no zl on any: an extra comes with a clone (`pip install '.[cuda]'`) or a wheel."""
    told = re.compile(r"pip install +(?:-\S+ +)*\\*[\"'`]?zl(?![\w./-])")
    assert told.search("pip install -U 'zl[cuda]'")
    assert told.search("run pip install zl")
    folders = ("zl", "docs", "deploy", "systemd", "examples", "bench", "tests", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    files += [ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    assert len(files) > 300
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in files}
    assert [name for name, text in texts.items() if told.search(text)] == ["tests/test_lint.py"]
