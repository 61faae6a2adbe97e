"""How fast the device is: copy bandwidth, decode steps against it, prefill, time to first token of many streams."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Sequence

import torch

from bench.gpu.report import Report
from bench.gpu.rig import Rig
from zl.dispatch import Dispatcher, Limits
from zl.gpu import cuda_memory
from zl.gpu.loop import GenerationLoop, StepResult
from zl.gpu.pinned import EOS, FIRST, LENGTH, NUMERIC, SAMPLE
from zl.ids import Ids
from zl.pages import PageBooks
from zl.rows import Job, Rows
from zl.sampling import profiles


def copy_bandwidth(device: str, n_bytes: int, repeats: int) -> float:
    """Measure bytes read plus bytes written a second by the best of several copies inside the device's memory."""
    source = torch.ones(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats + 1):
        _settle(device)
        begun = time.perf_counter()
        target.copy_(source)
        _settle(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * n_bytes / best


def decode(report: Report, rig: Rig, bandwidth: float, row_counts: Sequence[int], context: int, n_steps: int) -> None:
    """Time decode steps, one after another and with the next one launched ahead, against the bytes they must move."""
    s = rig.shape
    token_bytes = 2 * 2 * s.n_layers * s.n_kv_heads * s.head_dim
    weights = cuda_memory.weight_bytes(s) - (0 if s.tied else 2 * s.vocab * s.hidden)
    for rows in row_counts:
        for r in range(rows):
            rig.seat(r, rig.prompt(context, r))
        at = context - 1
        rig.step([(r, at, 1, FIRST | SAMPLE) for r in range(rows)])
        times = []
        for _ in range(n_steps):
            at += 1
            index = rig.plan([(r, at, 1, SAMPLE) for r in range(rows)])
            begun = time.perf_counter()
            rig.engine.wait(rig.engine.launch(index))
            times.append(time.perf_counter() - begun)
        begun, waiting = time.perf_counter(), 0
        for _ in range(n_steps):
            at += 1
            seq = rig.engine.launch(rig.plan([(r, at, 1, SAMPLE) for r in range(rows)]))
            if waiting:
                rig.engine.wait(waiting)
            waiting = seq
        rig.engine.wait(waiting)
        ahead = (time.perf_counter() - begun) / n_steps
        step = statistics.median(times)
        moved = weights + rows * context * token_bytes
        share = moved / bandwidth / ahead
        goal = {1: 0.75, 128: 0.70}.get(rows)
        text = (
            f"{step * 1e3:.3f} ms alone, {ahead * 1e3:.3f} ms run ahead, {rows / ahead:,.0f} tokens/s, "
            f"{100 * share:.0f}% of the roofline"
        )
        if goal and not rig.dry and s.hidden >= 4096:
            text += f" (goal {100 * goal:.0f}%: {'met' if share >= goal else 'missed'})"
        report.time(
            s.name, f"decode, {rows} rows, context {context}", text, step_s=step, ahead_s=ahead, bytes=moved,
            roofline=share, tokens_per_s=rows / ahead,
        )  # fmt: skip


def prefill(report: Report, rig: Rig, n_tokens: int) -> None:
    """Time a prompt's chunks, the widest steps that the build has."""
    width = rig.shapes.step_tokens
    prompt = rig.prompt(n_tokens, 9)
    best = float("inf")
    for _ in range(1 if rig.dry else 3):
        rig.seat(0, prompt)
        begun = time.perf_counter()
        for start in range(0, n_tokens, width):
            n = min(width, n_tokens - start)
            flags = (0 if start else FIRST) | (SAMPLE if start + n == n_tokens else 0)
            rig.step([(0, start, n, flags)])
        best = min(best, time.perf_counter() - begun)
    text = f"{n_tokens / best:,.0f} tokens/s in steps of {width}"
    report.time(rig.shape.name, f"prefill of {n_tokens} tokens", text, seconds=best, tokens_per_s=n_tokens / best)


class Streams:
    """Closed loop through the real dispatcher and generation loop: each stream asks anew when its answer has ended.

    The thread that calls `run` plays the event loop. Figures are of all rounds but the first, whose burst is no
    stream's steady state.
    """

    def __init__(self, rig: Rig, n_streams: int, rounds: int, prompt_len: int, max_new: int):
        self.rig, self.n_streams, self.rounds = rig, n_streams, rounds
        self.prompt_len, self.max_new = prompt_len, max_new
        self.rows, self.pages = Rows(rig.shapes.max_rows), PageBooks(rig.shapes.n_pages)
        self.results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self.loop = GenerationLoop(
            rig.shapes, rig.engine, rig.slots, self.rows.control, self.results.put, self.results.put,
            run_ahead=rig.device.run_ahead,
        )  # fmt: skip
        self.dispatcher = Dispatcher(
            rig.shapes, self.rows, self.pages, rig.columns, self.loop.seat, Limits(share_prefixes=False)
        )
        self.asked: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.tokens = 0

    def _ask(self, stream: int, round_: int) -> None:
        number = round_ * self.n_streams + stream
        rng_length = self.prompt_len + (number * 7) % max(1, self.prompt_len // 4)
        prompt = Ids.of(self.rig.prompt(rng_length, number))
        # Lengths differ, so that streams do not stay in step.
        max_new = self.max_new + (number * 5) % max(1, self.max_new // 2)
        self.asked[number] = time.perf_counter()
        self.dispatcher.admit(
            Job(
                conn=None, request_id=number, prompt=prompt, prefix_len=0, max_new=max_new,
                sampling=profiles.resolve(0, None, None, None), seed=number, stream=None, arrived=0.0, ignore_eos=True,
            ),
            0.0,
        )  # fmt: skip

    def run(self) -> dict[str, float]:
        """Serve all rounds; return seconds: mean, sd and share of the first tokens, with tokens a second."""
        self.loop.start()
        begun = time.perf_counter()
        for stream in range(self.n_streams):
            self._ask(stream, 0)
        left = self.n_streams * self.rounds
        try:
            while left:
                result = self.results.get(timeout=120)
                if isinstance(result, BaseException):
                    raise result
                left -= self._take(result)
            while self.rows.in_use:
                self._take(self.results.get(timeout=120))  # type: ignore[arg-type]
        finally:
            self.loop.stop()
        seconds = time.perf_counter() - begun
        self.dispatcher.check()
        later = [self.first[n] - self.asked[n] for n in self.first if n >= self.n_streams or self.rounds == 1]
        mean, sd = statistics.fmean(later), statistics.pstdev(later)
        rate = self.tokens / seconds
        return {"mean_s": mean, "sd_s": sd, "sd_share": sd / mean, "n": len(later), "tokens_per_s": rate}

    def _take(self, result: StepResult) -> int:
        now, ended = time.perf_counter(), 0
        for ticket, flag in zip(result.tickets, result.flags, strict=True):
            job = self.rows.live(ticket)
            if job is None:
                continue
            self.tokens += 1
            self.first.setdefault(job.request_id, now)
            if flag & (EOS | LENGTH | NUMERIC):
                self.dispatcher.end(job)
                ended += 1
                round_, stream = divmod(job.request_id, self.n_streams)
                if round_ + 1 < self.rounds:
                    self._ask(stream, round_ + 1)
        for ticket in result.retired:
            self.dispatcher.retire(ticket, 0.0)
        self.dispatcher.pump(0.0)
        return ended


def streams(report: Report, rig: Rig, n_streams: int, rounds: int, prompt_len: int, max_new: int) -> None:
    """Time first tokens of many streams."""
    figures = Streams(rig, n_streams, rounds, prompt_len, max_new).run()
    share = 100 * figures["sd_share"]
    text = (
        f"first token {figures['mean_s'] * 1e3:.1f} ms, sd {figures['sd_s'] * 1e3:.1f} ms ({share:.0f}% of the mean), "
        f"{figures['tokens_per_s']:,.0f} tokens/s"
    )
    if not rig.dry and n_streams >= 128:
        text += f" (goal 11%: {'met' if share <= 11 else 'missed'})"
    report.time(rig.shape.name, f"{n_streams} streams", text, **figures)


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()  # sync
