"""Frames: whole, byte by byte, with trailing bytes; random bytes give events or a peer error."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zl.config import spec_of
from zl.errors import Code, FrameError
from zl.net.frames import PING, FrameDecoder, Payload, Ping, frame, payload_length
from zl.shapes import MAX_FRAME


def events_of(chunks, max_frame=64):
    decoder = FrameDecoder(max_frame)
    return [event for chunk in chunks for event in decoder.feed(chunk)], decoder


def test_whole_frames_and_pings_come_out_in_order():
    events, decoder = events_of([frame(b"one") + PING + frame(b"two")])
    assert events == [Payload(b"one"), Ping(), Payload(b"two")]
    assert [type(event) for event in events] == [Payload, Ping, Payload]
    assert decoder.eof() is None


def test_byte_by_byte_gives_the_same_events():
    stream = frame(b"one") + PING + frame(b"two" * 9)
    events, _ = events_of([stream[i : i + 1] for i in range(len(stream))])
    assert events == events_of([stream])[0]
    assert len(events) == 3


def test_trailing_bytes_stay_for_the_next_feed():
    events, decoder = events_of([frame(b"one") + b"\0\0"])
    assert events == [Payload(b"one")]
    assert "2 of 4 bytes" in str(decoder.eof())
    decoder = FrameDecoder()
    assert decoder.feed(frame(b"four")[:6]) == []
    assert "2 of 4 bytes" in str(decoder.eof())


def test_a_length_over_the_limit_is_the_last_event():
    events, decoder = events_of([frame(b"ok") + b"GET / HTTP/1.1\r\n", PING, frame(b"late")])
    assert events[0] == Payload(b"ok")
    assert isinstance(events[1], FrameError)
    assert len(events) == 2
    assert events[1].code is Code.BAD_FRAME
    assert events[1].message.startswith("this is an HTTP request")
    assert decoder.failed


def test_the_limit_itself_is_allowed():
    assert payload_length((64).to_bytes(4, "big"), 64) == 64
    with pytest.raises(FrameError):
        payload_length((65).to_bytes(4, "big"), 64)


@pytest.mark.parametrize(
    ("sent", "words"),
    [(method + b" / HTTP/1.1\r\n", "this is an HTTP request") for method in
     (b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"DELETE", b"PATCH", b"CONNECT", b"TRACE", b"PRI")]
    + [(b"HTTP/1.0 400 Bad Request\r\n", "this is HTTP: another server has this port"),
       (b"<!DOCTYPE html>", "this is HTTP: another server has this port"),
       (b"SSH-2.0-x\r\n", "this is SSH"),
       (b"\x16\x03\x01\x02\x00\x01", "this is a TLS handshake, and this address speaks plain frames: write tcp:")],
)  # fmt: skip
def test_what_speaks_another_protocol_is_called_by_its_name(sent, words):
    for limit in (MAX_FRAME, spec_of("max_frame").read("64MiB")):
        with pytest.raises(FrameError) as caught:
            payload_length(sent[:4], limit)
        assert caught.value.message.startswith(words)
        assert "1195725856" not in caught.value.message
    (event,) = FrameDecoder().feed(sent)
    assert isinstance(event, FrameError)


def test_a_length_that_is_only_too_long_speaks_of_max_frame():
    with pytest.raises(FrameError, match=r"frame length 262145 is over the limit of 262144.*raise max_frame"):
        payload_length((262_145).to_bytes(4, "big"))


def test_feed_does_not_keep_a_callers_buffer():
    buffer = bytearray(frame(b"abc") + b"\0")
    decoder = FrameDecoder()
    with memoryview(buffer) as view:
        events = decoder.feed(view)
    buffer[:] = b"x" * 99  # would raise BufferError while a view is exported
    assert events == [Payload(b"abc")]


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_random_bytes_give_events_or_a_peer_error(chunks):
    events, decoder = events_of(chunks)
    for event in events[:-1]:
        assert isinstance(event, Ping | Payload)
    assert decoder.failed == (bool(events) and isinstance(events[-1], FrameError))
    whole, _ = events_of([b"".join(chunks)])
    assert [str(event) for event in whole] == [str(event) for event in events]


@given(st.lists(st.binary(max_size=64)), st.data())
def test_any_cut_of_a_good_stream_gives_its_payloads(payloads, data):
    stream = b"".join(frame(payload) for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    events, decoder = events_of([stream[a:b] for a, b in pairwise(edges)])
    assert events == [Payload(payload) if payload else Ping() for payload in payloads]
    assert decoder.eof() is None


def test_refuses_asyncio_protobuf_and_torch():
    text = "import sys, zl.net.frames; print([m for m in ('asyncio', 'google.protobuf', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "[]\n"
