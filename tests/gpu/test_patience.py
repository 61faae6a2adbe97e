"""zl/gpu/patience.py: a stuck step is told from a long one."""

from __future__ import annotations

from zl.gpu.patience import FORGET, MOST_S, SLACK, Patience

MS = 1_000_000


def test_before_any_step_nothing_is_allowed_beyond_the_fixed_limit():
    assert Patience().limit_s(512) == 0.0


def test_a_long_prompt_on_a_slow_machine_may_take_its_time():
    patience = Patience()
    patience.landed(20, 1200 * MS)  # 60 ms a token
    assert patience.limit_s(512) == SLACK * 512 * 0.060


def test_short_steps_do_not_make_a_long_one_look_endless():
    patience = Patience()
    patience.landed(128, 80 * MS)
    for _ in range(20):
        patience.landed(1, 10 * MS)  # ten times as long a token: they wait for the weights
    assert patience.limit_s(512) == SLACK * 512 * 80 * MS / 128 / 1e9
    assert patience.limit_s(1) < 1.5


def test_nothing_may_take_for_ever():
    patience = Patience()
    patience.landed(1, 3_600_000 * MS)
    assert patience.limit_s(1) == MOST_S


def test_one_long_step_is_forgotten():
    patience = Patience()
    patience.landed(1, 2000 * MS)
    patience.landed(1, 10 * MS)
    assert patience.limit_s(1) == SLACK * 2.0 * FORGET
    for _ in range(100):
        patience.landed(1, 10 * MS)
    assert patience.limit_s(1) < 0.1
