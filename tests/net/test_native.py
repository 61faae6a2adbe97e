"""The native decoder against codec: it takes nothing that codec reads otherwise or refuses, and every valid request."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tools.mutants import mutants
from zl.compiled import compiler
from zl.errors import DeviceError, FrameError, InvariantError, RequestError
from zl.net import codec, rules, schema_pb2
from zl.net.frames import FrameDecoder, Payload, frame
from zl.net.messages import Operation, Request
from zl.net.native import library
from zl.net.native.library import HERE, SLOTS, code_if_possible, limits, open_code
from zl.net.session import Session, Submit
from zl.shapes import MANY_MESSAGES, MAX_MESSAGES, MAX_STOP_BYTES, MAX_STOPS

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text())
STREAMS = [(VECTORS / f"{name}.bin").read_bytes() for name in INDEX]
STREAMS += [
    codec.encode_request(request_id=2**40, system="être " * 20, messages=["a", "", "c€"], temperature=0.7, top_p=0.9,
                         repetition_penalty=1.1, max_tokens=300, seed=5, stop=["\n", "ü"], context="text",
                         deadline_ms=5_000, ignore_eos=True, logprobs=True, type=2),
    codec.encode_request(request_id=1, messages=[codec.pack_tokens(range(40))], encoding=1, auth_token="t"),
]  # fmt: skip

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)

decode, encode_token = open_code()


def by_codec(payload: bytes, max_messages: int | None = None) -> Request | None:
    """The request that a payload is, where the field rules hold for it."""
    try:
        request = codec.decode_request(payload)
        if request.operation != Operation.GENERATE:
            return None
        rules.check_request(request, max_messages)
    except (FrameError, RequestError):
        return None
    return request


def check(payload: bytes) -> Request | None:
    """Hold the native answer to codec's: nothing, or the same to the type of each field."""
    found = decode(payload)
    if found is not None:
        wanted = by_codec(payload)
        assert found == wanted, payload.hex()
        assert wanted is not None
        for name in SLOTS:
            assert type(getattr(found, name)) is type(getattr(wanted, name)), name
    return found


def payloads(stream: bytes) -> Iterator[bytes]:
    return (event.data for event in FrameDecoder().feed(stream) if isinstance(event, Payload))


def request(**fields) -> bytes:
    return schema_pb2.Request(**{"request_id": 7, "messages": [b"hi"], **fields}).SerializeToString()


NUMBERS = {"request_id": U64, "max_tokens": U32, "deadline_ms": U32, "ignore_eos": st.booleans(),
           "logprobs": st.booleans(), "seed": st.none() | U64, "auth_token": st.binary(max_size=9)}  # fmt: skip
SAMPLING = {
    "temperature": st.none() | st.integers(0, 100_000_000),
    "top_p": st.none() | st.integers(0, 1_000_000),
    "repetition_penalty": st.none() | st.integers(1, 100_000_000),
}
TEXT = st.text().map(str.encode)
TOKENS = st.lists(st.binary(min_size=4, max_size=4)).map(b"".join)
STOPS = st.lists(st.text(min_size=1, max_size=16).map(str.encode), max_size=MAX_STOPS)


def prompts(field: st.SearchStrategy[bytes]) -> dict[str, st.SearchStrategy]:
    turns = st.lists(field, max_size=MAX_MESSAGES - 1)
    return {"system_prompt": field, "context": field, "stop": STOPS, "messages": turns, "type": st.integers(0, 2)}


VALID = st.one_of(
    st.fixed_dictionaries({**prompts(TEXT), **NUMBERS, **SAMPLING}),
    st.fixed_dictionaries({**prompts(TOKENS), **NUMBERS, **SAMPLING, "encoding": st.just(1)}),
)
ANY = st.fixed_dictionaries(
    {
        **prompts(st.binary() | TEXT), **NUMBERS, "type": st.integers(-1, 4), "encoding": st.integers(-1, 3),
        "operation": st.integers(0, 3), "stop": st.lists(st.binary() | TEXT, max_size=6),
        "messages": st.lists(st.binary(max_size=2), max_size=70), "temperature": st.none() | U32,
        "top_p": st.none() | U32, "repetition_penalty": st.none() | U32,
    }
)  # fmt: skip


@given(VALID)
def test_takes_every_valid_request(fields):
    payload = request(**fields)
    turns = list(fields["messages"])
    while turns and not turns[-1]:
        turns.pop()
    found = check(payload)
    assert (found is not None) == bool(len(turns) % 2)
    assert (found is None) == (by_codec(payload, MAX_MESSAGES) is None)


@given(ANY)
def test_whatever_fields_say_it_is_what_codec_says(fields):
    payload = request(**fields)
    assert (check(payload) is None) == (by_codec(payload) is None or len(fields["messages"]) > MANY_MESSAGES)


@given(st.binary() | st.lists(st.sampled_from([bytes([i]) for i in range(0, 256, 7)])).map(b"".join))
def test_random_bytes_are_never_taken_for_more_than_they_are(payload):
    check(payload)


@given(ANY, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3), st.integers(0, 400))
def test_damaged_requests_are_never_taken_for_more_than_they_are(fields, flips, cut):
    payload = bytearray(request(**fields))
    for at, value in flips:
        payload[at % len(payload)] = value
    check(bytes(payload))
    check(bytes(payload[: cut % (len(payload) + 1)]))


@given(st.permutations(list(range(9))), st.integers(0, 8))
def test_fields_in_any_order_and_a_scalar_twice(order, twice):
    """Two of a scalar are left to protobuf, where the last counts; fields in another order are not."""
    parts = [
        request(request_id=0, messages=[b"a", b"b"]), request(request_id=0, messages=[b"c"]),
        *(request(**{"request_id": 0, "messages": []} | one) for one in (
            {"request_id": 300}, {"encoding": 0, "max_tokens": 7}, {"seed": 1}, {"temperature": 5}, {"stop": [b"x"]},
            {"logprobs": True}, {"system_prompt": b"s"},
        )),
    ]  # fmt: skip
    payload = b"".join(parts[i] for i in order)
    assert check(payload) is not None
    found = check(payload + parts[twice])
    repeated = twice in (0, 6)  # two messages more than three; one stop string more
    assert (found is not None) == repeated


def test_vectors_of_valid_requests_are_taken():
    taken, left = set(), set()
    for name, stream in zip(INDEX, STREAMS[: len(INDEX)], strict=True):
        for payload in payloads(stream):
            found = check(payload)
            if by_codec(payload) is not None:
                (left if found is None else taken).add(name)
    assert left == {
        "padded_varint_length", "scalar_twice_last_wins", "unknown_field_skipped", "wrong_wire_type_for_max_tokens",
    }  # fmt: skip
    assert len(taken) > 10


def test_mutated_streams_give_what_codec_gives_and_the_same_conversation():
    taken = 0
    for stream in mutants(STREAMS, 10_000, 2):
        fast, slow = Session(decode=decode), Session()
        for payload in payloads(stream):
            taken += check(payload) is not None
            if fast.ended:
                break
            actions = fast.receive(payload, True)
            assert actions == slow.receive(payload, True)
            for action in actions:
                if isinstance(action, Submit):
                    fast.finished(action.request.request_id)
                    slow.finished(action.request.request_id)
    assert taken > 200


def test_what_clients_encode_is_taken():
    # fmt: off
    ask = {"request_id": 2**64 - 1, "messages": ["é", "", "x" * 5_000], "system": "€" * 300, "context": "c" * 200,
           "temperature": 100, "top_p": 0, "repetition_penalty": 1.1, "max_tokens": 2**32 - 1, "seed": 0,
           "stop": ["s" * MAX_STOP_BYTES] * MAX_STOPS, "deadline_ms": 1, "ignore_eos": True, "logprobs": True}
    # fmt: on
    assert check(codec.encode_request(**ask)[4:]) is not None
    packed = codec.pack_tokens(range(4_032))
    assert check(codec.encode_request(request_id=1, messages=[packed], encoding=1)[4:]) is not None
    assert check(codec.encode_request(request_id=1, messages=[packed + b"\0"], encoding=1)[4:]) is None
    for other in (Operation.CANCEL, Operation.HELLO):
        assert check(codec.encode_request(request_id=1, messages=["hi"], operation=other)[4:]) is None


ENDS = (b"\x80", b"\xff", b"\xc3", b"\xed\xa0\x80", "\U0010ffff".encode())


def bad_texts() -> Iterator[bytes]:
    for first in range(256):
        yield bytes([first])
        yield from (bytes([first, second]) for second in range(256))
    edges = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF)
    for first in range(0xDF, 0xF6):
        for second, third in itertools.product(range(0x7E, 0xC2), edges):
            yield bytes([first, second, third])
            yield from (bytes([first, second, third, fourth]) for fourth in edges)
    for length, bad in itertools.product(range(1, 120), ENDS):
        yield b"a" * (length - 1) + bad
    for at, bad in itertools.product(range(64), (b"\x80", b"\xe2\x82", "€".encode())):
        yield b"a" * at + bad + b"b" * (64 - at)


def test_utf8_is_what_python_decodes():
    n_good = n_bad = 0
    for text in bad_texts():
        try:
            text.decode()
            good = True
        except UnicodeDecodeError:
            good = False
        n_good, n_bad = n_good + good, n_bad + (not good)
        # The byte behind it, the key of ignore_eos, would complete a character if it were read past its end.
        payload = b"\x12\x01x\x0a" + bytes([len(text)]) + text + b"\x80\x01\x01"
        assert (decode(payload) is not None) == good, text
        if len(text) < 3:
            assert (decode(request(stop=[text])) is not None) == good, text
            assert (decode(request(messages=[b"a" + text])) is not None) == good, text
    assert min(n_good, n_bad) > 5_000


@given(st.text(min_size=1), st.binary(max_size=4), st.integers(0, 200))
def test_utf8_of_longer_texts(text, other, at):
    data = text.encode() * 5
    data = data[: at % len(data)] + other + data[at % len(data) :]
    check(request(context=data))
    assert (decode(request(context=data)) is None) == (by_codec(request(context=data)) is None)


def test_every_limit_is_codecs():
    def agree(**fields) -> bool:
        payload = request(**fields)
        taken = check(payload) is not None
        assert taken == (by_codec(payload) is not None), fields
        return taken

    for name, top in (("temperature", 100_000_000), ("top_p", 1_000_000), ("repetition_penalty", 100_000_000)):
        assert [agree(**{name: value}) for value in (1, top, top + 1, 2**32 - 1)] == [True, True, False, False]
        assert agree(**{name: 0}) == (name != "repetition_penalty")
    assert [agree(messages=[b"x"] * n) for n in range(21)] == [n % 2 == 1 or n > 16 for n in range(21)]
    assert [agree(messages=[b"x"] + [b""] * n) for n in (1, 15, 16, 63)] == [True] * 4
    assert decode(request(messages=[b"x"] + [b""] * 64)) is not None
    assert [agree(stop=[b"x"] * n) for n in range(10)] == [n <= 4 for n in range(10)]
    assert [agree(stop=[b"x" * n]) for n in (0, 1, 64, 65)] == [False, True, True, False]
    assert [agree(type=n) for n in (-1, 0, 2, 3)] == [False, True, True, False]
    assert [agree(encoding=n) for n in (-1, 2, 256, 2**31 - 1)] == [False] * 4


def test_the_sanitized_build_has_these_limits():
    """tests/net/sanitized.cpp writes them out."""
    wanted = ", ".join(str(getattr(limits(), name)) for name, _ in limits()._fields_)
    assert f"limits{{{wanted}}}" in (Path(__file__).parent / "sanitized.cpp").read_text()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))[:]])
def test_any_contiguous_buffer_is_read_in_place_and_let_go(kind):
    payload = kind(request(system_prompt=b"system", stop=[b"end"]))
    found = decode(payload)
    assert found == codec.decode_request(payload)
    if isinstance(payload, memoryview):
        payload.release()  # BufferError: an export is left
    if isinstance(payload, bytearray):
        payload[:] = b"\0" * len(payload)
        payload.append(0)  # BufferError: an export is left
        assert decode(payload) is None
        payload.append(0)
    assert found.system == b"system"
    assert found.stop == [b"end"]


@pytest.mark.parametrize("wrong", [None, 7, "text", memoryview(b"abcd")[::2]])
def test_what_is_no_buffer_raises(wrong):
    with pytest.raises((TypeError, BufferError)):
        decode(wrong)


def test_a_request_is_its_own_to_change_and_to_collect():
    payload = request(messages=[b"a", b"b", b"c"], seed=2**63)
    one, two = decode(payload), decode(payload)
    one.messages.append(b"d")
    one.read_ns = 5
    assert two == codec.decode_request(payload)
    assert gc.is_tracked(one)
    counts = [sys.getrefcount(one), sys.getrefcount(one.messages), sys.getrefcount(two.seed)]
    assert counts == [2, 2, 2]  # the variable, or the slot, and the argument


def test_a_hundred_thousand_requests_leave_nothing():
    good = request(system_prompt=b"s" * 700, messages=[b"m" * 300, b"", b"x" * 300], stop=[b"a", b"bc"], seed=2**60,
                   temperature=1, top_p=999_999, request_id=2**50, max_tokens=12_345, deadline_ms=70_000)  # fmt: skip
    bad = good + b"\x30"
    shared = (good, bad, Request, None, True, False, decode, 0, 1, b"")

    def work(n: int) -> None:
        for _ in range(n):
            decode(good)
            decode(bad)

    work(1_000)
    gc.collect()
    counts = [sys.getrefcount(thing) for thing in shared]
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        work(100)
        before = tracemalloc.get_traced_memory()[0]
        work(100_000)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
    gc.collect()
    assert abs(len(gc.get_objects()) - objects) < 100
    for was, thing in zip(counts, shared, strict=True):
        assert abs(sys.getrefcount(thing) - was) < 100, thing


def test_a_valid_request_is_not_checked_again(monkeypatch):
    monkeypatch.setattr(rules, "check_request", None)
    monkeypatch.setattr(codec, "decode_request", None)
    (action,) = Session(decode=decode).receive(request(), True)
    assert action == Submit(Request(request_id=7, messages=[b"hi"]))


def test_before_hello_a_valid_request_is_refused_all_the_same():
    for session in (Session(b"secret", decode), Session(b"secret")):
        first, _ = session.receive(request(), True)
        assert codec.decode_response(first.data[4:]).error.code.name == "UNAUTHENTICATED"


I32, FLOATS = st.integers(-(2**31), 2**31 - 1), st.floats() | st.floats(width=32)


@given(U64 | st.integers(0, 300), I32, st.binary(max_size=300), st.none() | FLOATS, st.none() | U64)
@example(2**64 - 1, -1, b"t" * 70_000, -0.0, 2**64 - 1)
@example(0, 0, b"", None, 0)
@example(127, 128, b"x" * 127, 1e300, 1)
def test_a_tokens_frame_is_protobufs_to_the_byte(request_id, token_id, text, logprob, seed):
    made = encode_token(request_id, token_id, text, logprob, seed)
    assert made == codec.encode_token(request_id, token_id, text, logprob, seed)
    assert type(made) is bytes


@pytest.mark.parametrize(
    "wrong",
    [
        (-1, 0, b"", None, None), (2**64, 0, b"", None, None), (0, 2**31, b"", None, None),
        (0, -(2**31) - 1, b"", None, None), (0, 2**63, b"", None, None), (0, 0, "text", None, None),
        (0, 0, b"", "1", None), (0, 0, b"", None, -1), (None, 0, b"", None, None), (0, 0, b"", None), (),
    ],
)  # fmt: skip
def test_what_fits_no_frame_raises(wrong):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        encode_token(*wrong)


def test_a_hundred_thousand_frames_leave_nothing():
    arguments = (2**50, 40_000, b"text" * 100, -1.5, 2**60)
    encode_token(*arguments)
    counts = [*map(sys.getrefcount, arguments)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100_000):
            encode_token(*arguments)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
    assert [*map(sys.getrefcount, arguments)] == counts


def test_without_a_compiler_protobuf_serves_and_one_line_says_so(monkeypatch, tmp_path):
    said = []
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert code_if_possible(said.append).decode is not None  # in the cache: no compiler is needed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert code_if_possible(said.append) == (None, codec.encode_token)
    assert len(said) == 1
    assert "g++" in said[0]
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.delenv("CXX")
    assert code_if_possible(said.append) == (None, codec.encode_token)
    assert len(said) == 2


def test_other_interpreters_are_refused(monkeypatch):
    monkeypatch.setattr(library.sys, "abiflags", "t")
    with pytest.raises(DeviceError, match="CPython"):
        open_code()


def test_a_layout_that_it_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr(library, "decode_request", lambda payload: Request())
    with pytest.raises(DeviceError, match="lays out"):
        open_code()
    monkeypatch.setattr(library, "SLOTS", SLOTS[1:])
    with pytest.raises(InvariantError, match="slots"):
        open_code()


def test_the_parser_under_sanitizers_reads_nothing_beside_the_payload(tmp_path):
    command = compiler()
    assert command is not None, "install g++"
    program = tmp_path / "sanitized"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{HERE}"]
    source = Path(__file__).parent / "sanitized.cpp"
    subprocess.run([command, *flags, str(source), "-o", str(program)], check=True, timeout=120)
    cases = [payload for stream in mutants(STREAMS, 10_000, 3) for payload in payloads(stream)]
    cases += [request(system_prompt=text) for text in itertools.islice(bad_texts(), 0, None, 7)]
    cases += [case[:at] for case in (request(system_prompt=b"a" * 70, seed=1, stop=[b"x"]),) for at in range(len(case))]
    done = subprocess.run([program], input=b"".join(map(frame, cases)), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == bytes(decode(case) is not None for case in cases)
    assert 500 < sum(done.stdout) < len(cases) - 500

