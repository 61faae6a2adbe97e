"""The conversation rules of WIRE.md, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zl.errors import Code, FrameError, InvariantError, RequestError
from zl.net import codec
from zl.net.codec import Operation
from zl.net.session import TABLE, Cancel, Close, Event, Info, Pong, Send, Session, State, Submit


def payload(request_id=1, **fields):
    return codec.encode_request(**{"request_id": request_id, "messages": ["hi"], **fields})[4:]


def hello(token=b"", request_id=9):
    return payload(request_id, operation=Operation.HELLO, auth_token=token, messages=())


def cancel(request_id):
    return payload(request_id, operation=Operation.CANCEL, messages=())


def errors(actions):
    return [
        (response.error.code, response.request_id)
        for action in actions
        if isinstance(action, Send)
        for response in [codec.decode_response(action.data[4:])]
        if response.error is not None and response.is_finished
    ]


def submit(session, request_id):
    (action,) = session.receive(payload(request_id), True)
    assert isinstance(action, Submit)
    assert action.request.request_id == request_id


def test_requests_pipeline_and_ids_return_when_finished():
    session = Session()
    for request_id in (1, 2, 0):
        submit(session, request_id)
    assert session.n_in_flight == 3
    assert session.finished(1) == []
    submit(session, 1)


def test_an_id_in_flight_is_refused_and_the_first_request_lives_on():
    session = Session()
    submit(session, 5)
    assert errors(session.receive(payload(5), True)) == [(Code.DUPLICATE_ID, 5)]
    assert errors(session.receive(hello(request_id=5), True)) == [(Code.DUPLICATE_ID, 5)]
    assert session.n_in_flight == 1


def test_a_bad_request_ends_alone():
    session = Session()
    submit(session, 1)
    assert errors(session.receive(payload(2, messages=[]), True)) == [(Code.BAD_REQUEST, 2)]
    assert session.n_in_flight == 1
    assert session.state is State.OPEN


def test_the_applications_refusal_frees_the_id():
    session = Session()
    submit(session, 1)
    assert errors(session.refused(1, RequestError(Code.OVERLOADED, "full"))) == [(Code.OVERLOADED, 1)]
    submit(session, 1)


def test_cancel_of_an_unknown_id_is_ignored():
    session = Session()
    submit(session, 1)
    assert session.receive(cancel(2), True) == []
    assert session.receive(cancel(1), True) == [Cancel(1)]


def test_a_broken_frame_is_answered_once_and_ends_everything():
    session = Session()
    submit(session, 1)
    actions = session.receive(b"\x00\x01", True)
    assert errors(actions) == [(Code.BAD_FRAME, 0)]
    assert actions[-1] == Close()
    assert session.n_in_flight == 0
    assert session.ended
    assert session.finished(1) == []


def test_half_close_waits_for_what_is_in_flight():
    session = Session()
    submit(session, 1)
    submit(session, 2)
    assert session.eof() == []
    assert session.state is State.HALF_CLOSED
    assert session.finished(1) == []
    assert session.finished(2) == [Close()]


def test_half_close_with_nothing_in_flight_closes():
    assert Session().eof() == [Close()]


def test_without_a_token_hello_is_optional_and_any_time():
    session = Session()
    submit(session, 1)
    assert session.receive(hello(b"whatever"), True) == [Info(9)]


@pytest.mark.parametrize(
    "first",
    [payload(3), cancel(3), hello(b"wrong", 3), hello(b"", 3), payload(3, operation=77), payload(3, messages=[])],
)
@pytest.mark.parametrize("pinged", [False, True])
def test_before_hello_everything_but_a_ping_is_unauthenticated(first, pinged):
    session = Session(b"secret")
    if pinged:
        assert session.ping(True) == [Pong()]
    actions = session.receive(first, True)
    assert errors(actions) == [(Code.UNAUTHENTICATED, 3)]
    assert actions[-1] == Close()
    assert b"secret" not in b"".join(action.data for action in actions if isinstance(action, Send))


def test_the_token_opens_and_later_hellos_need_none():
    session = Session(b"secret")
    assert session.receive(hello(b"secret"), True) == [Info(9)]
    submit(session, 1)
    assert session.receive(hello(), True) == [Info(9)]
    assert errors(session.receive(hello(b"wrong"), True)) == [(Code.UNAUTHENTICATED, 9)]
    assert session.ended


@pytest.mark.parametrize("token", [None, b"secret"])
def test_an_unready_server_closes_on_a_new_connections_ping_only(token):
    assert Session(token).ping(False) == [Close()]
    session = Session(token)
    assert session.ping(True) == [Pong()]
    assert session.ping(False) == [Pong()]


def test_draining_turns_requests_away_and_serves_the_rest():
    session = Session()
    submit(session, 1)
    assert errors(session.receive(payload(2), False)) == [(Code.DRAINING, 2)]
    assert session.receive(hello(), False) == [Info(9)]
    assert session.receive(cancel(1), False) == [Cancel(1)]
    assert session.ping(False) == [Pong()]
    assert session.close() == [Close()]


@pytest.mark.parametrize(
    ("token", "first", "accepting", "refused"),
    [
        (None, payload(1, messages=[]), True, True),
        (None, payload(1, operation=77), True, True),
        (None, payload(5), True, True),
        (None, hello(request_id=5), True, True),
        (None, payload(1), False, True),
        (b"secret", payload(1), True, True),
        (b"secret", hello(b"wrong"), True, True),
        (b"secret", cancel(1), True, True),
        (None, b"\x00\x01", True, False),  # whose id nobody knows
    ],
)
def test_a_refusal_carries_the_request_that_it_ends(token, first, accepting, refused):
    session = Session(token)
    if token is None:
        submit(session, 5)
    send = session.receive(first, accepting)[0]
    assert isinstance(send, Send)
    assert send.refused == (codec.decode_request(first) if refused else None)


def test_the_applications_own_refusal_is_not_news_to_it():
    session = Session()
    submit(session, 1)
    (send,) = session.refused(1, RequestError(Code.OVERLOADED, "full"))
    assert send.refused is None


def test_what_cannot_happen_raises():
    session = Session()
    with pytest.raises(InvariantError):
        session.finished(1)
    session.close()
    with pytest.raises(InvariantError):
        session.ping(True)


def test_every_transition_of_the_table_leads_to_a_state_that_can_be_lost():
    for state, _ in TABLE.values():
        assert state is State.CLOSED or (state, Event.LOST) in TABLE


OPERATIONS = st.one_of(
    st.tuples(st.just("receive"), st.binary(max_size=30)),
    st.tuples(st.just("receive"), st.builds(payload, st.integers(0, 3), operation=st.integers(0, 3))),
    st.tuples(st.just("ping"), st.booleans()),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("broken"), st.none()),
    st.tuples(st.just("eof"), st.none()),
)


@given(st.sampled_from([None, b"secret"]), st.lists(OPERATIONS, max_size=20), st.booleans())
def test_any_order_of_events_keeps_the_books(token, operations, accepting):
    session, live, peer_done = Session(token), set(), False
    for name, argument in operations:
        if session.ended or (peer_done and name != "finish"):
            continue
        match name:
            case "receive":
                actions = session.receive(argument, accepting)
            case "ping":
                actions = session.ping(argument)
            case "finish":
                if argument not in live:
                    continue
                live.remove(argument)
                actions = session.finished(argument)
            case "broken":
                actions = session.broken(FrameError("broken"))
            case _:
                peer_done = True
                actions = session.eof()
        for action in actions:
            if isinstance(action, Submit):
                assert action.request.request_id not in live
                live.add(action.request.request_id)
        assert (Close() in actions) == session.ended
        if session.ended:
            live.clear()
        assert session.n_in_flight == len(live)
    session.lost()
    assert session.state is State.CLOSED
