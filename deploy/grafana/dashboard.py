"""Write zl.json, the Grafana dashboard, from panels.py: `python deploy/grafana/dashboard.py`.

With `--check` nothing is written, and the status says whether zl.json is as made. Owns no state; standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from panels import SECTIONS, Panel, Section

TARGET = Path(__file__).with_name("zl.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def dashboard() -> dict[str, Any]:
    """Make the dashboard in the JSON model of Grafana 10 (schema version 38)."""
    return {
        "uid": "zl-server",
        "title": "zl",
        "description": "What a zl server does: the share of glue, latencies, programs, pages, errors. "
        "docs/observability.md says what to look at first.",
        "tags": ["zl"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), _instance()]},
        "panels": list(_placed()),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source", "hide": 0}


def _instance() -> dict[str, Any]:
    query = "label_values(zl_ready, instance)"
    return {
        "name": "instance", "type": "query", "label": "Server", "datasource": SOURCE, "definition": query,
        "query": {"query": query, "refId": "instances"}, "refresh": 2, "sort": 1, "multi": True, "includeAll": True,
        "allValue": ".*", "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def _placed() -> Iterator[dict[str, Any]]:
    """Lay the panels out from left to right, a new line where one does not fit."""
    number, y = 1, 0
    for section in SECTIONS:
        yield _header(section, number, y)
        number, y, x, height = number + 1, y + 1, 0, 0
        for panel in section.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
            number, x, height = number + 1, x + panel.width, max(height, panel.height)
        y += height


def _header(section: Section, number: int, y: int) -> dict[str, Any]:
    return {"id": number, "type": "row", "title": section.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}}  # fmt: skip


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps = [{"value": value, "color": colour} for value, colour in panel.steps]
    thresholds = {"mode": "absolute", "steps": steps}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {}, "thresholds": thresholds}
    if panel.highest is not None:
        defaults["max"] = panel.highest
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 35 if panel.stacked else 5, "lineWidth": 1, "showPoints": "never",
                              "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"}}  # fmt: skip
        if panel.goal:
            defaults["custom"]["thresholdsStyle"] = {"mode": "line"}
        options["legend"] = {"displayMode": "list", "placement": "bottom"}
        options["tooltip"] = {"mode": "multi", "sort": "desc"}
    elif panel.kind in ("gauge", "stat"):
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}}
        if panel.kind == "stat":
            options |= {"colorMode": "value", "graphMode": "area"}
    elif panel.kind == "heatmap":
        options = {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Oranges"},
                   "cellGap": 0, "tooltip": {"show": True, "yHistogram": True}}  # fmt: skip
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.about, "datasource": SOURCE,
        "gridPos": place, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
        "targets": [_target(panel, i, *query) for i, query in enumerate(panel.queries)],
    }  # fmt: skip


def _target(panel: Panel, i: int, expression: str, legend: str) -> dict[str, Any]:
    kind = {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series")
    return {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend or "__auto",
            "format": kind, "instant": kind == "table", "range": kind != "table"}  # fmt: skip


def text() -> str:
    """Give the file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check."""
    if arguments == ["--check"]:
        same = TARGET.is_file() and TARGET.read_text("utf-8") == text()
        if not same:
            print(f"{TARGET.name} is not what panels.py makes: run python deploy/grafana/dashboard.py", file=sys.stderr)
        return 0 if same else 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    TARGET.write_text(text(), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
