"""A metrics page of every family in the catalog, served over HTTP, whose values a test sets."""

from __future__ import annotations

import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from zl.metrics.catalog import CATALOG, HISTOGRAM, Family

FREE_LABELS = {
    "bucket": ("256",), "program": ("CHAT", "SUMMARIZE", "CREATIVE", "generic", "mixed", "none"), "version": ("9.9.9",),
    "model": ("A model",), "build_id": ("b" * 8,), "device": ("cpu, 2 cores",), "gpu": ("0",),
}  # fmt: skip
"""Values for labels that the catalog leaves open."""


class FakeMetrics:
    """`page()` has all families of the catalog at 0; `set` and `observe` change what it shows."""

    def __init__(self):
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.status, self.body = 200, None
        self.left_out: set[str] = set()
        for family in CATALOG.values():
            for labels in series_of(family):
                if family.kind == HISTOGRAM:
                    for bound in (*family.buckets, float("inf")):
                        self.values[f"{family.name}_bucket", (*labels, ("le", f"{bound:g}"))] = 0
                    self.values[f"{family.name}_sum", labels] = self.values[f"{family.name}_count", labels] = 0
                else:
                    self.values[family.name, labels] = 0
        self.set("zl_build_info", 1, version="9.9.9", model="A model", build_id="b" * 8, device="cpu, 2 cores",
                 program="CHAT")  # fmt: skip
        self.set("zl_live", 1)
        self.set("zl_ready", 1)

    def _key(self, name: str, labels: dict[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
        (found,) = [key for key in self.values if key[0] == name and labels.items() <= dict(key[1]).items()]
        return found

    def set(self, name: str, value: float, **labels: str) -> None:
        self.values[self._key(name, labels)] = value

    def add(self, name: str, value: float, **labels: str) -> None:
        self.values[self._key(name, labels)] += value

    def observe(self, name: str, value: float, n: int = 1, **labels: str) -> None:
        """Observe a value n times in a histogram."""
        for key in self.values:
            own = dict(key[1])
            if key[0] == f"{name}_bucket" and labels.items() <= own.items() and value <= float(own["le"]):
                self.values[key] += n
        self.add(f"{name}_count", n, **labels)
        self.add(f"{name}_sum", n * value, **labels)

    def page(self) -> str:
        lines = []
        for family in CATALOG.values():
            if family.name in self.left_out:
                continue
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            names = {family.name + end for end in ("", "_bucket", "_sum", "_count")}
            for (name, labels), value in self.values.items():
                if name in names:
                    told = ",".join(f'{key}="{text}"' for key, text in labels)
                    lines.append(f"{name}{{{told}}} {value}" if told else f"{name} {value}")
        return "\n".join(lines) + "\n"

    def __enter__(self) -> FakeMetrics:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = (fake.page() if fake.body is None else fake.body).encode()
                self.send_response(fake.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def series_of(family: Family) -> list[tuple[tuple[str, str], ...]]:
    """List the label sets of a family's series."""
    known = family.values or ((),) * len(family.labels)
    choices = [values or FREE_LABELS[label] for label, values in zip(family.labels, known, strict=True)]
    if family.name == "zl_build_info":
        choices = [values[:1] for values in choices]
    return [tuple(zip(family.labels, chosen, strict=True)) for chosen in itertools.product(*choices)]
