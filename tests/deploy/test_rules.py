"""deploy/ against the catalog of metrics, the runbook and promtool: nothing there can drift from what a server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bench.prometheus import config
from tests.deploy.promql import asked
from tests.fake_metrics import FREE_LABELS, FakeMetrics
from zl.metrics.catalog import CATALOG, HISTOGRAM

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "zl.json"
BY_PROMETHEUS = {"job", "instance"}
RULES = [rule for name in ("zl-rules.yml", "zl-alerts.yml")
         for group in yaml.safe_load((DEPLOY / name).read_text())["groups"] for rule in group["rules"]]  # fmt: skip
RECORDED = {rule["record"]: rule for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
CASES = yaml.safe_load((DEPLOY / "zl-rules-test.yml").read_text())["tests"]
PANELS = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
QUERIES = {f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]}


def labels_of(metric: str) -> set[str]:
    """The labels that a sample of this name has on a server; KeyError where there is no such sample."""
    if metric == "up":
        return BY_PROMETHEUS
    if metric in RECORDED:
        return set(asked(RECORDED[metric]["expr"]).grouped) - {"le"}
    family = CATALOG.get(metric)
    if family is not None and family.kind != HISTOGRAM:
        return {*family.labels, *BY_PROMETHEUS}
    name, _, part = metric.rpartition("_")
    family = CATALOG[name]
    if family.kind != HISTOGRAM or part not in ("bucket", "sum", "count"):
        raise KeyError(metric)
    return {*family.labels, *BY_PROMETHEUS, *({"le"} if part == "bucket" else ())}


def values_of(metric: str, label: str) -> set[str] | None:
    """The values that a label can have, None where the catalog leaves it open."""
    family = CATALOG.get(metric) or CATALOG.get(metric.rpartition("_")[0])
    if family is None or label not in family.labels:
        return None
    known = dict(zip(family.labels, family.values or ((),) * len(family.labels), strict=True))[label]
    if metric == "zl_program_hits_total" and label == "program":
        known = FREE_LABELS[label]
    return set(known) or None


def check(expression: str) -> None:
    """Every metric, label, and plain label value of an expression is one that a server has."""
    found = asked(expression)
    assert found.selectors, f"no metric in {expression}"
    seen: set[str] = set()
    for metric, matched in found.selectors:
        own = labels_of(metric)
        assert matched <= own, f"{metric} has no label {matched - own}: {expression}"
        seen |= own
    assert found.grouped <= seen, f"no metric has the label {found.grouped - seen}: {expression}"
    for metric, inside in re.findall(r"([\w:]+)\{([^}]*)\}", expression):
        for label, text in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', inside):
            allowed = values_of(metric, label)
            assert allowed is None or set(text.split("|")) <= allowed, f'{metric} never has {label}="{text}"'


@pytest.mark.parametrize("name", [*RECORDED, *ALERTS])
def test_every_rule_asks_for_what_a_server_has(name):
    check((RECORDED | ALERTS)[name]["expr"])


@pytest.mark.parametrize("name", QUERIES)
def test_every_panel_asks_for_what_a_server_has(name):
    check(QUERIES[name])


def test_the_checks_above_find_what_drifts():
    check('rate(zl_tokens_total{kind="generated"}[1m])')
    for expression in (
        "zl_token_total", "zl_e2e_seconds", "zl_rows_bucket", "zl_rows{status='free'}", 'zl_rows{state="busy"}',
        "sum by (le) (zl_e2e_seconds_sum)", 'zl_program_hits_total{program!~"generic|none|other"}', "vector(1)",
    ):  # fmt: skip
        with pytest.raises((AssertionError, KeyError)):
            check(expression)


def test_every_family_of_requests_and_capacity_is_on_the_dashboard():
    """What the catalog has and no panel shows is left out on purpose."""
    shown = {name for query in QUERIES.values() for name, _ in asked(query).selectors}
    shown |= {name.rpartition("_")[0] for name in shown if name.endswith(("_bucket", "_sum", "_count"))}
    assert set(CATALOG) - shown == {
        "glue_layer_share_ratio",  # the gauge is worked out of the window that is looked at
        "zl_frames_total", "zl_steps_total", "zl_live", "process_virtual_memory_bytes", "process_open_fds",
        "process_max_fds", "process_start_time_seconds",
    }  # fmt: skip


def test_the_dashboard_is_as_generated_and_well_formed():
    done = subprocess.run([sys.executable, ROOT / "deploy" / "grafana" / "dashboard.py", "--check"],
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = json.loads(DASHBOARD.read_text())
    numbers = [panel["id"] for panel in whole["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    kinds = {panel["title"]: panel["type"] for panel in PANELS}
    assert kinds["Glue share"] == "gauge"
    assert kinds["Time to first token"] == kinds["Gap between tokens"] == "heatmap"
    (hits,) = [panel for panel in PANELS if panel["title"] == "Program hits"]
    assert 0.85 in [step["value"] for step in hits["fieldConfig"]["defaults"]["thresholds"]["steps"]]
    assert all(panel["description"] for panel in PANELS)


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None,
                                    reason="promtool is not installed (apt install prometheus)")  # fmt: skip

# -- promtool -------------------------------------------------------------------------------------------------------


def promtool(*arguments: str | Path, stdin: str | None = None, cwd: Path = DEPLOY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False,
                          cwd=cwd, timeout=60)  # fmt: skip


@needs_promtool
def test_promtool_accepts_rules_configuration_and_metrics(tmp_path):
    for arguments in (("check", "config", "prometheus.yml"), ("check", "rules", "zl-rules.yml", "zl-alerts.yml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    with FakeMetrics() as fake:
        done = promtool("check", "metrics", stdin=fake.page())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_promtool
def test_promtool_can_read_every_query_of_the_dashboard(tmp_path):
    rules = [{"record": f"panel:query{i}", "expr": query.replace("$__rate_interval", "1m")}
             for i, query in enumerate(QUERIES.values())]  # fmt: skip
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", "queries.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_that_the_rules_do_what_their_tests_say():
    done = promtool("test", "rules", "zl-rules-test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_recorded_series_and_both_sides_of_every_alert_are_tested():
    series = {name for case in CASES for test in case.get("promql_expr_test", ())
              for name, _ in asked(test["expr"]).selectors}  # fmt: skip
    assert series == set(RECORDED)
    fires, quiet = set(), set()
    for case in CASES:
        for test in case.get("alert_rule_test", ()):
            (fires if test.get("exp_alerts") else quiet).add(test["alertname"])
    assert fires == quiet == set(ALERTS)


@needs_promtool
@pytest.mark.parametrize("name", [*RECORDED, *ALERTS])
def test_the_unit_tests_notice_a_spoilt_rule(name, tmp_path):
    rule = (RECORDED | ALERTS)[name]
    if "record" in rule:
        spoilt = [{"expr": f"2 * ({rule['expr']})"}]
    else:
        spoilt = [{"expr": f"({rule['expr']}) and vector(0) > 1"}, {"labels": {"severity": "none"}}]
    for change in spoilt:
        for file in ("zl-rules.yml", "zl-alerts.yml"):
            whole = yaml.safe_load((DEPLOY / file).read_text())
            for group in whole["groups"]:
                group["rules"] = [each | change if each == rule else each for each in group["rules"]]
            (tmp_path / file).write_text(yaml.safe_dump(whole))
        shutil.copy(DEPLOY / "zl-rules-test.yml", tmp_path)
        assert promtool("test", "rules", "zl-rules-test.yml", cwd=tmp_path).returncode != 0, change


# -- the runbook ----------------------------------------------------------------------------------------------------


def test_every_alert_has_its_section_in_the_runbook_and_no_other_is_there():
    text = (ROOT / "docs" / "runbook.md").read_text()
    sections = re.findall(r"^## (\w+)\n\n(page|ticket)\. ", text, re.M)
    assert sections == [(name, rule["labels"]["severity"]) for name, rule in ALERTS.items()]
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["annotations"]["summary"]


def test_names_in_the_documents_are_names_of_metrics():
    for page in ("runbook.md", "observability.md"):
        text = (ROOT / "docs" / page).read_text()
        for name in set(re.findall(r"`((?:zl|glue|process)_[a-z0-9_]+?)(?:\{[^`]*)?`", text)):
            assert name in CATALOG or labels_of(name), f"{page}: {name}"


def test_the_configuration_for_tests_is_the_one_that_is_shipped():
    text = config("127.0.0.1:12345")
    parsed, shipped = yaml.safe_load(text), yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert parsed["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:12345"]}]
    assert parsed["global"] == {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    assert parsed["rule_files"] == shipped["rule_files"]
