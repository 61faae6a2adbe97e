"""The panels of the dashboard, in the order in which they are read, and the PromQL of each. Owns no state.

tests/deploy holds every query to the catalog of metrics, and runs each against a real Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

HIT_GOAL = 0.85
"""Share of drawing steps that should run a profile's own program."""
_CHOSEN = 'instance=~"$instance"'
_PERIOD = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One panel; `width` and `height` in Grafana's grid, which is 24 columns wide.

    queries  (expression, legend) pairs
    steps    (from, colour) of the thresholds, ascending, the first from None
    goal     draw the thresholds as lines
    """

    title: str
    kind: str
    about: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    width: int = 8
    height: int = 8
    steps: Sequence[tuple[float | None, str]] = ((None, "green"),)
    highest: float | None = None
    stacked: bool = False
    goal: bool = False


@dataclass(frozen=True)
class Section:
    """A titled row of panels."""

    title: str
    panels: Sequence[Panel] = field(default_factory=tuple)


def now(name: str, *matchers: str) -> str:
    """Select a metric of the chosen instances."""
    return name + "{" + ", ".join((*matchers, _CHOSEN)) + "}"


def rate(name: str, *matchers: str) -> str:
    """Say how fast a counter grows, a second."""
    return f"rate({now(name, *matchers)}{_PERIOD})"


def total(expression: str, *by: str) -> str:
    """Sum, by labels where some are given."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def quantile(q: float, name: str, *by: str) -> str:
    """Estimate a quantile of a histogram."""
    return f"histogram_quantile({q}, {total(rate(name + '_bucket'), 'le', *by)})"


def by_profile(title: str, name: str, about: str) -> Panel:
    """Make the panel of a latency: median and 99th percentile of each profile."""
    queries = [(quantile(q, name, "profile"), "{{profile}} " + word) for q, word in ((0.5, "p50"), (0.99, "p99"))]
    return Panel(title, "timeseries", about, queries, "s", width=6)


def heat(title: str, name: str, about: str) -> Panel:
    """Make the heat map of a histogram."""
    counted = total(f"increase({now(name + '_bucket')}{_PERIOD})", "le")
    return Panel(title, "heatmap", about, [(counted, "{{le}}")], "s", width=12)


_SPENT, _STEPS = "zl_request_time_seconds_total", "zl_program_hits_total"
_GLUE_PARTS = 'part!~"queue|graph_replay|heartbeat"'
_HITS, _DRAWING = 'program!~"generic|mixed|none"', 'program!="none"'

GLUE = f"{total(rate(_SPENT, _GLUE_PARTS))} / {total(rate(_SPENT))}"
HITS = f"{total(rate(_STEPS, _HITS))} / {total(rate(_STEPS, _DRAWING))}"
GENERATED = total(rate("zl_tokens_total", 'kind="generated"'))
BUSY = total(now("zl_rows", 'state!="free"'))
FIRST, GAP = "zl_time_to_first_token_seconds", "zl_inter_token_seconds"

AT_A_GLANCE = Section("At a glance", (
    Panel("Glue share", "gauge", "Share of answers' time that is neither waiting nor the model: the layer that zl "
          "exists to remove. What it consists of: the section Glue.", [(GLUE, "")], "percentunit", 5, 6,
          ((None, "green"), (0.05, "orange"), (0.15, "red")), highest=0.3),
    Panel("Tokens/s", "stat", "Tokens sent to peers.", [(GENERATED, "")], "short", 3, 6),
    Panel("First token, p99", "stat", "What one in a hundred waits longer than before anything shows.",
          [(quantile(0.99, FIRST), "")], "s", 4, 6, ((None, "green"), (2.0, "orange"), (5.0, "red"))),
    Panel("Gap, p99", "stat", "Time between two tokens that one in a hundred exceeds.", [(quantile(0.99, GAP), "")],
          "s", 3, 6, ((None, "green"), (0.25, "orange"), (1.0, "red"))),
    Panel("Busy rows", "stat", "Rows of the batch that hold a request.", [(BUSY, "")], "short", 3, 6),
    Panel("Waiting", "stat", "Requests that wait for a row or pages.", [(total(now("zl_queue_depth")), "")], "short",
          3, 6, ((None, "green"), (1, "orange"), (256, "red"))),
    Panel("Ready", "stat", "Servers that take requests.", [(total(now("zl_ready")), "")], "short", 3, 6,
          ((None, "red"), (1, "green"))),
))

LATENCY = Section("Latency", (
    heat("Time to first token", FIRST, "All profiles. Two bands: prompts found on constant pages, and those that were "
         "computed; a band that climbs is a queue."),
    heat("Gap between tokens", GAP, "All profiles. One narrow band is what determinism looks like; a second one above "
         "it are steps that carried prompts."),
    by_profile("Time to first token by profile", FIRST, "From the whole frame to the frame of the first token."),
    by_profile("Gap by profile", GAP, "Between two tokens of one answer."),
    by_profile("Whole answers by profile", "zl_e2e_seconds", "From the whole frame to the last one."),
    by_profile("Queue by profile", "zl_queue_seconds", "Until a row and pages were given."),
))

LAYER = Section("Glue", (
    Panel("Where answers' time goes", "timeseries", "Seconds of answers' time a second, by part: queue is waiting, "
          "graph_replay the model, heartbeat its guard, all else glue.",
          [(total(rate(_SPENT), "part"), "{{part}}")], "short", stacked=True),
    Panel("Glue by part", "timeseries", "Each part's share of answers' time, without queue, model and heartbeat.",
          [(f"{total(rate(_SPENT, _GLUE_PARTS), 'part')} / scalar({total(rate(_SPENT))})", "{{part}}")],
          "percentunit", stacked=True),
    Panel("Mean time of a part", "timeseries", "Of one frame (frame_read, protobuf_parse, tokenize) or one step (the "
          "rest), whatever the number of rows.",
          [(f"{total(rate('glue_layer_latency_seconds_sum'), 'component')} / "
            f"{total(rate('glue_layer_latency_seconds_count'), 'component')}", "{{component}}")], "s"),
))

PROGRAMS = Section("Programs", (
    Panel("Program hits", "timeseries", "Share of drawing steps that ran the program of one profile; the line is the "
          "goal. Below it, many requests bring settings of their own, or profiles share steps.",
          [(HITS, "hits")], "percentunit", steps=((None, "red"), (HIT_GOAL, "green")), highest=1.0, goal=True),
    Panel("Steps by program", "timeseries", "Steps a second by what sampled them.",
          [(total(rate(_STEPS), "program"), "{{program}}")], "short", stacked=True),
    Panel("Steps by bucket", "timeseries", "Steps a second by token bucket.",
          [(total(rate(_STEPS), "bucket"), "{{bucket}}")], "short", stacked=True),
    Panel("Tokens computed", "timeseries", "Tokens a second that steps computed: prompts and answers.",
          [(total(rate("zl_step_tokens_total"), "phase"), "{{phase}}")], "short", stacked=True),
    Panel("Guard", "timeseries", "Fallback steps a second, and how often the program was retired or failed a check: "
          "all are 0 on a sound machine.",
          [(total(rate("zl_fallback_steps_total")), "fallback steps/s"),
           (total(now("zl_program_retirements_total")), "retirements"),
           (total(now("zl_heartbeats_total", 'result="failed"')), "failed checks"),
           (total(now("zl_program_captures_total", 'result="failed"')), "failed captures")], "short"),
    Panel("Age of the last good check", "timeseries", "The program is checked once a heartbeat period.",
          [(f"max({now('zl_heartbeat_age_seconds')})", "age"),
           (f"max({now('zl_engine_stall_seconds')})", "step loop silent")], "s"),
))

CAPACITY = Section("Capacity", (
    Panel("Rows", "timeseries", "Rows of the batch by state.", [(total(now("zl_rows"), "state"), "{{state}}")],
          stacked=True),
    Panel("Pages", "timeseries", "KV pages by state; constant ones are shared by prompts that begin alike.",
          [(total(now("zl_pages"), "state"), "{{state}}")], stacked=True),
    Panel("Fragmentation", "timeseries", "Share of the pages to give that the oldest waiting request cannot use.",
          [(f"max({now('zl_kv_fragmentation_ratio')})", "fragmentation")], "percentunit", highest=1.0),
    Panel("Unusable pages, evictions", "timeseries", "Pages behind the fragmentation; prefixes given up a second.",
          [(total(now("zl_kv_unusable_pages")), "unusable pages"),
           (total(rate("zl_prefix_evictions_total")), "evictions/s")]),
    Panel("Queue and flight", "timeseries", "Requests that wait, and all that have had no last frame.",
          [(total(now("zl_queue_depth")), "waiting"), (total(now("zl_requests_in_flight")), "in flight")]),
    Panel("Berths", "timeseries", "Frames on their way in, token ids whose rows have not begun, and readers a second "
          "that paused for want of a berth.",
          [(total(now("zl_berths", 'state="used"')), "used"), (total(now("zl_berths", 'state="lent"')), "lent"),
           (total(rate("zl_berth_waits_total")), "waits/s")]),
))

TRAFFIC = Section("Traffic and errors", (
    Panel("Errors", "timeseries", "Error frames a second by wire code.",
          [(total(rate("zl_errors_total"), "code"), "{{code}}")], "short"),
    Panel("Requests by outcome", "timeseries", "Requests a second by how they ended.",
          [(total(rate("zl_requests_total"), "outcome"), "{{outcome}}")], "short", stacked=True),
    Panel("Cut and beyond thresholds", "timeseries", "Requests a second whose text was cut, and those beyond a "
          "threshold by what was done about it.",
          [(total(rate("zl_truncations_total")), "cut"),
           (total(rate("zl_threshold_exceeded_total"), "limit", "action"), "{{limit}} {{action}}")], "short"),
    Panel("Journals", "timeseries", "Lines a second in access log and audit file, and entries lost, which are holes in "
          "the record. No data where neither is kept.",
          [(total(rate("zl_journal_lines_total"), "journal"), "{{journal}}"),
           (total(rate("zl_journal_lost_total"), "journal", "reason"), "{{journal}} {{reason}}")]),
    Panel("Tokens", "timeseries", "Tokens a second; constant ones are the part of prompts that was not computed.",
          [(total(rate("zl_tokens_total"), "kind"), "{{kind}}")]),
    Panel("Connections", "timeseries", "Open connections, new ones a second, and those ended without a farewell.",
          [(total(now("zl_connections_open")), "open"), (total(rate("zl_connections_total")), "new/s"),
           (total(rate("zl_connections_aborted_total"), "reason"), "{{reason}}/s")]),
    Panel("Wire", "timeseries", "Bytes of frames a second.",
          [(total(rate("zl_network_bytes_total"), "direction"), "{{direction}}")], "Bps"),
))

MACHINE = Section("Machine", (
    Panel("Memory of the model", "timeseries", "Fixed at start: a line that bends is a bug.",
          [(total(now("glue_layer_gpu_memory_bytes"), "component"), "{{component}}")], "bytes", stacked=True),
    Panel("Process", "timeseries", "Resident memory of the server.",
          [(total(now("process_resident_memory_bytes"), "instance"), "{{instance}}")], "bytes"),
    Panel("CPU", "timeseries", "Cores that the server keeps busy.",
          [(total(rate("process_cpu_seconds_total"), "instance"), "{{instance}}")], "short"),
    Panel("GPU memory", "timeseries", "As the driver counts it; no data on a machine without NVML.",
          [(total(now("zl_gpu_memory_bytes"), "gpu", "state"), "GPU {{gpu}} {{state}}")], "bytes", stacked=True),
    Panel("GPU clocks", "timeseries", "Falling under load: heat or power limit. No data without NVML.",
          [(f"max by (gpu, clock) ({now('zl_gpu_clock_hertz')})", "GPU {{gpu}} {{clock}}")], "hertz"),
    Panel("Served", "table", "What runs where: equal build_id, equal answers.", [(now("zl_build_info"), "")]),
))

SECTIONS = (AT_A_GLANCE, LATENCY, LAYER, PROGRAMS, CAPACITY, TRAFFIC, MACHINE)
