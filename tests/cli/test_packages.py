"""zl/cli/packages.py: with the client's only dependency, commands for clients work and others end in one clear line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fake_server import FakeServer
from zl.cli import build_parser
from zl.cli.packages import PACKAGES

COMMANDS = tuple(build_parser()[1])
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = sorted(PACKAGES.keys() - {"google"})

# None in sys.modules: importing it raises ModuleNotFoundError with its name, as where it is not installed.
CODE = """
import sys
sys.modules.update(dict.fromkeys({hidden!r}))
from zl.cli import main
sys.exit(main(sys.argv[1:]))
"""


def zl(*arguments: str, hidden: Sequence[str] = HEAVY, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE.format(hidden=hidden), *arguments], capture_output=True,
                          text=True, timeout=60, stdin=subprocess.DEVNULL, check=False,
                          env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **env})  # fmt: skip


def test_the_list_is_what_zl_is_installed_with():
    wanted = [re.match(r"[\w-]+", text)[0] for text in PROJECT["dependencies"]]
    assert sorted(PACKAGES.values()) == sorted(wanted)


@pytest.mark.parametrize("arguments", [["serve"], ["build"], ["load", "--echo"]], ids=lambda words: words[0])
def test_what_needs_more_than_the_client_says_what_and_ends_with_2(arguments, tmp_path):
    done = zl(*arguments, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(rf"zl: {arguments[0]} needs the package [\w-]+, which is not installed here; install .*", line)
    assert not list(tmp_path.iterdir())  # no model was fetched first


def test_a_client_needs_protobuf_only():
    with FakeServer() as server:
        done = zl("ask", "say Paris", "--connect", server.address)
        assert (done.returncode, done.stdout.strip()) == (0, "Paris"), done.stderr
    assert zl("frame", "hi").returncode == 0


def test_without_protobuf_too_there_is_help_and_one_line(tmp_path):
    hidden = list(PACKAGES)
    for name in COMMANDS:
        assert zl(name, "--help", hidden=hidden).returncode == 0
    done = zl("ask", "hi", hidden=hidden)
    assert done.returncode == 2
    assert done.stderr.startswith("zl: ask needs the package protobuf, which is not installed here; ")


def test_the_recipe_of_the_client_page_names_the_client_s_packages():
    page = (ROOT / "docs" / "client.md").read_text()
    (named,) = re.findall(r"pip install '(protobuf[^']*)'", page)
    assert named in PROJECT["dependencies"]
