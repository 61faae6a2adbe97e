"""`python -m bench.gpu_check`: the dry mode runs it all and says so everywhere; without a GPU the real one refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.budget import PLAN, START_S, TOTAL_S, Budget
from bench.gpu.report import Report
from bench.gpu_check import MODELS
from zl.gpu.cuda import device_count

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=timeout,
    )  # fmt: skip


@pytest.mark.timeout(280)
def test_the_dry_mode_proves_everything_and_every_line_says_dry(tmp_path):
    done = run("--dry", "--out", str(tmp_path), timeout=270)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("DRY ")] == []
    (data,), (table,) = tmp_path.glob("*.json"), tmp_path.glob("*.md")
    record = json.loads(data.read_text())
    assert record["dry"] is True
    assert "DRY" in record["warning"]
    assert "dry" in data.name
    assert all("DRY" in line for line in table.read_text().splitlines() if line.strip("| -"))
    proofs = {f["name"]: f["ok"] for f in record["findings"] if f["ok"] is not None}
    assert all(proofs.values())
    for name in (
        "register, registered twice", "decode attention", "prefill attention", "sampler", "captured equals uncaptured",
        "whole step equals the torch twin", "alone equals among 4 rows", "whole equals chunked prefill",
        "NaN in masked and stale slots", "results in mapped memory", "one launch a step", "heartbeat, undisturbed",
        "a flipped bit is found and mended", "4 streams over a socket",
    ):  # fmt: skip
        assert name in proofs
    assert not [f for f in record["findings"] if f["skipped"]]
    assert {section["section"] for section in record["sections"]} == {"kernels", "program", "socket", "peer"}
    timed = {f["name"] for f in record["findings"] if f["ok"] is None}
    assert {
        "copy bandwidth", "prefill of 60 tokens", "3 streams", "decode, 4 rows, context 40", "cold start",
        "4 streams over a socket", "peer decode, 4 rows, context 40",
    } <= timed  # fmt: skip


@pytest.mark.skipif(device_count() > 0, reason="this machine has a GPU")
def test_without_a_gpu_the_real_check_refuses_and_names_the_dry_mode():
    done = run(timeout=60)
    assert done.returncode == 2
    assert "--dry" in done.stderr
    assert not done.stdout


def test_a_failed_proof_counts_and_shows(tmp_path, capsys):
    report = Report(False, {"device": "x", "date": "today"})
    report.prove("m", "holds", True, "fine")
    report.prove("m", "breaks", False, "not fine", error=2.0)
    report.time("m", "speed", "1 ms", seconds=0.001)
    assert report.failed == 1
    _, table = report.write(tmp_path, "r")
    assert "**FAIL** | m | breaks" in table.read_text()
    assert "FAIL m" in capsys.readouterr().out


def test_a_whole_check_fits_eight_minutes_and_has_every_shape():
    assert START_S + sum(PLAN.values()) <= TOTAL_S == 480
    assert {model for model, part in PLAN if part == "program"} == set(MODELS) - {"service"}
    assert {model for model, _ in PLAN} == set(MODELS)
    assert {part for _, part in PLAN} == {"kernels", "program", "socket", "peer"}


def test_a_section_for_which_no_time_is_left_is_named_with_the_numbers(tmp_path, capsys):
    now = [0.0]
    budget, report, done = Budget(100, lambda: now[0]), Report(False, {"device": "x", "date": "today"}), []

    def work(seconds):
        def run():
            now[0] += seconds
            done.append(seconds)

        return run

    budget.section(report, "a", "first", 50, work(70))  # takes longer than it said
    budget.section(report, "b", "second", 50, work(1))
    budget.section(report, "c", "third", 30, work(2))
    assert done == [70, 2]
    assert report.skipped == 1
    assert report.failed == 0
    _, table = report.write(tmp_path, "r")
    assert "| skip | b | second | SKIPPED: 50 s needed, 30 of 100 s left |" in table.read_text()
    assert "skip b" in capsys.readouterr().out
    assert [section["took_s"] for section in budget.sections] == [70, None, 2]


def test_a_section_that_raises_is_a_failure_and_the_next_one_runs():
    budget, report, done = Budget(100), Report(False, {}), []
    budget.section(report, "a", "broken", 1, lambda: 1 / 0)
    budget.section(report, "a", "whole", 1, lambda: done.append(1))
    assert report.failed == 1
    assert "ZeroDivisionError" in report.findings[0].text
    assert done == [1]
