"""zl/client/balancer.py: who is picked, ejected, probed and spared, with time as an argument."""

from __future__ import annotations

import pytest

from zl.address import parse_target
from zl.client import (
    BadRequest,
    ConnectionFailed,
    DeadlineExceeded,
    Draining,
    Overloaded,
    ServerError,
    StreamBroken,
    TimedOut,
)
from zl.client.balancer import Balancer, Retry
from zl.client.endpoints import failure
from zl.errors import Code, ConfigError

ADDRESSES = ["tcp:a:1", "tcp:b:1", "tcp:c:1"]


def test_the_fewest_in_flight_are_picked_and_equals_take_turns():
    balancer = Balancer(ADDRESSES)
    picked = [balancer.pick(0) for _ in range(9)]
    assert [each.in_flight for each in balancer.endpoints] == [3, 3, 3]
    balancer.done(picked[0])
    assert balancer.pick(0) is picked[0]
    alone = Balancer(ADDRESSES)
    seen = []
    for _ in range(3):
        endpoint = alone.pick(0)
        seen.append(endpoint.address)
        alone.done(endpoint)
    assert sorted(seen) == ADDRESSES


def test_addresses_come_as_a_list_or_as_text():
    assert [each.address for each in Balancer("tcp:a:1, unix:/x").endpoints] == ["tcp:a:1", "unix:/x"]
    for wrong in ("", [], "a:1", "tcp:a:1,tcp:a:1"):
        with pytest.raises(ConfigError):
            Balancer(wrong)


def test_a_lost_endpoint_is_probed_at_once_and_then_ever_less_often():
    balancer = Balancer(ADDRESSES[:1])
    (endpoint,) = balancer.endpoints
    balancer.lost(endpoint, 10)
    balancer.lost(endpoint, 11)  # another request of the same connection
    assert balancer.pick(10) is None
    waits, now = [], 10.0
    for _ in range(10):
        assert balancer.due(now) == [endpoint]
        assert balancer.due(now) == []  # one probe at a time
        balancer.dead(endpoint, now)
        wait = balancer.wait(now)
        assert balancer.due(now + wait / 2) == []
        waits.append(wait)
        now += wait
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    balancer.due(now)
    balancer.alive(endpoint)
    assert balancer.pick(now) is endpoint
    balancer.lost(endpoint, now)
    assert balancer.due(now) == [endpoint]  # forgiven: from the start


def test_an_ejected_endpoint_says_its_last_failure():
    balancer = Balancer("tcp:a:1")
    (endpoint,) = balancer.endpoints
    balancer.lost(endpoint, 0, StreamBroken("the connection broke: Connection reset by peer"))
    assert repr(endpoint) == (
        "<tcp:a:1: ejected after 1 failure, the last: the connection broke: Connection reset by peer, 0 in flight>"
    )
    balancer.dead(endpoint, 0, failure([parse_target("tcp:a:1")], ConnectionRefusedError(111, "Connection refused")))
    assert repr(endpoint) == "<tcp:a:1: ejected after 2 failures, the last: Connection refused, 0 in flight>"
    balancer.alive(endpoint)
    assert repr(endpoint) == "<tcp:a:1: alive, 0 in flight>"


def test_a_busy_endpoint_is_spared_as_long_as_it_asked_for():
    balancer = Balancer(ADDRESSES[:2])
    first, second = balancer.endpoints
    balancer.busy(first, 0, 1.5)
    assert {balancer.pick(1).address for _ in range(3)} == {second.address}
    balancer.busy(second, 0, 4)
    assert balancer.pick(1) is None
    assert balancer.wait(1) == 0.5
    assert balancer.pick(1.5) is first


@pytest.mark.parametrize(
    ("error", "again", "ejected", "spared"),
    [
        (ConnectionFailed("x"), True, True, 0),
        (StreamBroken("x"), True, True, 0),
        (StreamBroken("x", tokens_received=1), False, True, 0),
        (Overloaded("x", retry_after=1.5), True, False, 1.5),
        (Draining("x"), True, False, 1.0),
        (ServerError("x", code=Code.INTERNAL), True, False, 1.0),
        (ServerError("x", code=Code.NUMERIC), False, False, 0),  # the same input, the same numbers
        (BadRequest("x"), False, False, 0),
        (TimedOut("x", phase="first token"), False, True, 0),
    ],
)
def test_only_requests_without_a_token_are_tried_again(error, again, ejected, spared):
    balancer = Balancer(ADDRESSES)
    endpoint = balancer.endpoints[0]
    retry = Retry({}, 0, 30, 10)
    if again:
        retry.failed(balancer, endpoint, error, 0)
    else:
        with pytest.raises(type(error)):
            retry.failed(balancer, endpoint, error, 0)
    assert (endpoint.probe_at is not None) == ejected
    assert endpoint.free_at == spared


def test_attempts_patience_and_deadline_end_it():
    balancer = Balancer(ADDRESSES)
    retry = Retry({}, 0, 30, 2)
    retry.failed(balancer, balancer.endpoints[0], Overloaded("x"), 0)
    with pytest.raises(Overloaded):
        retry.failed(balancer, balancer.endpoints[1], Overloaded("x"), 0)
    with pytest.raises(ConnectionFailed):
        Retry({}, 0, 30, 9).failed(balancer, balancer.endpoints[1], ConnectionFailed("x"), 31)
    retry = Retry({"deadline_ms": 2_000, "seed": 1}, 100, 30, 9)
    assert retry.options(100.5) == {"deadline_ms": 1_500, "seed": 1}
    with pytest.raises(DeadlineExceeded):
        retry.options(102)
    for each in balancer.endpoints:
        balancer.busy(each, 0, 60)
    with pytest.raises(ConnectionFailed, match="no endpoint can be used"):
        Retry({}, 0, 30, 9).pause(balancer, 0)


def test_an_endpoint_that_drains_comes_last_but_is_not_waited_for():
    balancer = Balancer(ADDRESSES[:2])
    first, second = balancer.endpoints
    retry = Retry({}, 0, 30, 10)
    retry.failed(balancer, first, Draining("going down"), 0, served=True)
    assert {balancer.pick(0) for _ in range(5)} == {second}
    balancer.lost(second, 0)
    assert balancer.pick(0) is first  # behind its address another may have taken over
    balancer.alive(second)
    assert balancer.pick(2) is first  # has no requests, and its time has passed
    retry.failed(balancer, first, Draining("going down"), 3)  # the first word of a new connection
    balancer.lost(second, 3)
    assert balancer.pick(3) is None
    assert balancer.pick(4.1) is first


def test_the_end_of_a_connection_that_was_replaced_says_nothing_about_its_endpoint():
    balancer = Balancer(ADDRESSES[:1])
    (endpoint,) = balancer.endpoints
    retry = Retry({}, 0, 30, 10)
    retry.failed(balancer, endpoint, StreamBroken("gone"), 0, stale=True)
    assert balancer.pick(0) is endpoint
    retry.failed(balancer, endpoint, StreamBroken("gone"), 0)
    assert balancer.pick(0) is None
