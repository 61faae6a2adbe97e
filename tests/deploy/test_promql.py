"""tests/deploy/promql.py, which the drift tests lean on: it must see every name and no other."""

from __future__ import annotations

import pytest

from tests.deploy.promql import asked


@pytest.mark.parametrize(
    ("expression", "selectors", "grouped"),
    [
        ("zl_rows", [("zl_rows", set())], set()),
        ('zl_a{x="zl_b", y=~"c{}"} / zl_c', [("zl_a", {"x", "y"}), ("zl_c", set())], set()),
        ("sum by (le, profile) (rate(zl_a_bucket[1m]))", [("zl_a_bucket", set())], {"le", "profile"}),
        ("sum(rate(zl_a[5m])) by (code)", [("zl_a", set())], {"code"}),
        ("histogram_quantile(0.99, sum by (le) (zl:a:rate1m)) > 0.5", [("zl:a:rate1m", set())], {"le"}),
        ("zl_a and on (instance) (time() - zl_b > 1e3)", [("zl_a", set()), ("zl_b", set())], {"instance"}),
        ("a * on (x) group_left (y) b offset 5m", [("a", set()), ("b", set())], {"x", "y"}),
        ("absent(up{job='zl'} == 1)", [("up", {"job"})], set()),
        ("increase(zl_a[1m] offset 2m) unless zl_b", [("zl_a", set()), ("zl_b", set())], set()),
    ],
)
def test_it_sees_every_name_and_no_other(expression, selectors, grouped):
    found = asked(expression)
    assert [(name, set(labels)) for name, labels in found.selectors] == selectors
    assert found.grouped == grouped


@pytest.mark.parametrize("expression", ["zl_a{x=\"", "sum by (le (zl_a", "zl_a ; zl_b"])  # fmt: skip
def test_what_cannot_be_read_raises(expression):
    with pytest.raises(ValueError):
        asked(expression)
