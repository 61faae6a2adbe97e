"""Where each family of the catalog is read: the one place that knows which part keeps which counter.

State: none. Every function here runs on a scraper's thread while the parts go on: it reads plain numbers, or copies a
container in one go, and never iterates over what another thread changes. Refuses torch and asyncio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zl.dispatch import Dispatcher
from zl.errors import Code, Finish
from zl.health import Health
from zl.histogram import Histogram, merge
from zl.journal import Journal
from zl.measures import PARTS, Measures
from zl.metrics.collect import Read
from zl.net.host import NetCounters
from zl.pages import PageBooks
from zl.rows import Life
from zl.service import Service

NO_REQUEST = (Code.OK, Code.BAD_FRAME, Code.UNAUTHENTICATED)
"""Codes whose frames answer no request."""


@dataclass(frozen=True)
class Parts:
    """What is read. `generation`, `arena` and `guard` are gpu.loop, gpu.arena and gpu.guard, or anything alike.

    memory  bytes of the engine by component
    build   the labels of zl_build_info, in their order
    """

    service: Service
    dispatcher: Dispatcher
    pages: PageBooks
    net: NetCounters
    health: Health
    generation: Any
    arena: Any
    guard: Any | None
    memory: Mapping[str, int]
    sampled_by: tuple[str, ...]
    build: tuple[str, str, str, str, str]


def sources(parts: Parts) -> dict[str, Read]:
    """Map the catalog's names to what reads them."""
    return {
        **_layer(parts),
        **_requests(parts),
        **_capacity(parts),
        **_engine(parts),
        **_guard(parts),
        **_wire(parts),
        "zl_build_info": lambda: {parts.build: 1.0},
    }


def _layer(p: Parts) -> dict[str, Read]:
    net, times = p.net, p.generation.counters.times

    def latency() -> dict[str, Any]:
        measures = p.service.measures
        return {
            "frame_read": net.frame_read.read(),
            "protobuf_parse": net.parse.read(),
            "tokenize": measures.tokenize.read(),
            "context_load": times.context_load.read(),
            "schedule": merge([measures.schedule.read(), times.schedule.read()]),
            "sampling": times.sampling.read(),
            "graph_replay": times.graph_replay.read(),
            "encode": measures.encode.read(),
            "write": merge([measures.write.read(), net.write.read()]),
        }

    return {
        "glue_layer_latency_seconds": latency,
        "glue_layer_gpu_memory_bytes": lambda: {**p.memory, "arena": p.arena.n_bytes},
        "glue_layer_share_ratio": lambda: p.service.measures.glue_share,
        "zl_request_time_seconds_total": lambda: {
            part: spent * 1e-9 for part, spent in zip(PARTS, p.service.measures.time_ns.copy(), strict=True)
        },
    }


def _requests(p: Parts) -> dict[str, Read]:
    service, net = p.service, p.net

    def by_profile(pick: Any) -> Read:
        def read() -> dict[str | tuple[str, ...], Any]:
            found: Mapping[str, Histogram] = pick(service.measures)
            return {name: histogram.read() for name, histogram in found.items()}

        return read

    def outcomes() -> dict[str, float]:
        ended = service.emitter.counters
        by_code = {code.name.lower(): ended.errors[code] + net.errors[code] for code in Code if code not in NO_REQUEST}
        return {
            "stop": ended.finished[Finish.STOP],
            "length": ended.finished[Finish.LENGTH],
            "cancelled": ended.finished[Finish.CANCELLED],
            "disconnected": service.counters.disconnected,
            **by_code,
        }

    def errors() -> dict[str, float]:
        ended = service.emitter.counters.errors
        return {code.name.lower(): ended[code] + net.errors[code] for code in Code if code is not Code.OK}

    def tokens() -> dict[str, float]:
        counters = p.dispatcher.counters
        return {
            "prompt": counters.prompt_tokens,
            "constant": counters.constant_tokens,
            "generated": service.emitter.counters.tokens,
        }

    return {
        "zl_time_to_first_token_seconds": by_profile(_first_token),
        "zl_inter_token_seconds": by_profile(_gap),
        "zl_queue_seconds": by_profile(_queue),
        "zl_e2e_seconds": by_profile(_e2e),
        "zl_requests_total": outcomes,
        "zl_requests_in_flight": lambda: service.in_flight,
        "zl_errors_total": errors,
        "zl_tokens_total": tokens,
        "zl_truncations_total": lambda: p.dispatcher.counters.truncated,
        "zl_threshold_exceeded_total": service.policy.counters.exceeded.copy,
        "zl_journal_lines_total": lambda: {name: journal.counters.lines for name, journal in _journals(service)},
        "zl_journal_lost_total": lambda: {
            (name, reason): lost
            for name, journal in _journals(service)
            for reason, lost in (("dropped", journal.counters.dropped), ("failed", journal.counters.failed))
        },
    }


def _journals(service: Service) -> list[tuple[str, Journal]]:
    kept = (("access", service.access), ("audit", service.audit))
    return [(name, log.journal) for name, log in kept if log is not None]


def _first_token(measures: Measures) -> Mapping[str, Histogram]:
    return measures.first_token


def _gap(measures: Measures) -> Mapping[str, Histogram]:
    return measures.gap


def _queue(measures: Measures) -> Mapping[str, Histogram]:
    return measures.queue


def _e2e(measures: Measures) -> Mapping[str, Histogram]:
    return measures.e2e


def _capacity(p: Parts) -> dict[str, Read]:
    rows, pages, arena, dispatcher = p.dispatcher.rows, p.pages, p.arena, p.dispatcher

    def page_states() -> dict[str, float]:
        free, constant = pages.n_free, pages.constant
        return {"free": free, "used": max(0, pages.n_pages - free - constant), "constant": constant}

    def fragmentation() -> float:
        available = pages.available()
        return dispatcher.unusable_pages / available if available else 0.0

    return {
        "zl_rows": lambda: {
            "free": rows.count(Life.FREE), "live": rows.count(Life.LIVE), "ending": rows.count(Life.ENDING)
        },
        "zl_pages": page_states,
        "zl_berths": lambda: {
            "free": arena.n_berths - arena.in_use, "used": arena.in_use - arena.lent, "lent": arena.lent
        },
        "zl_queue_depth": lambda: dispatcher.waiting,
        "zl_kv_unusable_pages": lambda: dispatcher.unusable_pages,
        "zl_kv_fragmentation_ratio": fragmentation,
        "zl_prefix_evictions_total": lambda: pages.evictions,
    }  # fmt: skip


def _engine(p: Parts) -> dict[str, Read]:
    counters = p.generation.counters

    def hits() -> dict[tuple[str, ...], float]:
        return {
            (str(bucket), name): n
            for bucket, row in zip(counters.buckets, counters.hits, strict=True)
            for name, n in zip(p.sampled_by, row, strict=True)
        }

    return {
        "zl_steps_total": lambda: counters.steps,
        "zl_step_tokens_total": lambda: {"prefill": counters.prefill_tokens, "decode": counters.decode_tokens},
        "zl_program_hits_total": hits,
        # Without a guard the twin is what was asked for: it stands in for nothing.
        "zl_fallback_steps_total": lambda: counters.fallback if p.guard is not None else 0,
        "zl_engine_stall_seconds": lambda: p.health.stalled_s,
        "zl_live": lambda: p.health.live,
        "zl_ready": lambda: p.health.ready,
    }


def _guard(p: Parts) -> dict[str, Read]:
    guard = p.guard
    if guard is None:  # a program that nothing watches is prepared once
        return {
            "zl_program_captures_total": lambda: {"ok": 1.0, "failed": 0.0},
            "zl_program_retirements_total": lambda: 0.0,
        }
    n = guard.counters
    return {
        "zl_program_captures_total": lambda: {"ok": 1 + n.recaptured, "failed": n.recaptures_failed},
        "zl_program_retirements_total": lambda: n.retired,
        "zl_heartbeats_total": lambda: {"ok": n.beats, "failed": n.beats_failed},
        "zl_heartbeat_age_seconds": lambda: guard.beat_age_s,
    }


def _wire(p: Parts) -> dict[str, Read]:
    net = p.net
    return {
        "zl_connections_open": lambda: net.connections_open,
        "zl_connections_total": lambda: net.connections_total,
        "zl_connections_aborted_total": lambda: {"slow_reader": net.aborted_slow, "hangup": net.hangups},
        "zl_network_bytes_total": lambda: {"in": net.bytes_in, "out": net.bytes_out},
        "zl_frames_total": lambda: {"in": net.frames_in, "out": net.frames_out},
        "zl_berth_waits_total": lambda: net.berth_waits,
    }
