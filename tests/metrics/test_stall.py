"""Probes over a real generation loop: an engine that hangs in a step flips both within two seconds, and back."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request

import pytest

from tests.fake_engine import FakeEngine
from zl.dispatch import Dispatcher
from zl.gpu.loop import GenerationLoop
from zl.gpu.pinned import RowColumns, StepSlot
from zl.health import Health, Phase
from zl.ids import Ids
from zl.metrics.http import MetricsServer
from zl.pages import PageBooks
from zl.rows import Job, Rows
from zl.sampling import profiles
from zl.shapes import Shapes

SHAPES = Shapes(max_rows=2, max_model_len=64, max_tokens=8, default_tokens=8, step_tokens=16)


class HangingEngine(FakeEngine):
    """Waits at the fence until it is let go."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hangs, self.go = threading.Event(), threading.Event()

    def wait(self, seq: int) -> None:
        self.hangs.set()
        self.go.wait(30)
        super().wait(seq)


def status(server, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


@pytest.fixture
def house():
    columns, slots = RowColumns(SHAPES), [StepSlot(SHAPES)]
    engine = HangingEngine(columns, slots, 8)
    rows = Rows(SHAPES.max_rows)
    loop = GenerationLoop(SHAPES, engine, slots, rows.control, lambda result: None, lambda failure: None)
    dispatcher = Dispatcher(SHAPES, rows, PageBooks(8), columns, loop.seat)
    health = Health(lambda: loop.counters.turned_at)
    health.phase = Phase.READY
    server = MetricsServer("127.0.0.1:0", {}, health)
    loop.start()
    yield engine, dispatcher, server
    engine.go.set()
    loop.stop()
    server.close()


def test_a_hanging_engine_flips_both_probes_within_two_seconds_and_an_idle_one_never(house):
    engine, dispatcher, server = house
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:  # idle for longer than a stall: still well
        assert status(server, "/livez") == status(server, "/readyz") == 200
        time.sleep(0.1)
    job = Job(
        conn=None, request_id=1, prompt=Ids.of(range(4)), prefix_len=0, max_new=2,
        sampling=profiles.resolve(0), seed=1, stream=None, arrived=0.0,
    )  # fmt: skip
    dispatcher.admit(job, 0.0)
    assert engine.hangs.wait(10)
    hung = time.monotonic()
    while status(server, "/livez") == 200:
        time.sleep(0.02)
    assert time.monotonic() - hung < 2.0
    assert status(server, "/readyz") == 503
    engine.go.set()
    deadline = time.monotonic() + 10
    while status(server, "/readyz") != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
