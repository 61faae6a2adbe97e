"""zl/histogram.py: counts by bucket, equal to what numpy counts; copies and sums of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zl.histogram import Histogram, merge

BOUNDS = (0.001, 0.01, 0.1, 1.0)


def counted(values):
    """The oracle: numpy's own histogram, with the upper bound inside its bucket."""
    edges = np.searchsorted(np.array(BOUNDS), np.array(values, np.float64), side="left")
    return tuple(np.bincount(edges, minlength=len(BOUNDS) + 1).tolist())


@given(st.lists(st.floats(0, 10) | st.sampled_from(BOUNDS), min_size=1))
def test_counts_are_numpys(values):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    reading = histogram.read()
    assert reading.counts == counted(values)
    assert histogram.count == len(values)
    assert reading.total == pytest.approx(sum(values))


def test_a_value_at_a_bound_falls_below_it():
    histogram = Histogram(BOUNDS)
    histogram.observe(0.01)
    assert histogram.read().counts == (0, 1, 0, 0, 0)


def test_many_at_once_are_many_one_by_one():
    one, many = Histogram(BOUNDS), Histogram(BOUNDS)
    for _ in range(7):
        one.observe(0.05)
    many.observe_many(0.05, 7)
    assert one.read().counts == many.read().counts
    assert one.total == pytest.approx(many.total)


def test_a_reading_does_not_change_with_what_comes_after():
    histogram = Histogram(BOUNDS)
    before = histogram.read()
    histogram.observe(5.0)
    assert before.counts == (0,) * 5
    assert histogram.read().counts == (0, 0, 0, 0, 1)


def test_merging_adds_up_and_refuses_other_buckets():
    a, b = Histogram(BOUNDS), Histogram(BOUNDS)
    a.observe(0.05)
    b.observe(0.05)
    b.observe(2.0)
    both = merge([a.read(), b.read()])
    assert both.counts == (0, 0, 2, 0, 1)
    assert both.total == pytest.approx(2.1)
    with pytest.raises(ValueError, match="different buckets"):
        merge([a.read(), Histogram((1.0, 2.0)).read()])


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_must_ascend(bounds):
    with pytest.raises(ValueError, match="ascend"):
        Histogram(bounds)
