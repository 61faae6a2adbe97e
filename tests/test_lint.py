"""Lint, types and file sizes as tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 500


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
