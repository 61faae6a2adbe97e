"""A Prometheus of our own: started on a free port over one server's metrics, asked through its HTTP API, ended.

State: the child process and its folder. Standard library only; `prometheus` is Debian's package of that name.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import time
import urllib.parse
from pathlib import Path
from typing import Any

from bench.procs import free_port

DEPLOY = Path(__file__).parents[1] / "deploy" / "prometheus"
START_S = 30.0


class QueryError(RuntimeError):
    """Prometheus refused an expression; the text is its own."""



def config(target: str, interval_s: int = 1) -> str:
    """Give deploy/prometheus/prometheus.yml with one target and one interval in place of those it has."""
    text = (DEPLOY / "prometheus.yml").read_text("utf-8")
    text, targets = re.subn(r"127\.0\.0\.1:9433", target, text)
    text, intervals = re.subn(r"((?:scrape|evaluation)_interval|scrape_timeout): \w+", rf"\1: {interval_s}s", text)
    if (targets, intervals) != (1, 3):
        raise ValueError(f"prometheus.yml has {targets} targets and {intervals} periods where 1 and 3 are replaced")
    return text


class Prometheus:
    """Debian's Prometheus over one target, with the repository's rules. Use as a context manager.

    folder  an empty folder of its own: configuration, data, log
    target  HOST:PORT of the metrics to scrape, each second
    """

    def __init__(self, folder: Path, target: str):
        program = shutil.which("prometheus")
        if program is None:
            raise FileNotFoundError("prometheus is not installed: apt install prometheus (its service may stay off)")
        for rules in DEPLOY.glob("zl-*.yml"):
            shutil.copy(rules, folder)
        (folder / "prometheus.yml").write_text(config(target), "utf-8")
        self.port = free_port()
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as out:
            self._child = subprocess.Popen(
                [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={"GOMAXPROCS": "1"},
            )  # fmt: skip

    def __enter__(self) -> Prometheus:
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self._get("/-/ready")[0] == 200:
                    return
            except OSError:
                pass
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"prometheus did not start:\n{self._log.read_text(errors='replace')[-2_000:]}")
            time.sleep(0.05)

    def close(self) -> None:
        """End the process."""
        self._child.terminate()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def api(self, path: str, **arguments: object) -> Any:
        """Call /api/v1/PATH and give its `data`. QueryError: Prometheus says that it is wrong."""
        query = urllib.parse.urlencode({key: str(value) for key, value in arguments.items()})
        _, body = self._get(f"/api/v1/{path}?{query}")
        answer = json.loads(body)
        if answer["status"] != "success":
            raise QueryError(f"{arguments.get('query', path)}: {answer['error']}")
        return answer["data"]

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Evaluate at a Unix time, else now; one entry for each series: `metric` (labels) and `value` [time, text]."""
        found = self.api("query", query=expression, **({} if at is None else {"time": at}))
        result: list[dict[str, Any]] = found["result"]
        return result

    def query_range(self, expression: str, begin: float, end: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        """Evaluate over a range of Unix times; one entry for each series: `metric` and `values` [[time, text], …]."""
        found = self.api("query_range", query=expression, start=begin, end=end, step=step_s)
        result: list[dict[str, Any]] = found["result"]
        return result

    def targets(self) -> list[dict[str, Any]]:
        """List the active targets with their health and last error."""
        active: list[dict[str, Any]] = self.api("targets", state="active")["activeTargets"]
        return active

    def rules(self) -> list[dict[str, Any]]:
        """List all rules: name, query, type, health, lastError."""
        return [rule for group in self.api("rules")["groups"] for rule in group["rules"]]
