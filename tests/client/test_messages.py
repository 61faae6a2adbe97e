"""zl/client/messages.py: how long a client may wait."""

from __future__ import annotations

import math

import pytest

from zl.client import Client, Timeouts
from zl.client.aio import AsyncClient


@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, -math.inf])
def test_a_timeout_that_cannot_be_kept_is_a_mistake_told_at_once(value):
    for make in (
        lambda: Timeouts.of(value), lambda: Timeouts(first_token=value),
        lambda: Client("unix:/nonexistent", timeout=value), lambda: AsyncClient("unix:/nonexistent", timeout=value),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"timeout of \S+ \(\w+\): it must be seconds above 0; math.inf waits"):
            make()


def test_timeouts_are_as_given():
    assert Timeouts() == (5.0, 120.0, 60.0)
    assert Timeouts.of(2) == Timeouts(2, 2, 2)
    given = Timeouts(between_tokens=math.inf)
    assert Timeouts.of(given) is given
    assert repr(given) == "Timeouts(connect=5.0, first_token=120.0, between_tokens=inf)"
