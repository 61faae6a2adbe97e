"""zl/metrics/catalog.py: names, kinds and labels keep to Prometheus' conventions, and every family teaches."""

from __future__ import annotations

import re

import pytest

from zl.errors import Code
from zl.measures import PARTS, PROFILES
from zl.metrics.catalog import CATALOG, CODES, COUNTER, FAMILIES, GAUGE, HISTOGRAM, OUTCOMES
from zl.sampling import profiles

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def test_no_name_twice():
    assert len(CATALOG) == len(FAMILIES) > 40


@each_family
def test_name_says_kind_and_unit(family):
    """https://prometheus.io/docs/practices/naming: base units as suffix, `_total` for what only grows."""
    assert re.fullmatch(r"(zl|glue_layer|process)_[a-z0-9_]+", family.name)
    assert family.name.endswith("_total") == (family.kind == COUNTER)
    stem = family.name.removesuffix("_total")
    if family.unit in ("seconds", "bytes", "hertz"):
        assert stem.endswith(family.unit)
    assert not re.search(r"_(milliseconds|ms|us|kb|mb|percent|count|sum|bucket)$", stem)


@each_family
def test_family_teaches(family):
    assert len(family.help.split()) >= 4
    assert family.help[0].isupper() or family.help.split()[0] in CATALOG or family.help[0].isdigit()
    assert family.help.endswith(".")
    assert "\n" not in family.help


@each_family
def test_buckets_are_a_histograms_alone_and_ascend(family):
    assert bool(family.buckets) == (family.kind == HISTOGRAM)
    assert list(family.buckets) == sorted(set(family.buckets))
    assert family.kind in (COUNTER, GAUGE, HISTOGRAM)


@each_family
def test_known_label_values_match_the_labels(family):
    assert len(family.values) in (0, len(family.labels))
    assert len(set(family.labels)) == len(family.labels)
    assert not {"le", "job", "instance"} & set(family.labels)


def test_label_values_are_those_of_the_parts():
    assert {code.name.lower() for code in Code} - {"ok"} == set(CODES)
    assert set(CODES) - set(OUTCOMES) == {"bad_frame", "unauthenticated"}
    assert tuple(profile.name for profile in profiles.PROFILES.values()) == PROFILES
    assert CATALOG["zl_request_time_seconds_total"].values == (PARTS,)
