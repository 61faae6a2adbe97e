"""A real Prometheus scrapes a real server under load; every query of the dashboard and every rule is asked of it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.prometheus import Prometheus, QueryError
from tests.deploy.promql import asked
from tests.system.conftest import ServerProcess, serving
from zl.client import Client
from zl.metrics.catalog import CATALOG

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt install prometheus brings the program"),
]

ROOT = Path(__file__).parents[2]
PANELS = [panel for panel in json.loads((ROOT / "deploy" / "grafana" / "zl.json").read_text())["panels"]
          if panel["type"] != "row"]  # fmt: skip
SCRAPES = 12
STREAMS = 12
ELSEWHERE = {"GPU memory": "NVML is where an NVIDIA driver is", "GPU clocks": "NVML is where an NVIDIA driver is"}
"""Panels that have data only on other machines, and why."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Conversations of all three profiles, a shared system prompt of several pages, and answers of several lengths."""
    system = "You answer questions about the sea. " * 24
    lines = [{"system": system, "messages": [f"{i}: how deep is it?"], "type": kind, "max_tokens": 8 + i % 3 * 8}
             for i, kind in enumerate(["CHAT", "SUMMARIZE", "CREATIVE"] * 4)]  # fmt: skip
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def server(gguf_path, tmp_path_factory) -> Iterator[ServerProcess]:
    """The embedded model as a user gets it, with all that has figures turned on."""
    folder = tmp_path_factory.mktemp("observed")
    yield from serving(folder, "--model", str(gguf_path), "--access-log", str(folder / "access.jsonl"), "--audit-log",
                       str(folder / "audit.jsonl"))  # fmt: skip


@pytest.fixture(scope="module")
def prometheus(server, prompts, tmp_path_factory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the server each second while it was under load, and has just seen the load end."""
    with Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{server.metrics_port}") as running:
        load = subprocess.Popen(
            [sys.executable, "-m", "zl", "load", "--streams", str(STREAMS), "--per-stream", "1000", "--prompts",
             str(prompts), server.unix],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            _mistake(server.unix)
            # A busy machine takes its time to begin: first some whole answers, then the scrapes that are looked at.
            _wait(running, 'zl_requests_total{outcome="length"}', 2 * STREAMS)
            _wait(running, 'sum_over_time(up{job="zl"}[5m])', SCRAPES, more=True)
            running.loaded_at = time.time()
            time.sleep(1.5)  # a scrape is stamped with its begin: the newest before that time is to end under load too
            assert load.poll() is None, load.stdout.read()
        finally:
            load.kill()
            load.communicate()
        yield running


def _wait(prometheus: Prometheus, expression: str, least: float, *, more: bool = False) -> None:
    """Wait until an expression is at least so much, or with `more` so much more than it is now."""
    deadline, begun = time.monotonic() + 120, None
    while True:
        found = sum(values(prometheus.query(expression)))
        begun = found if begun is None else begun
        if found - (begun if more else 0) >= least:
            return
        assert time.monotonic() < deadline, f"{expression} is {found} after two minutes"
        time.sleep(0.2)


def _mistake(address: str) -> None:
    """Have one request refused: its error is to be counted."""
    with Client(address) as client, pytest.raises(Exception, match="top_p"):
        client.ask("hi", top_p=7.0)


def values(found: list[dict]) -> list[float]:
    return [float(series["value"][1]) for series in found]


def ask_loaded(prometheus: Prometheus, expression: str) -> list[float]:
    return values(prometheus.query(expression.replace("$__rate_interval", "10s").replace("$instance", ".*"),
                                   prometheus.loaded_at))  # fmt: skip


def test_the_server_is_scraped_without_errors(prometheus):
    (target,) = prometheus.targets()
    assert (target["health"], target["lastError"]) == ("up", "")
    (up,) = ask_loaded(prometheus, 'sum_over_time(up{job="zl"}[5m])')
    (tried,) = ask_loaded(prometheus, 'count_over_time(up{job="zl"}[5m])')
    assert up >= SCRAPES
    assert tried - up <= 1  # the first may come before the metrics port's first answer


def test_promtool_accepts_what_the_server_says(prometheus, server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False,
                          timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_has_data(prometheus, panel):
    for target in panel["targets"]:
        found = ask_loaded(prometheus, target["expr"])
        if panel["title"] in ELSEWHERE and not Path("/proc/driver/nvidia/version").exists():
            assert found == []
            continue
        assert found, f"no data: {target['expr']}"
        assert any(math.isfinite(value) for value in found), f"no number: {target['expr']}"


BUSY = ("Tokens/s", "Busy rows", "First token, p99", "Gap, p99", "Ready", "Glue share", "Where answers' time goes",
        "Mean time of a part", "Steps by program", "Tokens computed", "Rows", "Pages", "Requests by outcome", "Wire",
        "Memory of the model", "Process", "CPU", "Connections")  # fmt: skip


@pytest.mark.parametrize("title", BUSY)
def test_panels_of_work_show_work(prometheus, title):
    (panel,) = [panel for panel in PANELS if panel["title"] == title]
    assert max(ask_loaded(prometheus, panel["targets"][0]["expr"])) > 0


def test_every_family_of_the_catalog_is_scraped_and_no_other_of_ours(prometheus):
    names = {series["metric"]["__name__"] for series in prometheus.query('{job="zl"}', prometheus.loaded_at)}
    own = {name for name in names if name.startswith(("zl_", "glue_", "process_"))}
    expected = set()
    for family in CATALOG.values():
        ends = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        expected |= {family.name + end for end in ends}
    assert own - expected == set()
    assert {name for name in expected - own if not name.startswith("zl_gpu_")} == set()


def test_every_rule_is_healthy_and_has_data(prometheus):
    rules = prometheus.rules()
    assert len(rules) >= 20
    for rule in rules:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule
        if rule["type"] == "recording":
            found = ask_loaded(prometheus, rule["query"])
            assert found, rule["name"]
            assert any(math.isfinite(value) for value in found), rule["name"]
            assert ask_loaded(prometheus, rule["name"]), rule["name"]
            continue
        # An alert's expression is empty while all is well; what it compares must be there.
        prometheus.query(rule["query"])
        for metric, _ in asked(rule["query"]).selectors:
            assert ask_loaded(prometheus, f"count({metric})"), f"{rule['name']} compares {metric}, which is not there"


def test_a_sound_server_has_no_alert_firing(prometheus):
    alerts = prometheus.api("alerts")["alerts"]
    assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []


def test_an_error_is_counted_where_the_dashboard_looks(prometheus):
    (seen,) = prometheus.query('zl_errors_total{code="bad_request"}', prometheus.loaded_at)
    assert float(seen["value"][1]) >= 1


def test_prometheus_counts_the_tokens_that_the_client_got(prometheus, server):
    def counted() -> float:
        (seen,) = prometheus.query('zl_tokens_total{kind="generated"}')
        return float(seen["value"][1])

    server.settle()
    time.sleep(1.5)
    before, n = counted(), 0
    threads = [threading.Thread(target=_ask, args=(server.unix,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 10
    while (n := counted() - before) < 4 * 16 and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.5)
    assert counted() - before == n == 4 * 16


def _ask(address: str) -> None:
    with Client(address) as client:
        client.ask("Count.", max_tokens=16, ignore_eos=True)


def test_what_prometheus_refuses_is_an_error_here(prometheus):
    with pytest.raises(QueryError, match="parse error"):
        prometheus.query("rate(zl_tokens_total[")
