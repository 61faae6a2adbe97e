"""bench/metrics_cost.py, in its shortest form: two real servers, one of them scraped."""

from __future__ import annotations

import json

import pytest

from bench import metrics_cost


@pytest.mark.system
def test_short_run_compares_a_scraped_server_with_an_unwatched_one(gguf_path, capsys):
    argv = ["--streams", "2", "--tokens", "8", "--rounds", "2", "--every", "0.05", "--gguf", str(gguf_path)]
    assert metrics_cost.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:6]] == [
        ["round", "0", "off"], ["round", "0", "unscraped"], ["round", "0", "scraped"],
        ["round", "1", "scraped"], ["round", "1", "unscraped"], ["round", "1", "off"],
    ]  # fmt: skip
    result = json.loads(lines[-1])
    assert len(result["ratio"]["each"]) == len(result["scrape_ratio"]["each"]) == 2
    assert result["ratio"]["min"] > 0
    assert result["scrapes"] >= 2
    assert result["scrape_bytes"] > 10_000


def test_bookkeeping_is_timed_by_calling_it():
    found = metrics_cost.bookkeeping_ns(10)
    assert set(found) == {"observe", "engine_step", "loop_step"}
    assert min(found.values()) > 0
