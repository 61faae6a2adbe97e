"""Blue/green under load with real servers: no request fails and no stream breaks. bench.rolling has the long form."""

from __future__ import annotations

import shutil

import pytest

from bench import rolling

pytestmark = pytest.mark.system

CLIENTS, SWITCHES, TOKENS = 16, 2, 500


@pytest.mark.parametrize("scenario", ["switch-shared", "switch-haproxy"])
def test_two_switches_under_load_are_not_noticed(tmp_path, tiny_artifacts, scenario):
    if scenario == "switch-haproxy" and shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed")
    report = rolling.run(scenario, tmp_path, tiny_artifacts, CLIENTS, SWITCHES, TOKENS)
    said = "\n".join(report.lines())
    assert report.passed, said
    assert report.verdict.flawless, said
    assert min(report.verdict.by.values()) > 0, said  # both have served
    assert report.crossed > 0, said  # streams were running when their server was told to drain
