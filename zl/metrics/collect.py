"""The collector: read the parts' counters when a scraper asks, and name them as the catalog has them.

State: where each family is read; no figure is kept. Refuses torch and asyncio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from zl.errors import InvariantError
from zl.histogram import Reading
from zl.metrics.catalog import CATALOG, COUNTER, HISTOGRAM, Family

YIELD_S = 5e-5
"""Pause after each family: a scrape is some milliseconds of Python, and an engine thread that comes back from its step
meanwhile would wait for the interpreter's switch interval (5 ms); asleep, this thread holds no lock."""

Value = float | Reading
Read = Callable[[], Value | Mapping[Any, Value]]
"""Gives a family's figures of this moment, on the scraper's thread: one value, or values by label value, or by a
tuple of them where the family has several labels."""


class PartsCollector(Collector):
    """Turn the parts' counters into metric families at scrape time.

    sources  what reads each family, by its name in the catalog
    Raises   InvariantError: a name is not in the catalog
    """

    def __init__(self, sources: Mapping[str, Read]):
        strange = [name for name in sources if name not in CATALOG]
        if strange:
            raise InvariantError(f"metrics: {', '.join(strange)} is read and not in the catalog")
        self._sources = [(CATALOG[name], read) for name, read in sources.items()]
        self._bounds: dict[tuple[float, ...], list[str]] = {}

    def describe(self) -> Iterator[Metric]:
        """Name the families without reading them."""
        for family, _ in self._sources:
            yield _empty(family)

    def collect(self) -> Iterator[Metric]:
        """Yield each family with the values of this moment."""
        for family, read in self._sources:
            metric = _empty(family)
            value = read()
            values = value.items() if isinstance(value, Mapping) else [((), value)]
            for key, one in values:
                labels = [key] if isinstance(key, str) else list(key)
                if len(labels) != len(family.labels):
                    raise InvariantError(f"metrics: {family.name} has labels {family.labels}, not values {labels}")
                if isinstance(one, Reading):
                    assert isinstance(metric, HistogramMetricFamily)
                    metric.add_metric(labels, self._buckets(one), one.total)
                else:
                    assert isinstance(metric, (CounterMetricFamily, GaugeMetricFamily))
                    metric.add_metric(labels, float(one))
            yield metric
            time.sleep(YIELD_S)

    def _buckets(self, reading: Reading) -> list[tuple[str, float]]:
        names = self._bounds.get(reading.bounds)
        if names is None:
            names = self._bounds[reading.bounds] = [*map(floatToGoString, reading.bounds), "+Inf"]
        return list(zip(names, accumulate(reading.counts), strict=True))


def _empty(family: Family) -> Metric:
    if family.kind == HISTOGRAM:
        return HistogramMetricFamily(family.name, family.help, labels=family.labels)
    kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
    return kind(family.name, family.help, labels=family.labels)
