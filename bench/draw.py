"""Draw a terminal's cells and a dashboard's panels with matplotlib. Owns no state; matplotlib is imported to draw."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.terminal import Terminal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Answer = list[dict[str, Any]]
"""One query's series: `metric` (labels) and `values` [[time, text], …]."""

COLOURS = {"": "#d8dee9", "1": "#ffffff", "2": "#7b8494", "31": "#ef5b5b", "32": "#7bc275", "33": "#e5b454",
           "36": "#56b6c2"}  # fmt: skip
BACKGROUND, SHADE = "#14171c", "#343942"
BLOCKS = "▁▂▃▄▅▆▇█"
PAPER, INK, FAINT = "#181b1f", "#ccccdc", "#8e8e9a"
SERIES = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9", "#5794f2", "#96d98d", "#ffb357", "#c4162a",
          "#fade2a", "#a352cc")  # fmt: skip
NAMED = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}


def draw_terminal(screen: Terminal, path: Path) -> None:
    """Draw each cell where it is; blocks are drawn as areas, so that they meet as they do on a terminal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    used = max(i + 1 for i, line in enumerate(screen.text()) if line)
    wide, high = 0.08, 0.18  # inches of a cell
    figure = Figure(figsize=((screen.columns + 4) * wide, (used + 2) * high), dpi=150, facecolor=BACKGROUND)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-2, screen.columns + 2)
    axes.set_ylim(used + 1, -1)
    for y, line in enumerate(screen.cells[:used]):
        for x, (text, style) in enumerate(line):
            colour = COLOURS[style]
            if text == " ":
                continue
            if text in BLOCKS:
                height = (BLOCKS.index(text) + 1) / len(BLOCKS) * 0.9
                axes.add_patch(Rectangle((x, y + 0.95 - height), 1.02, height, color=colour, lw=0))
            elif text == "░":
                axes.add_patch(Rectangle((x, y + 0.05), 1.02, 0.9, color=SHADE, lw=0))
            elif text == "■":
                axes.add_patch(Rectangle((x + 0.1, y + 0.2), 0.8, 0.62, color=colour, lw=0))
            else:
                weight = "bold" if style == "1" else "normal"
                axes.text(x + 0.5, y + 0.52, text, color=colour, family="DejaVu Sans Mono", fontsize=9.2, weight=weight,
                          ha="center", va="center_baseline")  # fmt: skip
    figure.savefig(path, facecolor=BACKGROUND)


def draw_dashboard(panels: list[tuple[dict[str, Any], list[Answer]]], path: Path) -> None:
    """Draw panels from left to right in the dashboard's grid, each of its own kind, in Grafana's units.

    panels  (panel of the dashboard, the answers to its queries)
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    placed, x, y, tall = [], 0, 0, 0
    for panel, answers in panels:
        at = panel["gridPos"]
        if x + at["w"] > 24:
            x, y, tall = 0, y + tall, 0
        placed.append((panel, answers, x, y))
        x, tall = x + at["w"], max(tall, at["h"])
    rows = y + tall
    wide, high = 0.62, 0.37
    figure = Figure(figsize=(24 * wide, rows * high), dpi=110, facecolor="#0f1114")
    for panel, answers, x, y in placed:
        at = panel["gridPos"]
        box = (x / 24 + 0.002, 1 - (y + at["h"]) / rows + 0.002, at["w"] / 24 - 0.004, at["h"] / rows - 0.004)
        figure.patches.append(_card(figure, box))
        figure.text(box[0] + 0.006, box[1] + box[3] - 0.25 / rows, panel["title"], color=INK, fontsize=9.5,
                    weight="bold", va="top")  # fmt: skip
        left, low, top = _margins(panel, answers)
        left, low, top = left, low / rows, top / rows
        axes = figure.add_axes((box[0] + left, box[1] + low, box[2] - left - 0.01, box[3] - low - top))
        _KINDS[panel["type"]](axes, panel, answers)
    figure.savefig(path, facecolor="#0f1114")


def _margins(panel: dict[str, Any], answers: list[Answer]) -> tuple[float, float, float]:
    """Give the room beside the axes: left as a share of the picture, below and above in rows of the grid."""
    if panel["type"] == "heatmap":
        return 0.036, 0.8, 1.2
    if panel["type"] == "timeseries":
        return 0.036, 0.8 + 0.42 * math.ceil(len(_series(panel, answers)) / _legend_columns(panel)), 1.2
    return 0.01, 0, 0.2


def _legend_columns(panel: dict[str, Any]) -> int:
    return max(1, panel["gridPos"]["w"] // 2)


def _card(figure: Any, box: tuple[float, float, float, float]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(box[:2], box[2], box[3], transform=figure.transFigure, facecolor=PAPER, edgecolor="#2a2d33",
                     zorder=-1)  # fmt: skip


def unit(value: float, name: str) -> str:
    """Write a number in one of Grafana's units."""
    if not math.isfinite(value):
        return "no data"
    if name == "percentunit":
        return f"{value * 100:.3g}%"
    if name == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if name in ("bytes", "Bps"):
        for scale, word in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if value >= scale:
                return f"{value / scale:.3g} {word}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _points(series: dict[str, Any]) -> tuple[list[float], list[float]]:
    pairs = [(float(at), float(value)) for at, value in series["values"]]
    return [at for at, _ in pairs], [value for _, value in pairs]


def _newest(answers: list[Answer]) -> float:
    """The last number that is one, as Grafana's lastNotNull."""
    values = [v for answer in answers for series in answer for v in _points(series)[1] if math.isfinite(v)]
    return values[-1] if values else math.nan


def _colour(panel: dict[str, Any], value: float) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    passed = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return NAMED[passed[-1]]


def _stat(axes: Axes, panel: dict[str, Any], answers: list[Answer]) -> None:
    axes.set_axis_off()
    defaults, value = panel["fieldConfig"]["defaults"], _newest(answers)
    axes.text(0.5, 0.52, unit(value, defaults["unit"]), transform=axes.transAxes, ha="center", va="center", fontsize=19,
              color=_colour(panel, value), weight="bold", zorder=3)  # fmt: skip
    for answer in answers:
        for series in answer:
            times, values = _points(series)
            axes.fill_between(times, values, color=_colour(panel, value), alpha=0.15, lw=0)
    _, top = axes.get_ylim()
    axes.set_ylim(0, max(top, 1e-9) * 2.2)
    axes.margins(x=0)


def _gauge(axes: Axes, panel: dict[str, Any], answers: list[Answer]) -> None:
    from matplotlib.patches import Wedge

    axes.set_axis_off()
    defaults, value = panel["fieldConfig"]["defaults"], _newest(answers)
    most, steps = defaults["max"], defaults["thresholds"]["steps"]

    def angle(share: float) -> float:
        return 200 - 220 * min(1.0, max(0.0, share / most))

    axes.add_patch(Wedge((0, 0), 1.0, angle(most), angle(0), width=0.24, color="#2c3036"))
    if math.isfinite(value):
        axes.add_patch(Wedge((0, 0), 1.0, angle(value), angle(0), width=0.24, color=_colour(panel, value)))
    for i, step in enumerate(steps):
        begin = step["value"] or 0.0
        end = steps[i + 1]["value"] if i + 1 < len(steps) else most
        axes.add_patch(Wedge((0, 0), 1.08, angle(end), angle(begin), width=0.05, color=NAMED[step["color"]]))
    axes.text(0, 0, unit(value, defaults["unit"]), ha="center", va="center", fontsize=19, weight="bold",
              color=_colour(panel, value))  # fmt: skip
    axes.set_xlim(-1.2, 1.2)
    axes.set_ylim(-0.6, 1.25)
    axes.set_aspect("equal")


def _legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    text: str = target["legendFormat"]
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def _dress(axes: Axes, begin: float, end: float) -> None:
    axes.set_facecolor(PAPER)
    axes.tick_params(colors=FAINT, labelsize=7, length=2)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(color="#2a2d33", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlim(begin, end)
    axes.xaxis.set_major_locator(_whole(begin))
    axes.xaxis.set_major_formatter(lambda at, _: f"{at - begin:.0f} s")


def _whole(begin: float) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator([begin + 10 * i for i in range(100)])


def _series(panel: dict[str, Any], answers: list[Answer]) -> list[tuple[str, list[float], list[float]]]:
    """Give (legend, times, values) of what is worth a line: all that have a number other than 0, at least one."""
    found = []
    for target, answer in zip(panel["targets"], answers, strict=True):
        for series in answer:
            times, values = _points(series)
            if any(map(math.isfinite, values)):
                found.append((_legend(target, series["metric"]), times, values))
    shown = [one for one in found if _most(one[2]) > 0] or found[:1]
    if panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal":
        shown.sort(key=lambda one: -_most(one[2]))
    return shown


def _most(values: list[float]) -> float:
    return max(value for value in values if math.isfinite(value))


def _timeseries(axes: Axes, panel: dict[str, Any], answers: list[Answer]) -> None:
    defaults, shown = panel["fieldConfig"]["defaults"], _series(panel, answers)
    if not shown:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, color=FAINT, ha="center")
        return
    _dress(axes, min(times[0] for _, times, _ in shown), max(times[-1] for _, times, _ in shown))
    if defaults["custom"]["stacking"]["mode"] == "normal":
        _stack(axes, shown)
    else:
        for (name, times, values), colour in zip(shown, SERIES * 3, strict=False):
            axes.plot(times, values, color=colour, lw=1.3, label=name)
    axes.set_ylim(bottom=0)
    if "max" in defaults:
        axes.set_ylim(0, defaults["max"] * 1.03)
    if defaults["custom"].get("thresholdsStyle"):
        for step in defaults["thresholds"]["steps"]:
            if step["value"] is not None:
                axes.axhline(step["value"], color=NAMED[step["color"]], lw=1, ls="--")
    axes.yaxis.set_major_formatter(lambda value, _: unit(value, defaults["unit"]))
    height = axes.get_window_extent().height
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -22 / height), ncols=_legend_columns(panel), fontsize=6.5,
                frameon=False, labelcolor=INK, handlelength=1.2, columnspacing=1.0, borderaxespad=0)  # fmt: skip


def _stack(axes: Axes, shown: list[tuple[str, list[float], list[float]]]) -> None:
    grid = sorted({at for _, times, _ in shown for at in times})
    base = [0.0] * len(grid)
    for (name, times, values), colour in zip(shown, SERIES * 3, strict=False):
        known = {at: value for at, value in zip(times, values, strict=True) if math.isfinite(value)}
        top = [low + known.get(at, 0.0) for low, at in zip(base, grid, strict=True)]
        axes.fill_between(grid, base, top, color=colour, alpha=0.55, lw=0.8, label=name)
        base = top


def _heatmap(axes: Axes, _panel: dict[str, Any], answers: list[Answer]) -> None:
    """Draw observations by time and bucket; the buckets are even in height, as wide ones would hide narrow ones."""
    import numpy as np

    by_bound = sorted((float(one["metric"]["le"]), dict(zip(*_points(one), strict=True))) for one in answers[0])
    times = sorted({at for _, known in by_bound for at in known})
    counted = np.array([[known.get(at, 0.0) for at in times] for _, known in by_bound])
    each = np.diff(counted, axis=0, prepend=0.0).clip(min=0)
    used = np.flatnonzero(each.sum(axis=1))
    low, high = max(0, used.min() - 1), min(len(by_bound), used.max() + 2)
    _dress(axes, times[0], times[-1])
    axes.grid(False)
    axes.pcolormesh(np.append(times, times[-1] + 1.0), np.arange(low, high + 1), np.ma.masked_equal(each[low:high], 0),
                    cmap="YlOrRd_r", shading="flat")  # fmt: skip
    bounds = [bound for bound, _ in by_bound]
    ticks = list(range(low + 1, high + 1, max(1, (high - low) // 7)))
    axes.set_yticks(ticks, [unit(bounds[i - 1], "s") if math.isfinite(bounds[i - 1]) else "inf" for i in ticks])


_KINDS = {"stat": _stat, "gauge": _gauge, "timeseries": _timeseries, "heatmap": _heatmap}
