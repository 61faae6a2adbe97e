"""docs/scaling.md: its arithmetic gives what it says, its TOML can be read, its table of keys is the program's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zl.tools import fleet

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "scaling.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_the_arithmetic_gives_what_the_page_says():
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[0]], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == blocks("text")[0]


def test_every_key_of_the_file_is_in_the_table_with_its_default():
    table = TEXT.partition("### The file")[2].partition("## Kubernetes")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    found = {key: default for _, keys, default, _ in rows[2:] for key in re.findall(r"\w+", keys)}
    tables = (fleet._SWITCH, fleet._HAPROXY, fleet._INSTANCE)
    assert set(found) == {key for table in tables for key in table}
    for key, default in found.items():
        field = fleet.Fleet.__dataclass_fields__.get(key)
        if field is None or not default:
            continue
        text = default.strip("`")
        value = field.default
        assert text == (str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float)
                        else str(value)), key  # fmt: skip


def test_an_instance_with_commands_can_be_read(tmp_path):
    (block,) = blocks("toml")
    path = tmp_path / "switch.toml"
    path.write_text(block + block.replace("blue", "green"))
    assert [each.name for each in fleet.load(path).instances] == ["blue", "green"]


def scripts(folder: Path) -> dict[str, Path]:
    """The page's start and stop with their folders below another one."""
    made = {}
    for block in blocks("sh"):
        if found := re.match(r"#!/bin/sh\n# /etc/zl/(\w+) NAME\n", block):
            path = made[found[1]] = folder / found[1]
            path.write_text(block.replace("/run/zl", str(folder)).replace("/var/log/zl", str(folder)))
            path.chmod(0o755)
    return made


def test_start_and_stop_of_the_page_start_and_stop_and_refuse_what_they_did_not_start(tmp_path):
    program = tmp_path / "zl"  # in the place of `zl hold`: what is started and stopped is tested, not the server
    program.write_text(f"#!/bin/sh\necho \"$@\" >{tmp_path}/ran\nexec sleep 60\n")
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    made = scripts(tmp_path)
    assert set(made) == {"start", "stop"}

    def run(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([made[name], "blue"], env=env, capture_output=True, text=True, timeout=10, check=False)

    refused = run("stop")
    assert refused.returncode == 1
    assert "blue was not started by /etc/zl/start" in refused.stderr
    assert run("start").returncode == 0
    pid = int((tmp_path / "blue.pid").read_text())
    while not (tmp_path / "ran").exists():
        time.sleep(0.01)
    assert "-- zl serve --config /etc/zl/blue.toml" in (tmp_path / "ran").read_text()
    assert run("stop").returncode == 0
    assert not Path(f"/proc/{pid}").exists()
    assert run("stop").returncode == 1  # its file is gone: it is not running


def test_the_files_that_the_page_names_are_there():
    named = set(re.findall(r"deploy/[\w./-]*\w", TEXT))
    assert len(named) >= 8
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.skipif(shutil.which("keepalived") is None, reason="keepalived is not installed")
def test_keepalived_takes_its_file(tmp_path):
    interfaces = [path.parent.name for path in Path("/sys/class/net").glob("*/operstate") if path.read_text() == "up\n"]
    if not interfaces:
        pytest.skip("keepalived takes no loopback interface, and no other is up")
    path = tmp_path / "keepalived.conf"
    path.write_text((ROOT / "deploy" / "haproxy" / "keepalived.conf").read_text().replace("eth0", interfaces[0]))
    done = subprocess.run(["keepalived", "-t", "-f", path], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip()
