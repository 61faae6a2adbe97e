"""Table and plots of a result: `python -m bench.report FILE.json…` makes them again from what is stored.

Owns no state and never changes a result. matplotlib is imported only to draw.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.stats import ratios

MIB = 2**20
MS = 1e3


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: where its figure is in a round, its unit, and whether more is better (not: less)."""

    name: str
    read: Callable[[dict[str, Any]], float | None]
    more_is_better: bool | None  # None: a fact of the run, not a merit
    shown: str = "{:.1f}"


def _in(figure: str, part: str, scale: float = MS) -> Callable[[dict[str, Any]], float | None]:
    def read(entry: dict[str, Any]) -> float | None:
        value = entry.get(figure, {}).get(part)
        return None if value is None else value * scale

    return read


def _plain(key: str, scale: float = 1.0) -> Callable[[dict[str, Any]], float | None]:
    def read(entry: dict[str, Any]) -> float | None:
        return entry[key] * scale if key in entry else None

    return read


ROWS = (
    Row("tokens/s", lambda e: e["tokens_per_s"], True),
    Row("first token, mean, ms", _in("first_s", "mean"), False),
    Row("first token, sd, ms", _in("first_s", "sd"), False),
    Row("first token, p50, ms", _in("first_s", "p50"), False),
    Row("first token, p99, ms", _in("first_s", "p99"), False),
    Row("gap, mean, ms", _in("gap_s", "mean"), False, "{:.2f}"),
    Row("gap, sd, ms", _in("gap_s", "sd"), False, "{:.2f}"),
    Row("gap, p50, ms", _in("gap_s", "p50"), False, "{:.2f}"),
    Row("gap, p99, ms", _in("gap_s", "p99"), False, "{:.2f}"),
    Row("time a token, mean, ms", _in("per_token_s", "mean"), False, "{:.2f}"),
    Row("peak resident, MiB", _plain("rss_peak_bytes", 1 / MIB), False, "{:.0f}"),
    Row("proportional, MiB", _plain("pss_bytes", 1 / MIB), False, "{:.0f}"),
    Row("CPU, ms a token", lambda e: e["cpu_s"] * MS / e["tokens"], False, "{:.2f}"),
    Row("glue, share of the CPU time", lambda e: _glue(e), None, "{:.1%}"),
    Row("steps replayed by the program", lambda e: _replayed(e), None, "{:.2%}"),
    Row("load generator, CPU s", _plain("client_cpu_s"), None, "{:.2f}"),
    Row("largest gap / median", _plain("worst_stretch"), False, "{:.2f}"),
    Row("long prompt, first token, ms", _plain("long_first_s", MS), False, "{:.0f}"),
    Row("arrivals a second", _plain("rate_per_s"), None, "{:.2f}"),
)


def _glue(entry: dict[str, Any]) -> float | None:
    """All of a server's CPU time but that of its compute threads; None where these carry no name of their own."""
    compute = entry.get("cpu_by_thread_s", {}).get("zl-compute")
    return 1 - compute / entry["cpu_s"] if compute and entry["cpu_s"] else None


def _replayed(entry: dict[str, Any]) -> float | None:
    """The share of a round's steps that the program computed and not its fallback; None where nobody counts."""
    steps = entry.get("steps")
    return 1 - entry["fallback_steps"] / steps if steps else None


def rounds_of(result: dict[str, Any], system: str) -> list[dict[str, Any]]:
    """Give a system's rounds in order."""
    return sorted((r for r in result["rounds"] if r["system"] == system), key=lambda r: r["round"])


def values(result: dict[str, Any], system: str, row: Row) -> list[float]:
    """Give a row's figure in each round; empty where a round has none."""
    found = [row.read(entry) for entry in rounds_of(result, system)]
    return [] if any(value is None for value in found) else [v for v in found if v is not None]


def advantage(result: dict[str, Any], peer: str, row: Row) -> dict[str, Any] | None:
    """Say how many times better the first system is than the peer, round by round; None where a figure is missing."""
    ours, theirs = values(result, result["order"][0], row), values(result, peer, row)
    if row.more_is_better is None or not ours or len(ours) != len(theirs):
        return None
    return ratios(ours, theirs) if row.more_is_better else ratios(theirs, ours)


def line(number: int, name: str, figures: dict[str, Any]) -> str:
    """Tell one round in one line."""
    first, gap = figures["first_s"], figures["gap_s"]
    failed = f", {figures['failed']} FAILED: {figures['errors']}" if figures["failed"] else ""
    return (
        f"round {number} {name}: {figures['tokens_per_s']:.1f} tokens/s, first token {first['mean'] * MS:.0f} ms, "
        f"gap {gap.get('p50', 0) * MS:.1f} ms, {figures['rss_peak_bytes'] / MIB:.0f} MiB{failed}"
    )


def table(result: dict[str, Any]) -> str:
    """Make the Markdown table: medians of the rounds, then how many times better the first system is."""
    order = result["order"]
    peers = order[1:]
    settings, machine = result["settings"], result["machine"]
    head = ["", *order, *(f"{order[0]} better than {peer} (min to max)" for peer in peers)]
    lines = [
        f"### {result['scenario']}: {settings['streams']} streams, {settings['tokens'] or 'own counts of'} tokens, "
        f"{settings['rounds']} rounds, {settings['model']}",
        "",
        f"{result['date']}, commit {result['commit'][:12] or 'none'}"
        f"{' with changes' if result['uncommitted_changes'] else ''}; "
        f"{machine['processor']}, {machine['cores']} cores, "
        f"bf16 GEMM {machine['measured']['gemm_bfloat16_flop_per_s'] / 1e12:.2f} TFLOP/s, "
        f"reads {machine['measured']['read_1GiB_bytes_per_s'] / 1e9:.1f} GB/s",
        "",
        _line(*head),
        "|---|" + "---:|" * (len(head) - 1),
    ]
    for row in ROWS:
        cells = [_median(values(result, system, row), row.shown) for system in order]
        if any(cells):
            lines.append(_line(row.name, *cells, *(_times(advantage(result, p, row)) for p in peers)))
    starts = [result["systems"][system]["startup_s"] for system in order]
    ours = statistics.median(starts[0])
    better = [f"{statistics.median(s) / ours:.2f}" for s in starts[1:]]
    lines.append(_line("start to first token, s", *(_median(s, "{:.1f}") for s in starts), *better))
    failed = {s: sum(r["failed"] for r in rounds_of(result, s)) for s in order}
    if any(failed.values()):
        lines += ["", "Failed requests: " + ", ".join(f"{s} {n}" for s, n in failed.items() if n)]
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _median(found: Sequence[float], shown: str) -> str:
    return shown.format(statistics.median(found)) if found else ""


def _times(ratio: dict[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw tokens/s of each round, and the curves of time to first token and of gaps, into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    order = result["order"]
    figure = Figure(figsize=(13, 4), layout="constrained")
    bars, firsts, gaps = figure.subplots(1, 3)
    for i, system in enumerate(order):
        rounds = rounds_of(result, system)
        speeds = [r["tokens_per_s"] for r in rounds]
        color = f"C{i}"
        bars.bar(i, statistics.median(speeds), color=color, alpha=0.6)
        bars.plot([i] * len(speeds), speeds, "k.", markersize=5)
        for axis, key in ((firsts, "first_curve_s"), (gaps, "gap_curve_s")):
            for n, entry in enumerate(rounds):
                curve = [value * MS for value in entry[key]]
                axis.plot(curve, range(len(curve)), color=color, lw=1, label=system if not n else None)
    bars.set_xticks(range(len(order)), order)
    bars.set_ylabel("tokens/s (bar: median, dots: rounds)")
    for axis, title in ((firsts, "time to first token, ms"), (gaps, "gap between token frames, ms")):
        axis.set_xlabel(title)
        axis.set_ylabel("percent at or below")
        axis.set_xscale("symlog", linthresh=1.0)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left")
    figure.suptitle(f"{result['scenario']}: {result['settings']['streams']} streams, {result['date'][:10]}")
    figure.savefig(path, dpi=110)


def write(path: Path) -> list[Path]:
    """Make the table and the plot beside a stored result; without matplotlib the table alone."""
    result = json.loads(path.read_text())
    text = path.with_suffix(".md")
    text.write_text(table(result))
    picture = path.with_suffix(".png")
    try:
        plot(result, picture)
    except ModuleNotFoundError as missing:
        print(f"no plot: {missing.name} is not installed (pip install matplotlib)")
        return [path, text]
    return [path, text, picture]


def main() -> None:
    """Make tables and plots again."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    for path in parser.parse_args().results:
        write(path)
        print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
