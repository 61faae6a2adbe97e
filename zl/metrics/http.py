"""Metrics: read each part's own counters when a scraper asks; hot paths never come here.

State: the registry and its HTTP thread. Refuses torch and asyncio.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from zl.errors import ConfigError


class Gauge(NamedTuple):
    """One figure: its name, its help text and how to read it."""

    name: str
    help: str
    read: Callable[[], float]


class PartsCollector(Collector):
    """Turn the parts' counters into metric families at scrape time."""

    def __init__(self, gauges: list[Gauge]):
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """Yield each family with the value of this moment."""
        for gauge in self._gauges:
            yield GaugeMetricFamily(gauge.name, gauge.help, value=float(gauge.read()))


class MetricsServer:
    """Serve `/metrics` on its own port and thread."""

    def __init__(self, address: str, gauges: list[Gauge]):
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdigit():
            raise ConfigError(f"metrics: {address!r} is not HOST:PORT, such as 127.0.0.1:9433; or say off")
        registry = CollectorRegistry()
        registry.register(PartsCollector(gauges))
        try:
            self._server, self._thread = start_http_server(int(port), addr=host, registry=registry)
        except OSError as failure:
            what = "is in use" if failure.errno == errno.EADDRINUSE else f"cannot be opened ({failure.strerror})"
            raise ConfigError(
                f"metrics: {address} {what}; choose another with --metrics HOST:PORT or turn it off with --metrics off"
            ) from failure
        self.port = self._server.server_port

    def close(self) -> None:
        """Stop the HTTP thread and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
