"""The port for scrapers and probes: /metrics, /livez and /readyz.

State: the listening socket and its threads. Nothing here waits for the event loop or the engine, so that a probe is
answered while these are stuck. Refuses torch and asyncio.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from zl.address import TcpAddress, parse_host_port
from zl.errors import ConfigError, ZlError
from zl.health import Health
from zl.metrics.collect import PartsCollector, Read
from zl.ports import resolve, try_binding
from zl.readers import METRICS_PORT
from zl.threads import name_this_thread

log = logging.getLogger("zl")

CONNECTION_TIMEOUT_S = 10.0
"""How long a peer may be silent before its thread is taken back."""


class MetricsServer:
    """Serve the figures and the probes on their own port and threads.

    address  HOST:PORT
    sources  what reads each family: metrics.collect
    Raises   ConfigError: the address is wrong; ZlError: it cannot be had
    """

    def __init__(self, address: str, sources: Mapping[str, Read], health: Health):
        host, port = _parse(address)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(PartsCollector(sources))
        ProcessCollector(registry=registry)
        try:
            self._server = _Server(host, port, registry, health)
        except OSError as failure:
            raise _unavailable(address, failure) from failure
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.run, name="zl-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the threads and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_address(address: str) -> None:
    """Bind the port for a moment: whoever loads a model first would learn late that it cannot be had.

    Raises  as MetricsServer
    """
    try:
        try_binding(*_parse(address))
    except OSError as failure:
        raise _unavailable(address, failure) from failure


def _parse(address: str) -> TcpAddress:
    try:
        return parse_host_port(address, port_zero=True, example=METRICS_PORT)
    except ConfigError as error:
        raise ConfigError(f"metrics: {error}; or say off") from error


def _unavailable(address: str, failure: OSError) -> ZlError:
    """Say why; as in net.listen, a port in use or a network that is not up yet may be there at the next start."""
    passing = failure.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
    in_use = failure.errno == errno.EADDRINUSE
    what = "is in use (zl doctor says by whom)" if in_use else f"cannot be opened ({failure.strerror})"
    return (ZlError if passing else ConfigError)(
        f"metrics: {address} {what}; choose another with --metrics HOST:PORT or turn it off with --metrics off"
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a peer that keeps its connection open must not hold up the end
    request_queue_size = 16

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health):
        self.registry = registry
        self.health = health
        self.address_family = resolve(host, port)[0]
        super().__init__((host, port), _Handler)

    def run(self) -> None:
        """Accept until `shutdown`."""
        name_this_thread("zl-metrics")
        self.serve_forever(0.05)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Take what broke a connection: that a scraper leaves before its answer is its own matter."""
        if not isinstance(sys.exception(), OSError):
            log.exception("metrics: a connection of %s could not be served", client_address)

    def server_bind(self) -> None:
        """Bind without the look-up of the host's full name that http.server does: it may wait for a resolver."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_TIMEOUT_S
    server: _Server

    def setup(self) -> None:
        name_this_thread("zl-scrape")
        super().setup()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        health = self.server.health
        match path:
            case "/metrics":
                self._metrics()
            case "/livez":
                live = health.live
                self._say(200 if live else 503, "alive" if live else health.reason)
            case "/readyz":
                self._say(200 if health.ready else 503, health.reason)
            case _:
                self._say(404, f"{path} is not here; there are /metrics, /livez and /readyz")

    def _metrics(self) -> None:
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.registry)
        except Exception as failure:  # whatever it was: the scraper must hear of it, and serving goes on
            log.exception("metrics: a figure could not be read")
            self._say(500, f"a figure could not be read: {type(failure).__name__}; see the log")
            return
        self._send(200, content_type, body)

    def _say(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode() + b"\n")

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a probe a second would fill the log."""
