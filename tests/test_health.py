"""zl.health: what is alive, what is ready, and when that changes."""

import pytest

from zl.health import STALL_S, Health, Phase


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_ready_needs_the_phase_and_a_turning_engine(clock):
    health = Health(lambda: 100.0, clock=clock)
    assert health.live
    assert not health.ready
    health.phase = Phase.READY
    assert health.ready
    assert health.reason == "ready"
    clock.now += STALL_S - 0.01
    assert health.ready
    clock.now += 0.01
    assert not health.live
    assert not health.ready
    assert health.reason == "the engine has made no progress for 1.5 s"


def test_draining_lives_and_takes_nothing(clock):
    health = Health(clock, clock=clock)
    health.phase = Phase.DRAINING
    assert health.live
    assert not health.ready
    assert health.reason == "draining"


def test_failed_is_neither(clock):
    health = Health(clock, clock=clock)
    health.phase = Phase.FAILED
    assert not health.live
    assert not health.ready


def test_a_slow_start_is_no_stall(clock):
    health = Health(lambda: 0.0, clock=clock)
    assert health.live
    assert not health.ready


def test_a_step_that_may_take_longer_is_no_stall_until_then(clock):
    health = Health(lambda: 100.0, lambda: 20.0, clock=clock)
    health.phase = Phase.READY
    clock.now += 19.9
    assert health.ready
    clock.now += 0.2
    assert health.stuck
    assert not health.live
