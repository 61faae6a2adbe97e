"""Payloads and objects: the protobuf library is the oracle."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tracemalloc

import google.protobuf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zl.errors import Code, Finish, FrameError, PeerError, RequestError
from zl.net import codec, rules, schema_pb2
from zl.net.codec import Encoding, Operation, Request, RequestType, Response, ServerInfo, Usage

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
MICROS = st.none() | U32


def ask(**fields) -> Request:
    return Request(**{"request_id": 7, "messages": [b"hi"], **fields})


@given(
    st.builds(
        dict, request_id=U64, system_prompt=st.binary(), messages=st.lists(st.binary(), max_size=20),
        temperature=MICROS, top_p=MICROS,
        repetition_penalty=MICROS, max_tokens=U32, type=st.integers(0, 9), operation=st.integers(0, 9),
        encoding=st.integers(0, 9), seed=st.none() | U64, stop=st.lists(st.binary(), max_size=6), context=st.binary(),
        auth_token=st.binary(), deadline_ms=U32, ignore_eos=st.booleans(), logprobs=st.booleans(),
    )
)  # fmt: skip
def test_a_request_from_the_library_decodes_to_the_same_fields(fields):
    payload = schema_pb2.Request(**fields).SerializeToString()
    request = codec.decode_request(memoryview(bytearray(payload)))
    messages = list(fields["messages"])
    while messages and not messages[-1]:
        messages.pop()
    assert request.messages == messages
    assert request.system == fields["system_prompt"]
    for name in ("temperature", "top_p", "repetition_penalty"):
        value = fields[name]
        assert getattr(request, name) == (None if value is None else value / 1e6)
    for name in ("request_id", "max_tokens", "type", "operation", "encoding", "seed", "stop", "context", "auth_token",
                 "deadline_ms", "ignore_eos", "logprobs"):  # fmt: skip
        assert getattr(request, name) == fields[name]


@given(
    st.builds(
        dict, request_id=U64, system=st.text(), messages=st.lists(st.binary(min_size=1), max_size=5),
        context=st.binary(), temperature=st.none() | st.floats(0, 4294), top_p=st.none() | st.floats(0, 1),
        max_tokens=U32,
        type=st.sampled_from(RequestType), operation=st.sampled_from(Operation), encoding=st.sampled_from(Encoding),
        seed=st.none() | U64, stop=st.lists(st.text(), max_size=5), deadline_ms=U32, ignore_eos=st.booleans(),
        logprobs=st.booleans(), auth_token=st.binary(),
    )
)  # fmt: skip
def test_what_the_client_encodes_is_what_the_server_decodes(fields):
    data = codec.encode_request(**fields)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    request = codec.decode_request(data[4:])
    for name in ("request_id", "messages", "context", "max_tokens", "type", "operation", "encoding", "seed",
                 "deadline_ms", "ignore_eos", "logprobs", "auth_token"):  # fmt: skip
        assert getattr(request, name) == fields[name]
    assert request.system.decode() == fields["system"]
    assert [stop.decode() for stop in request.stop] == fields["stop"]
    for name in ("temperature", "top_p"):
        value = fields[name]
        assert getattr(request, name) == (None if value is None else round(value * 1e6) / 1e6)
    library = schema_pb2.Request.FromString(data[4:])
    assert library.HasField("temperature") == (fields["temperature"] is not None)
    assert library.SerializeToString() == data[4:]


FLOATS = st.floats(width=32, allow_nan=False)
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)


@given(U64, IDS, st.binary(), st.none() | st.lists(FLOATS, max_size=5), st.none() | U64)
def test_token_frames_parse_back_equal(request_id, ids, text, logprobs, seed):
    data = codec.encode_tokens(request_id, ids, text, logprobs, seed)
    expected = schema_pb2.Response(
        request_id=request_id, token_ids=ids, text=text, logprobs=logprobs or [], seed=seed or 0
    ).SerializeToString()
    assert data == len(expected).to_bytes(4, "big") + expected
    assert codec.decode_response(memoryview(data)[4:]) == Response(
        request_id, ids, list(logprobs or []), text=text, seed=seed or 0
    )


@given(U64, IDS, st.sampled_from(Finish), st.builds(Usage, U32, U32, U32, st.booleans(), U64, U64, U64, U64))
def test_last_frames_parse_back_equal(request_id, ids, finish, usage):
    data = codec.encode_last(request_id, ids, b"end", None, finish, usage, None, 5)
    got = codec.decode_response(data[4:])
    assert got == Response(request_id, ids, [], True, b"end", finish, None, usage, None, 5)


def test_a_last_frame_carries_its_error_and_an_all_zero_usage():
    error = PeerError(Code.NUMERIC, "not finite")
    got = codec.decode_response(codec.encode_last(3, [], b"", None, Finish.ERROR, Usage(), error)[4:])
    assert got.usage == Usage()
    assert got.error is not None
    assert (got.error.code, got.error.message, got.error.request_id) == (Code.NUMERIC, "not finite", 3)


def test_an_error_frame_carries_everything_and_survives_lone_surrogates():
    error = RequestError(Code.OVERLOADED, "full \ud800", request_id=9, retry_after_ms=250)
    got = codec.decode_response(codec.encode_error(error)[4:])
    assert (got.request_id, got.is_finished, got.finish) == (9, True, Finish.ERROR)
    assert got.error is not None
    assert (got.error.code, got.error.message, got.error.retry_after_ms) == (Code.OVERLOADED, "full \\ud800", 250)
    assert codec.decode_response(codec.encode_error(error, 4)[4:]).request_id == 4


def test_server_info_travels_whole():
    info = ServerInfo("1", "m", "ab", 49152, 256, 4096, 2048, 16, 262144, "cpu", "id")
    got = codec.decode_response(codec.encode_server_info(2, codec.pack_server_info(info))[4:])
    assert got.server == info
    assert (got.request_id, got.is_finished) == (2, True)


def test_codes_of_a_newer_server_do_not_break_the_client():
    m = schema_pb2.Response(request_id=1, finish_reason=77, error=schema_pb2.Error(code=99, message="new"))  # type: ignore[arg-type]
    got = codec.decode_response(m.SerializeToString())
    assert got.finish is Finish.ERROR
    assert got.error is not None
    assert got.error.code is Code.INTERNAL
    assert "99" in got.error.message


@given(st.binary(max_size=200))
def test_random_bytes_give_a_message_or_a_frame_error(payload):
    for decode in (codec.decode_request, codec.decode_response):
        refused: PeerError | None = None
        try:
            got = decode(payload)
            if isinstance(got, Request):
                rules.check_request(got)
                rules.check_tokens(got, 1000)
        except (FrameError, RequestError) as error:
            refused = error
        if isinstance(refused, FrameError):
            assert refused.code is Code.BAD_FRAME
        elif refused is not None:
            assert refused.field
            assert refused.code in (Code.BAD_REQUEST, Code.LIMIT_EXCEEDED)


def test_nothing_of_the_payload_is_kept_and_no_copy_of_it_is_made_first():
    payload = schema_pb2.Request(messages=[b"x" * 200_000]).SerializeToString()
    berth = mmap.mmap(-1, 1 << 18)
    with memoryview(berth) as view:
        view[: len(payload)] = payload
        with view[: len(payload)] as part:
            tracemalloc.start()
            request = codec.decode_request(part)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        view[: len(payload)] = bytes(len(payload))
    berth.close()  # raises BufferError if a view were left
    assert request.messages == [b"x" * 200_000]
    # One copy is the message itself. Before 7.36 upb made another of the whole view.
    n_copies = 1 if tuple(map(int, google.protobuf.__version__.split(".")[:2])) >= (7, 36) else 2
    assert peak < n_copies * 200_000 + 20_000


def test_empty_turns_in_the_middle_stay_and_those_at_the_end_go():
    payload = codec.encode_request(request_id=1, messages=["a", "", "b", "", ""])[4:]
    assert codec.decode_request(payload).messages == [b"a", b"", b"b"]


@given(IDS)
def test_packed_tokens_come_back(ids):
    assert list(codec.tokens_of(codec.pack_tokens(ids))) == ids


def test_tokens_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="32 bits"):
        codec.pack_tokens([2**31])
    with pytest.raises(RequestError):
        codec.tokens_of(b"12345")


@pytest.mark.parametrize("value", [-0.1, 5000.0, float("nan")])
def test_sampling_values_that_do_not_fit_the_wire_are_refused(value):
    with pytest.raises(ValueError, match="temperature"):
        codec.encode_request(request_id=1, temperature=value)


def test_refuses_asyncio_numpy_and_torch():
    text = "import sys, zl.net.codec; print([m for m in ('asyncio', 'numpy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "[]\n"
