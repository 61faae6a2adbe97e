"""The watchdog's food: only while the step loop makes progress."""

from __future__ import annotations

import logging

from zl.health import STALL_S, Health, Phase
from zl.ops.watchdog import LOOK_S, Watchdog


class Manager:
    def __init__(self, watchdog_s: float):
        self.watchdog_s = watchdog_s
        self.fed = 0
        self.words: list[str] = []

    def watchdog(self) -> None:
        self.fed += 1

    def status(self, text: str) -> None:
        self.words.append(text)


class Loop:
    """Time and timers by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turned_at = 0.0
        self.due: list[tuple[float, object]] = []

    def call_later(self, seconds, function):
        entry = (self.now + seconds, function)
        self.due.append(entry)
        return Timer(self.due, entry)

    def run(self, seconds: float, turning: bool) -> None:
        end = self.now + seconds
        while self.due and self.due[0][0] <= end:
            self.now, function = self.due.pop(0)
            if turning:
                self.turned_at = self.now
            function()
        self.now = end


class Timer:
    def __init__(self, due, entry):
        self.cancel = lambda: due.remove(entry)


def made(watchdog_s: float):
    loop, manager = Loop(), Manager(watchdog_s)
    health = Health(lambda: loop.turned_at, clock=lambda: loop.now)
    health.phase = Phase.READY
    watchdog = Watchdog(health, manager, loop.call_later, lambda: "serving")
    watchdog.start()
    return loop, manager, health, watchdog


def test_food_stops_with_the_step_loop_and_comes_back_with_it(caplog):
    caplog.set_level(logging.INFO)
    loop, manager, _, watchdog = made(watchdog_s=10)
    loop.run(10, turning=True)
    assert manager.fed == 1 + 10 / LOOK_S
    before = manager.fed
    loop.run(STALL_S + LOOK_S, turning=False)
    assert manager.fed - before <= STALL_S / LOOK_S
    assert manager.words == ["the engine has made no progress for 1.5 s"]
    before = manager.fed
    loop.run(60, turning=False)
    assert manager.fed == before
    loop.run(1, turning=True)
    assert manager.fed == before + 1 / LOOK_S
    assert manager.words[1:] == ["serving"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]  # once each, not at every look
    watchdog.stop()
    assert not loop.due


def test_a_short_period_is_fed_more_often():
    loop, manager, _, _ = made(watchdog_s=0.4)
    loop.run(1, turning=True)
    assert manager.fed >= 10


def test_without_a_watchdog_stalls_are_still_told():
    loop, manager, _, _ = made(watchdog_s=0)
    loop.run(5, turning=False)
    assert manager.fed == 0
    assert len(manager.words) == 1


def test_a_failed_engine_is_not_fed_and_named():
    loop, manager, health, _ = made(watchdog_s=10)
    health.phase = Phase.FAILED
    before = manager.fed
    loop.run(2, turning=True)
    assert manager.fed == before
    assert manager.words == ["failed"]
