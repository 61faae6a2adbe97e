"""The list of metric families: what each is called, counts, is labelled with, and teaches.

The collector refuses a name that is not here; docs, dashboard and alert rules are checked against it by tests.
State: none but frozen families. Imports nothing that a server needs, so that tools can read it without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zl.measures import (
    COMPONENTS,
    E2E_BUCKETS,
    GAP_BUCKETS,
    PART_BUCKETS,
    PARTS,
    PROFILES,
    WAIT_BUCKETS,
)

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

OUTCOMES = (
    "stop", "length", "cancelled", "disconnected", "bad_request", "limit_exceeded", "overloaded", "deadline_exceeded",
    "draining", "internal", "numeric", "duplicate_id",
)  # fmt: skip
"""How a request can end: by finish reason, by a peer that is gone, or by error code. Each request ends once."""

CODES = (
    "bad_frame", "bad_request", "limit_exceeded", "unauthenticated", "overloaded", "deadline_exceeded", "draining",
    "internal", "numeric", "duplicate_id",
)  # fmt: skip

LIMITS = ("max_tokens", "temperature", "messages", "system_tokens", "context_tokens", "prompt_tokens")
ACTIONS = ("allow", "clamp", "reject")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family.

    name     as scraped; of a histogram without _bucket, _sum, _count
    unit     of the value: seconds, bytes, tokens…; "" where it is a plain number
    labels   label names, and where the values are known beforehand their list in `values`
    help     one paragraph that says what is measured, and what to make of it
    buckets  upper bounds of a histogram, without +Inf
    where    "" if always there; otherwise the condition
    """

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()
    where: str = ""


def _by(label: str, *values: str) -> dict[str, Any]:
    return {"labels": (label,), "values": (values,)}


FAMILIES: tuple[Family, ...] = (
    # -- the layer ---------------------------------------------------------------------------------------------------
    Family(
        "glue_layer_latency_seconds", HISTOGRAM, "seconds",
        "Time each part of the way takes. One observation a frame: frame_read (CPU time in the socket's callbacks; "
        "waiting for the peer is network time and not in it), protobuf_parse (payload to checked request), tokenize "
        "(text to prompt ids). One observation a step, for all its rows together: context_load (plan and token ids to "
        "embeddings), sampling (logits to tokens), graph_replay (the rest of launch to fence: the model itself), "
        "encode (tokens to frames), write (frames to sockets). schedule has both kinds: admission of a request, and "
        "the planning and landing of a step. Parts are disjoint. A program that keeps no inner clock (the torch twin, "
        "CUDA graphs) has context_load and sampling inside graph_replay.",
        **_by("component", *COMPONENTS), buckets=PART_BUCKETS,
    ),
    Family(
        "glue_layer_gpu_memory_bytes", GAUGE, "bytes",
        "Memory that each component holds where the model computes: the GPU, or on a CPU device this process. Fixed "
        "at start: a value that changes is a bug. arena is the host memory that payloads land in.",
        **_by("component", "weights", "kv_pool", "buffers", "arena"),
    ),
    Family(
        "glue_layer_share_ratio", GAUGE, "",
        "Share of glue in the end-to-end time of the newest 64 answers that completed: every part but queue, "
        "graph_replay and heartbeat. 0 before the first. For a window of your own divide rates of "
        "zl_request_time_seconds_total.",
    ),
    Family(
        "zl_request_time_seconds_total", COUNTER, "seconds",
        "End-to-end time of completed answers, by where it went. Each request counts its own share of the steps it "
        "waited for, so the parts of n rows in one step add up to n times the step; summed over parts this equals "
        "zl_e2e_seconds_sum within 5%. queue lasts until the engine begins the prompt; heartbeat is the check of the "
        "program between steps; crossing is the way of a result from the engine's thread to the event loop's.",
        **_by("part", *PARTS),
    ),
    # -- requests ----------------------------------------------------------------------------------------------------
    Family(
        "zl_time_to_first_token_seconds", HISTOGRAM, "seconds",
        "From a request's frame being complete until the frame with its first token was written, queue included. "
        "What a person waits before anything shows.",
        **_by("profile", *PROFILES), buckets=WAIT_BUCKETS,
    ),
    Family(
        "zl_inter_token_seconds", HISTOGRAM, "seconds",
        "Time between two frames of one answer, one observation a frame but the first; a frame carries one token, but "
        "for a last one that only says stop. Its tail is what a reader sees "
        "as stutter: long prompts of others, heartbeats and garbage collection show here.",
        **_by("profile", *PROFILES), buckets=GAP_BUCKETS,
    ),
    Family(
        "zl_queue_seconds", HISTOGRAM, "seconds",
        "Waiting of completed answers, from submission until the engine began the prompt, less tokenize and schedule. "
        "Grows when rows or pages are short, see zl_queue_depth and zl_pages, or when many prompts wait for steps.",
        **_by("profile", *PROFILES), buckets=WAIT_BUCKETS,
    ),
    Family(
        "zl_e2e_seconds", HISTOGRAM, "seconds",
        "From a request's frame being complete until its last frame was written, for answers that completed (finish "
        "stop or length).",
        **_by("profile", *PROFILES), buckets=E2E_BUCKETS,
    ),
    Family(
        "zl_requests_total", COUNTER, "",
        "Requests by how they ended, each counted once, at its end: stop and length are complete answers, "
        "disconnected is a peer that left, the rest are error codes. Frames that are no request and peers without the "
        "token are in zl_errors_total only.",
        **_by("outcome", *OUTCOMES),
    ),
    Family("zl_requests_in_flight", GAUGE, "", "Requests that have had no last frame: waiting or being answered."),
    Family(
        "zl_errors_total", COUNTER, "",
        "Error frames sent, by wire code. overloaded: add rows or servers. internal and numeric are ours: see the log.",
        **_by("code", *CODES),
    ),
    Family(
        "zl_tokens_total", COUNTER, "tokens",
        "Tokens: prompt (of requests begun, whole prompts), constant (the part of prompt that came from constant pages "
        "and was not computed), generated (sent to peers).",
        **_by("kind", "prompt", "constant", "generated"),
    ),
    Family(
        "zl_truncations_total", COUNTER, "",
        "Requests whose text was over a budget and was cut; their answers say usage.truncated.",
    ),
    Family(
        "zl_threshold_exceeded_total", COUNTER, "",
        "Requests past a threshold, by what the policy did about it: allow let it pass (what the server cannot hold is "
        "refused all the same), clamp cut it to the "
        "threshold, reject answered limit_exceeded.",
        labels=("limit", "action"), values=(LIMITS, ACTIONS),
    ),
    Family(
        "zl_journal_lines_total", COUNTER, "", "Lines written to a journal: the access log or the audit file.",
        **_by("journal", "access", "audit"), where="a journal is kept",
    ),
    Family(
        "zl_journal_lost_total", COUNTER, "",
        "Entries that a journal could not keep: dropped found its queue full, failed could not be written. Any: the "
        "disk is slow or full, and the record has a hole, which the file says too.",
        labels=("journal", "reason"), values=(("access", "audit"), ("dropped", "failed")), where="a journal is kept",
    ),
    # -- capacity ----------------------------------------------------------------------------------------------------
    Family(
        "zl_rows", GAUGE, "",
        "Batch rows by state. ending: the last frame is out and a step that touches the row is still in flight.",
        **_by("state", "free", "live", "ending"),
    ),
    Family(
        "zl_pages", GAUGE, "",
        "KV pages by state. constant pages hold prefixes that prompts share; those that nobody uses now are given up "
        "when rows need pages.",
        **_by("state", "free", "used", "constant"),
    ),
    Family(
        "zl_berths", GAUGE, "",
        "Arena berths. used: a frame is on its way in; lent: token ids lie there until their row begins, in half "
        "of the berths at most. None free: readers pause, see zl_berth_waits_total.",
        **_by("state", "free", "used", "lent"),
    ),
    Family("zl_queue_depth", GAUGE, "", "Requests that wait for a row or pages."),
    Family(
        "zl_kv_unusable_pages", GAUGE, "",
        "Fragmentation: pages that could be handed out now and that the oldest waiting request cannot use, because it "
        "takes its pages all at once. With a pages to give and a request that needs n: the remainder of a / n. 0 when "
        "nobody waits.",
    ),
    Family(
        "zl_kv_fragmentation_ratio", GAUGE, "",
        "zl_kv_unusable_pages as a share of the pages that could be handed out now. 1 with a full queue: pages, not "
        "rows, are what is short.",
    ),
    Family(
        "zl_prefix_evictions_total", COUNTER, "",
        "Shared prefixes given up to make room. Many a minute: prompts are computed again; give the pool more memory.",
    ),
    # -- the engine --------------------------------------------------------------------------------------------------
    Family("zl_steps_total", COUNTER, "", "Steps of the generation loop that have ended."),
    Family(
        "zl_step_tokens_total", COUNTER, "tokens",
        "Tokens that steps computed: prefill (prompts) and decode (one a row and step).",
        **_by("phase", "prefill", "decode"),
    ),
    Family(
        "zl_program_hits_total", COUNTER, "",
        "Steps by token bucket (the narrowest of the build's sizes that holds the step) and by what sampled them: the "
        "program of one profile, generic where rows bring settings of their own, mixed for rows of several, none where "
        "nothing was drawn. Aim: 85% of drawing steps on a profile's program. On the CPU one program serves every "
        "bucket.",
        labels=("bucket", "program"),
    ),
    Family(
        "zl_fallback_steps_total", COUNTER, "",
        "Steps that plain torch computed in the program's place. Rising: the program is retired, answers are slow.",
    ),
    Family(
        "zl_program_captures_total", COUNTER, "",
        "Times the program was prepared: ok counts the one at start, failed those that did not pass the heartbeat.",
        **_by("result", "ok", "failed"),
    ),
    Family(
        "zl_program_retirements_total", COUNTER, "",
        "Times the program was found damaged and taken out of service. Any is a hardware matter: look at the log.",
    ),
    Family(
        "zl_heartbeats_total", COUNTER, "",
        "Checks of the program against its readings at start, by result.",
        **_by("result", "ok", "failed"), where="a guard watches the program",
    ),
    Family(
        "zl_heartbeat_age_seconds", GAUGE, "seconds",
        "Time since the last good check. Above three periods: the engine is stuck or the check is off.",
        where="a guard watches the program",
    ),
    Family(
        "zl_engine_stall_seconds", GAUGE, "seconds",
        "Time since the step loop last made progress; it turns twice a second when idle. /livez fails from 1.5 s on, "
        "or from four times what the running step should take.",
    ),
    Family("zl_live", GAUGE, "", "1 while the engine works: what /livez says."),
    Family("zl_ready", GAUGE, "", "1 while requests are taken and will be answered: what /readyz says."),
    # -- the wire ----------------------------------------------------------------------------------------------------
    Family("zl_connections_open", GAUGE, "", "Connections that are open."),
    Family("zl_connections_total", COUNTER, "", "Connections that were accepted."),
    Family(
        "zl_connections_aborted_total", COUNTER, "",
        "Connections ended without a farewell: slow_reader let answers pile up, hangup went away after half-closing.",
        **_by("reason", "slow_reader", "hangup"),
    ),
    Family(
        "zl_network_bytes_total", COUNTER, "bytes", "Bytes of frames, headers included, before TLS.",
        **_by("direction", "in", "out"),
    ),
    Family("zl_frames_total", COUNTER, "", "Whole frames, pings included.", **_by("direction", "in", "out")),
    Family(
        "zl_berth_waits_total", COUNTER, "",
        "Frames that found no berth free and had their reader paused. Rising: raise berths.",
    ),
    # -- the process and its machine ---------------------------------------------------------------------------------
    Family(
        "zl_build_info", GAUGE, "",
        "Always 1; the labels say what is served. Equal build_id: equal answers to equal requests and seeds.",
        labels=("version", "model", "build_id", "device", "program"),
    ),
    Family(
        "zl_gpu_memory_bytes", GAUGE, "bytes", "Memory of the GPU by state, of all processes, as the driver counts it.",
        labels=("gpu", "state"), values=((), ("free", "used")), where="NVML can be loaded",
    ),
    Family(
        "zl_gpu_clock_hertz", GAUGE, "hertz", "Clock of the GPU now. Falling under load: heat or power limit.",
        labels=("gpu", "clock"), values=((), ("sm", "memory")), where="NVML can be loaded",
    ),
    Family("process_cpu_seconds_total", COUNTER, "seconds", "User and system CPU time of the server process."),
    Family("process_resident_memory_bytes", GAUGE, "bytes", "Resident memory of the server process."),
    Family("process_virtual_memory_bytes", GAUGE, "bytes", "Virtual memory of the server process."),
    Family("process_open_fds", GAUGE, "", "Open file descriptors of the server process."),
    Family("process_max_fds", GAUGE, "", "Most file descriptors that the server process may open."),
    Family(
        "process_start_time_seconds", GAUGE, "seconds", "Start of the server process, seconds of the Unix epoch (UTC)."
    ),
)  # fmt: skip

CATALOG: MappingProxyType[str, Family] = MappingProxyType({family.name: family for family in FAMILIES})
"""Families by name."""
