"""zl/tools/dissector.py against the protobuf library and the server's own conversation rules, on whole and on damaged
streams: they agree on what is wrong, and every byte is explained once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from tests.tools.mutants import mutants
from zl.errors import Code, Finish, PeerError
from zl.net import codec, rules, schema_pb2
from zl.net.frames import FrameDecoder, Payload
from zl.net.messages import ServerInfo, Usage
from zl.net.session import Send, Session, Submit
from zl.policy import Policy
from zl.shapes import Shapes
from zl.tools.dissector import Dissection, Problem, dissect

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text())
VOCAB = 49_152


def vector(name: str) -> bytes:
    return (VECTORS / f"{name}.bin").read_bytes()


REQUESTS = [vector(name) for name in INDEX]
USAGE = Usage(prompt_tokens=7, completion_tokens=300, truncated=True, queue_us=10, glue_us=9)
ANSWERS = [
    codec.encode_tokens(7, [1, 40_000, 3], "é€".encode(), [-0.5, -1.25, -3.0], 42),
    codec.encode_last(7, [5], b"end", None, Finish.STOP, USAGE),
    codec.encode_error(PeerError(Code.OVERLOADED, "no place is left", retry_after_ms=250), 8),
    codec.encode_server_info(1, codec.pack_server_info(ServerInfo("1", "m", "ab", 9, 8, 7, 6, 5, 4, "cpu", "id"))),
    bytes(4),
]
ANSWERS.append(b"".join(ANSWERS))


POLICY = Policy(Shapes())


def server_verdict(data: bytes) -> tuple[int, Code] | None:
    """The frame that the server finds wrong first, and its code; None where it takes the whole stream."""
    session, decoder, n = Session(), FrameDecoder(), 0
    for event in decoder.feed(data):
        n += 1
        if isinstance(event, PeerError):
            return n, event.code
        if not isinstance(event, Payload):
            session.ping(True)
            continue
        for action in session.receive(event.data, True):
            if isinstance(action, Send):
                return n, action.code
            if isinstance(action, Submit):
                try:
                    POLICY.rule(action.request)
                    rules.check_tokens(action.request, VOCAB)
                except PeerError as error:
                    return n, error.code
                session.finished(action.request.request_id)
    error = decoder.eof()
    return None if error is None else (n + 1, error.code)


def client_verdict(data: bytes) -> tuple[int, Code] | None:
    """The same for a client that reads answers."""
    decoder, n = FrameDecoder(16 * 2**20), 0
    for event in decoder.feed(data):
        n += 1
        try:
            if isinstance(event, PeerError):
                raise event
            if isinstance(event, Payload):
                codec.decode_response(event.data)
        except PeerError as error:
            return n, error.code
    error = decoder.eof()
    return None if error is None else (n + 1, error.code)


def first(found: Dissection) -> tuple[int, Code] | None:
    return (found.problems[0].frame, found.problems[0].code) if found.problems else None


def check_whole(data: bytes, found: Dissection) -> None:
    """Every byte is in exactly one line, in order; the verdict is beside the byte that it names."""
    at = 0
    for line in found.lines:
        assert line.offset == at
        at += line.size
    assert at == len(data)
    offsets = {line.offset for line in found.lines if line.problem}
    for problem in found.problems:
        assert 0 <= problem.offset <= len(data)
        assert "library refuses" not in problem.text
        assert problem.offset in offsets or problem.code != Code.BAD_FRAME
    assert bool(found.problems) == bool(offsets)


def check_offset(data: bytes, found: Dissection, rng: random.Random) -> None:
    """The library takes the fields before the wrong one, and refuses the payload whatever follows the wrong bytes."""
    problem = found.problems[0]
    kind = schema_pb2.Request if found.side == "client" else schema_pb2.Response
    header = next((line for line in found.lines if line.name == f"frame {problem.frame}"), None)
    if problem.code != Code.BAD_FRAME or header is None or problem.offset == len(data):
        return
    start = header.offset + 4
    payload = data[start : start + int.from_bytes(data[header.offset : start], "big")]
    before = [line for line in found.lines if start <= line.offset <= problem.offset and line.depth == 1]
    # The field that the wrong byte is in, or would be in, begins at the last line of depth 1 that is no whole field.
    cut = before[-2:-1] if before[-1].name == "wrong" and before[-2:-1] and before[-2].name == "begun" else before[-1:]
    kind.FromString(payload[: cut[0].offset - start])
    kept = problem.offset - start + 11
    for _ in range(3):
        with pytest.raises(DecodeError):
            kind.FromString(payload[:kept] + rng.randbytes(max(0, len(payload) - kept)))


@pytest.mark.parametrize("name", INDEX)
def test_the_verdict_on_each_vector_is_the_servers(name):
    data = vector(name)
    found = dissect(data, vocab_size=VOCAB)
    assert found.side == "client" or found.problems
    found = dissect(data, "client", vocab_size=VOCAB)
    check_whole(data, found)
    assert first(found) == server_verdict(data)
    expected = INDEX[name]
    if "error" in expected:
        assert found.problems[0].code.name == expected["error"]
    elif expected.get("outcome") != "ok_or_error":
        assert found.wrong_at is None


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("http_client", 0),
        ("length_4gib", 0),
        ("truncated_payload_field", 5),  # the length that goes past the payload
        ("varint_eleven_bytes", 5),  # the value
        ("group_wire_type", 5),  # where the group's end should be
        ("field_zero", 4),
        ("no_messages", len(vector("no_messages"))),  # something is missing, so the end
        ("temperature_all_ones", vector("temperature_all_ones").index(b"\xff\xff\xff\xff")),
    ],
)
def test_the_verdict_names_the_wrong_byte(name, offset):
    assert dissect(vector(name), "client").wrong_at == offset


def test_text_problems_point_into_the_text():
    data = codec.encode_request(request_id=1, messages=[b"fine", b"", b"abc\xffdef"])
    assert dissect(data, "client").wrong_at == data.index(b"\xff")
    data = codec.encode_request(request_id=1, messages=[codec.pack_tokens([5, 6, 70_000])], encoding=1)
    assert dissect(data, "client").wrong_at is None
    assert dissect(data, "client", vocab_size=VOCAB).wrong_at == data.index(codec.pack_tokens([70_000]))


def check_mutants(count: int, seed: int) -> None:
    rng, wrong, fine, refused = random.Random(seed), 0, 0, 0
    for side, streams, judge in (("client", REQUESTS, server_verdict), ("server", ANSWERS, client_verdict)):
        for data in mutants(streams, count // 2, seed):
            found = dissect(data, side, vocab_size=VOCAB)
            try:
                check_whole(data, found)
                assert first(found) == judge(data)
                if found.problems:
                    check_offset(data, found, rng)
            except (AssertionError, DecodeError) as error:
                raise AssertionError(f"{side} {data.hex()}: {error}") from error
            fine += not found.problems
            wrong += bool(found.problems)
            refused += any(problem.code != Code.BAD_FRAME for problem in found.problems)
            guessed = dissect(data)
            check_whole(data, guessed)
    # The mutations reach all three kinds of outcome.
    assert min(fine, wrong, refused) > count // 50


def test_agrees_with_the_library_and_the_server_on_mutated_streams():
    check_mutants(1_500, 1)


@pytest.mark.slow
def test_agrees_on_ten_thousand_mutated_streams():
    check_mutants(10_000, 2)


def test_both_directions_are_recognised_and_read_with_field_names():
    found = dissect(ANSWERS[-1])
    assert found.side == "server"
    assert found.wrong_at is None
    shown = {line.name: line.value for line in found.lines}
    assert shown["token_ids"] == "[5]"
    assert shown["text"] == "3 bytes: 'end'"
    assert shown["code"] == "5 OVERLOADED"
    assert shown["completion_tokens"] == "300"
    assert shown["frame 5"] == "ping"
    assert dissect(REQUESTS[3]).side == "client"


def test_unknown_fields_and_nested_groups_are_stepped_over():
    inner = b"\x13" * 100 + b"\x14" * 100
    data = len(inner).to_bytes(4, "big") + inner
    assert dissect(data, "server").wrong_at is None
    inside = b"\x3a\xc6\x01" + b"\x13" * 99 + b"\x14" * 99  # one less fits into a message inside the message
    assert dissect(len(inside).to_bytes(4, "big") + inside, "server").wrong_at is None
    schema_pb2.Response.FromString(inside)
    inner = b"\x13" * 5_000
    data = len(inner).to_bytes(4, "big") + inner
    assert dissect(data, "server").wrong_at == 4 + 100
    with pytest.raises(DecodeError):
        schema_pb2.Response.FromString(inner[:101] + b"\x14" * 101)


def test_nothing_is_fine():
    assert dissect(b"") == Dissection("client", [], [], 0, 0)
    assert dissect(b"\0\0\0").problems == [
        Problem(3, "the data ends here, 1 bytes before the end of the frame's length", Code.BAD_FRAME, 1)
    ]
