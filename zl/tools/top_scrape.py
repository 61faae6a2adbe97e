"""What a server's metrics page said at one moment, and what lies between two such moments. For `zl top`.

Owns no state: a Scrape is read once and never changes. Refuses torch, numpy, asyncio, and zl.metrics: it knows a page
as Prometheus does, by what is written on it.
"""

from __future__ import annotations

import http.client
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from zl.address import TcpAddress
from zl.errors import ZlError
from zl.tools.fetching import fetch

Labels = dict[str, str]
Buckets = list[tuple[float, float]]
"""(upper bound, observations up to it), ascending, the last bound infinite."""


class ScrapeError(ZlError):
    """No metrics came from an address; the text says which, why, and what to look at."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One page of metrics.

    at       monotonic second at which it came
    samples  sample name to its (labels, value) pairs
    """

    at: float
    samples: dict[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float | None:
        """Sum the samples of a name whose labels include these; None where there is none."""
        found = [value for own, value in self.samples.get(name, ()) if labels.items() <= own.items()]
        return math.fsum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sum the samples of a name by one label."""
        found: dict[str, float] = {}
        for own, value in self.samples.get(name, ()):
            key = own.get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def labels(self, name: str) -> Labels:
        """Give the labels of a name's first sample, for families that tell facts by labels; {} where there is none."""
        return next((own for own, _ in self.samples.get(name, ())), {})

    def buckets(self, name: str, **labels: str) -> Buckets:
        """Give a histogram's cumulative buckets, summed over all series whose labels include these."""
        found: dict[float, float] = {}
        for own, value in self.samples.get(name + "_bucket", ()):
            if labels.items() <= own.items():
                bound = float(own["le"])
                found[bound] = found.get(bound, 0.0) + value
        return sorted(found.items())


def read_page(text: str, at: float) -> Scrape:
    """Read an exposition with Prometheus' own parser. ValueError: it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    return Scrape(at, samples)


def scrape(address: TcpAddress, timeout_s: float = 2.0) -> Scrape:
    """Fetch and read a server's page within `timeout_s`, however slowly it comes; no proxy is asked.

    Raises  ScrapeError: address, reason, remedy
    """
    where = str(address).removeprefix("tcp:")
    try:
        answer = fetch(address.host, address.port, "/metrics", timeout_s, "text/plain; version=0.0.4")
    except TimeoutError:
        raise ScrapeError(f"no metrics from {where} within {timeout_s:g} s: the server is stuck or far away") from None
    except OSError as error:
        raise ScrapeError(
            f"no metrics at {where} ({error.strerror or error}): start zl serve there, or say with --metrics HOST:PORT "
            "where its metrics are"
        ) from error
    except http.client.HTTPException as error:
        raise ScrapeError(f"{where} does not speak HTTP: --metrics wants the metrics port (9433), not the port of the "
                          f"frames; it said {type(error).__name__}") from error  # fmt: skip
    if answer.status != 200:
        raise ScrapeError(f"{where} answers /metrics with {answer.status} {answer.reason}: is that a zl server?")
    try:
        page = read_page(answer.body.decode(), time.monotonic())
    except ValueError as error:
        raise ScrapeError(f"{where} answers /metrics with something that is no metrics page: {error}") from error
    if not any(name.startswith("zl_") for name in page.samples):
        raise ScrapeError(f"{where} has metrics, but none of zl: another program's port?")
    return page


def gained(new: Scrape, old: Scrape, name: str, **labels: str) -> float | None:
    """Say by how much a counter grew; one that fell began again at zero (a restart). None where it is absent."""
    now = new.value(name, **labels)
    if now is None:
        return None
    before = old.value(name, **labels) or 0.0
    return now - before if now >= before else now


def gained_buckets(new: Scrape, old: Scrape, name: str, **labels: str) -> Buckets:
    """Give the buckets of what was observed between two scrapes."""
    now, before = new.buckets(name, **labels), dict(old.buckets(name, **labels))
    if any(count < before.get(bound, 0.0) for bound, count in now):
        return now
    return [(bound, count - before.get(bound, 0.0)) for bound, count in now]


def quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """Estimate a quantile as Prometheus does: linear within the bucket; the last finite bound for what lies beyond.

    q  0 to 1
    None where nothing was observed.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = q * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        if not math.isinf(bound):
            low, below = bound, count
    return low
