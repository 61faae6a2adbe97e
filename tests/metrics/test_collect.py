"""zl/metrics/collect.py: figures read at scrape come out as the exposition format has them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from zl.errors import InvariantError
from zl.histogram import Histogram
from zl.metrics.catalog import CATALOG
from zl.metrics.collect import PartsCollector


def scrape(sources):
    registry = CollectorRegistry()
    registry.register(PartsCollector(sources))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {family.name: family for family in families}


def test_values_are_those_of_the_moment_of_the_scrape():
    figures = {"steps": 3}
    registry = CollectorRegistry()
    registry.register(PartsCollector({"zl_steps_total": lambda: figures["steps"]}))
    assert b"zl_steps_total 3.0" in generate_latest(registry)
    figures["steps"] = 4
    assert b"zl_steps_total 4.0" in generate_latest(registry)


def test_each_kind_with_its_labels_and_help():
    histogram = Histogram(CATALOG["zl_queue_seconds"].buckets)
    histogram.observe(0.0005)
    histogram.observe(1e6)
    found = scrape({
        "zl_requests_total": lambda: {"stop": 5, "length": 2},
        "zl_program_hits_total": lambda: {("16", "CHAT"): 7},
        "zl_queue_depth": lambda: 0,
        "zl_queue_seconds": lambda: {"CHAT": histogram.read()},
    })  # fmt: skip
    assert {s.labels["outcome"]: s.value for s in found["zl_requests"].samples} == {"stop": 5, "length": 2}
    assert found["zl_requests"].type == "counter"
    assert found["zl_requests"].documentation == CATALOG["zl_requests_total"].help
    (hit,) = found["zl_program_hits"].samples
    assert (hit.labels, hit.value) == ({"bucket": "16", "program": "CHAT"}, 7)
    assert (found["zl_queue_depth"].type, found["zl_queue_depth"].samples[0].value) == ("gauge", 0)
    samples = found["zl_queue_seconds"].samples
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert buckets["0.0001"] == 0
    assert buckets["0.001"] == buckets["60.0"] == 1
    assert buckets["+Inf"] == 2
    assert len(buckets) == len(CATALOG["zl_queue_seconds"].buckets) + 1
    assert {s.value for s in samples if s.name.endswith("_count")} == {2}
    assert [s.value for s in samples if s.name.endswith("_sum")] == [pytest.approx(1e6 + 0.0005)]


def test_a_name_that_is_not_in_the_catalog_is_refused():
    with pytest.raises(InvariantError, match="zl_secret"):
        PartsCollector({"zl_secret": lambda: 1})


def test_values_without_the_familys_labels_are_refused():
    with pytest.raises(InvariantError, match="zl_rows"):
        scrape({"zl_rows": lambda: 5})
