"""deploy/blue-green: systemd takes the pair's units together with zl's template units, and they fit each other."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIR, UNITS = ROOT / "deploy" / "blue-green", ROOT / "systemd"


class Unit(configparser.RawConfigParser):
    """A unit file; keys may be there more than once, the last counts here."""

    optionxform = staticmethod(str)

    def __init__(self, path: Path):
        super().__init__(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
        self.read_string(path.read_text())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path):
    for path in (UNITS / "zl@.service", UNITS / "zl@.socket", PAIR / "zl-pair.socket", PAIR / "zl-pair.service"):
        # What they run is not installed here, nor is its documentation.
        lines = [line for line in path.read_text().splitlines() if not line.startswith("Documentation=")]
        text = "\n".join(lines).replace("/opt/zl/bin/zl", "/bin/true")
        (tmp_path / path.name).write_text(text + "\n")
    drop_in = tmp_path / "zl@.service.d"
    drop_in.mkdir()
    shutil.copy(PAIR / "pair.conf", drop_in)
    names = ("zl@blue.service", "zl@green.service", "zl-pair.socket", "zl-pair.service")
    for source in ("zl@.service", "zl@.socket"):
        for name in ("blue", "green"):
            (tmp_path / source.replace("@", f"@{name}")).symlink_to(source)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in names)],
        capture_output=True, text=True, timeout=60, env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr


def test_the_shared_socket_starts_no_instance_by_itself():
    socket, keeper, drop_in = (Unit(PAIR / name) for name in ("zl-pair.socket", "zl-pair.service", "pair.conf"))
    assert socket["Socket"]["Service"] == "zl-pair.service"
    assert keeper["Service"]["Type"] == "oneshot"
    assert keeper["Service"]["RemainAfterExit"] == "yes"
    assert "zl-pair.service" in drop_in["Unit"]["Requires"].split()
    assert drop_in["Service"]["Sockets"].split() == ["zl-pair.socket", "zl@%i.socket"]


def test_the_shared_socket_is_set_up_as_that_of_a_single_server():
    shared, single = Unit(PAIR / "zl-pair.socket")["Socket"], Unit(UNITS / "zl.socket")["Socket"]
    for key in ("SocketUser", "SocketGroup", "SocketMode", "Backlog", "NoDelay", "KeepAlive", "ListenStream"):
        assert shared[key] == single[key]
