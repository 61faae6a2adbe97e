"""deploy/traefik: its structure against the fields of Traefik 3's reference, since Debian has no Traefik to ask.

Fields: doc.traefik.io, "reference/routing-configuration/tcp" (router, service, serversTransport) and "entryPoints".
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "traefik"


@pytest.fixture
def dynamic():
    return yaml.safe_load((FOLDER / "zl.yml").read_text())


def test_the_static_part_has_the_entry_point_and_watches_the_folder():
    static = yaml.safe_load((FOLDER / "traefik.yml").read_text())
    assert set(static) == {"entryPoints", "providers"}
    transport = static["entryPoints"]["zl"]["transport"]
    assert set(transport["lifeCycle"]) == {"requestAcceptGraceTimeout", "graceTimeOut"}
    assert transport["respondingTimeouts"] == {"readTimeout": "0s", "writeTimeout": "0s", "idleTimeout": "0s"}
    assert static["providers"] == {"file": {"directory": "/etc/traefik/zl", "watch": True}}


def test_the_dynamic_part_has_only_fields_of_tcp_and_its_names_meet(dynamic):
    assert set(dynamic) == {"tcp"}
    tcp = dynamic["tcp"]
    assert set(tcp) == {"routers", "services", "serversTransports"}
    static = yaml.safe_load((FOLDER / "traefik.yml").read_text())
    for router in tcp["routers"].values():
        assert set(router) == {"entryPoints", "rule", "service"}
        assert set(router["entryPoints"]) <= set(static["entryPoints"])
        assert router["rule"] == "HostSNI(`*`)"
        assert router["service"] in tcp["services"]
    for service in tcp["services"].values():
        assert list(service) in (["weighted"], ["loadBalancer"])
        if "weighted" in service:
            assert all(set(each) == {"name", "weight"} for each in service["weighted"]["services"])
            assert {each["name"] for each in service["weighted"]["services"]} <= set(tcp["services"])
        else:
            assert set(service["loadBalancer"]) == {"serversTransport", "servers"}
            assert service["loadBalancer"]["serversTransport"] in tcp["serversTransports"]
            assert all(set(each) == {"address"} for each in service["loadBalancer"]["servers"])
    for transport in tcp["serversTransports"].values():
        assert set(transport) == {"dialTimeout", "dialKeepAlive", "terminationDelay"}


def weights(path: Path) -> dict[str, int]:
    services = yaml.safe_load(path.read_text())["tcp"]["services"]
    return {each["name"]: each["weight"] for each in services["zl"]["weighted"]["services"]}


def test_weights_move_in_one_step_and_nothing_else_changes(tmp_path, dynamic):
    path = tmp_path / "zl.yml"
    shutil.copy(FOLDER / "zl.yml", path)
    for name, expected in (("green", {"blue": 0, "green": 1}), ("green", {"blue": 0, "green": 1}),
                           ("blue", {"blue": 1, "green": 0})):  # fmt: skip
        before = path.stat().st_ino
        subprocess.run([FOLDER / "weights.sh", name, path], check=True, timeout=30)
        assert weights(path) == expected
        assert path.stat().st_ino != before  # renamed into place: a reader sees the whole file
    assert yaml.safe_load(path.read_text()) == dynamic
    assert path.read_text() == (FOLDER / "zl.yml").read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["zl.yml"]


def test_an_unknown_service_is_refused(tmp_path):
    path = tmp_path / "zl.yml"
    shutil.copy(FOLDER / "zl.yml", path)
    done = subprocess.run([FOLDER / "weights.sh", "red", path], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "no service red" in done.stderr
    assert weights(path) == {"blue": 1, "green": 0}
