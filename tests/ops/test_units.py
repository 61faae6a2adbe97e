"""The unit files: systemd's own tools find nothing wrong, the exposure is low, the example configuration loads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from zl.config import load, spec_of
from zl.ops.reload import LIVE

SYSTEMD = Path(__file__).parent.parent.parent / "systemd"
UNITS = ("zl.service", "zl.socket", "zl@.service", "zl@.socket")
MOST_EXPOSURE = 2.5

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


def directives(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def installed(tmp_path) -> Path:
    """The units as they would be installed, but for a program that is there on this machine."""
    for unit in UNITS:
        text = (SYSTEMD / unit).read_text()
        (tmp_path / unit).write_text(text.replace("ExecStart=/opt/zl/bin/zl", "ExecStart=/bin/true"))
    return tmp_path


@needs_systemd
def test_systemd_finds_nothing_wrong(installed):
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *(str(installed / unit) for unit in UNITS)],
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
def test_verify_would_find_a_mistake(installed):
    unit = installed / "zl.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=10", "WatchdogSek=10"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)],
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert "WatchdogSek" in done.stderr


def exposure(unit: Path, tell) -> float:
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
                          capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if "Overall exposure level" in line)
    tell(line)
    return float(re.search(r": ([0-9.]+)", line)[1])


@needs_systemd
@pytest.mark.parametrize("unit", ["zl.service", "zl@.service"])
def test_exposure_is_low_with_and_without_a_gpu(installed, unit, tell):
    assert exposure(installed / unit, tell) < MOST_EXPOSURE
    with (installed / unit).open("a") as file:
        file.write((SYSTEMD / "gpu.conf").read_text())
    assert exposure(installed / unit, tell) < MOST_EXPOSURE


@needs_systemd
def test_users_and_folders_are_as_systemd_reads_them(tmp_path):
    root = tmp_path / "root"
    for folder in ("etc", "usr/lib/sysusers.d", "usr/lib/tmpfiles.d"):
        (root / folder).mkdir(parents=True)
    shutil.copy(SYSTEMD / "zl.sysusers", root / "usr/lib/sysusers.d/zl.conf")
    shutil.copy(SYSTEMD / "zl.tmpfiles", root / "usr/lib/tmpfiles.d/zl.conf")
    if shutil.which("systemd-sysusers") is None or not Path("/etc/shadow").exists():
        pytest.skip("no systemd-sysusers here")
    done = subprocess.run(["systemd-sysusers", f"--root={root}", "zl.conf"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^zl:x:\d+:\d+:zl inference server:/var/lib/zl:", (root / "etc/passwd").read_text(), re.M)
    lines = [line.split() for line in (SYSTEMD / "zl.tmpfiles").read_text().splitlines() if line.startswith("d ")]
    assert {words[1] for words in lines} == {"/run/zl", "/etc/zl", "/var/lib/zl", "/var/cache/zl", "/var/log/zl"}
    done = subprocess.run(["systemd-tmpfiles", f"--root={root}", "--create", "zl.conf"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (root / "var/lib").iterdir()} == {"zl"}
    assert oct((root / "etc/zl").stat().st_mode & 0o777) == "0o750"


def test_the_instance_units_differ_only_in_their_name():
    plain, instance = directives(SYSTEMD / "zl.service"), directives(SYSTEMD / "zl@.service")
    assert instance.pop("EnvironmentFile") == ["-/etc/zl/%i.env"]
    for name, values in instance.items():
        unnamed = [re.sub("@%i|, instance %i", "", value).replace("%i.toml", "zl.toml") for value in values]
        assert unnamed == plain[name], name
    assert instance.keys() == plain.keys()


def test_the_service_asks_for_what_the_server_does():
    service = directives(SYSTEMD / "zl.service")
    assert service["Type"] == ["notify"]
    assert service["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(service["WatchdogSec"][0]) >= 5
    assert service["CacheDirectory"] == ["zl"]
    assert "XDG_CACHE_HOME=/var/cache" in service["Environment"][0]
    assert service["RestartPreventExitStatus"] == ["2"]  # ConfigError.exit_status
    assert "MemoryDenyWriteExecute" not in service  # torch in the fallback would not live


def test_the_example_configuration_loads_and_marks_what_a_reload_takes():
    path = SYSTEMD / "zl.toml"
    settings = load(file=path, environ={})
    assert settings.access_log == "/var/log/zl/access.jsonl"
    section = ""
    seen = set()
    for line in path.read_text().splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            section = header[1]
        elif entry := re.match(r"(?:# )?(\w+) = ", line):
            name = entry[1]
            seen.add(name)
            assert spec_of(name).section == section
            paired = name == "tls_key"  # marked with its certificate, one line above
            assert paired or ("(reload" in line) == (name in LIVE), line
    assert len(seen) > 12
