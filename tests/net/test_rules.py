"""zl/net/rules.py: each rule has its limit, and names its field where it refuses."""

from __future__ import annotations

import pytest

from zl.errors import Code, RequestError
from zl.net import codec, rules
from zl.net.codec import Request


def ask(**fields) -> Request:
    return Request(**{"request_id": 7, "messages": [b"hi"], **fields})


def refusal(request: Request) -> RequestError:
    with pytest.raises(RequestError) as caught:
        rules.check_request(request)
    assert caught.value.request_id == request.request_id
    assert caught.value.field
    assert caught.value.message.startswith(caught.value.field + ": ")
    return caught.value


def test_a_plain_request_passes():
    rules.check_request(ask(system=b"be brief", stop=[b"\n"], temperature=0.0, top_p=0.0, repetition_penalty=1.1))


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"messages": []}, Code.BAD_REQUEST, "messages: "),
        ({"messages": [b"a", b"b"]}, Code.BAD_REQUEST, "messages: turn 1"),
        ({"messages": [b"a"] * 17}, Code.LIMIT_EXCEEDED, "messages: 17 turns, the limit is 16"),
        ({"messages": [b"a", b"b", b"hello\xff"]}, Code.BAD_REQUEST, "messages[2]: invalid UTF-8 at byte 5"),
        ({"system": b"\xc3"}, Code.BAD_REQUEST, "system_prompt: invalid UTF-8 at byte 0"),
        ({"context": b"a\xed\xa0\x80"}, Code.BAD_REQUEST, "context: invalid UTF-8 at byte 1"),
        ({"stop": [b"a"] * 5}, Code.LIMIT_EXCEEDED, "stop: 5"),
        ({"stop": [b"ok", b"a" * 65]}, Code.LIMIT_EXCEEDED, "stop[1]: 65 bytes, the limit is 64"),
        ({"stop": [b""]}, Code.BAD_REQUEST, "stop[0]: "),
        ({"stop": [b"\xff"]}, Code.BAD_REQUEST, "stop[0]: invalid UTF-8"),
        ({"type": 99}, Code.BAD_REQUEST, "type: unknown value 99"),
        ({"type": -1}, Code.BAD_REQUEST, "type: unknown value -1"),
        ({"encoding": 2}, Code.BAD_REQUEST, "encoding: unknown value 2"),
        ({"operation": 3}, Code.BAD_REQUEST, "operation: unknown value 3"),
        ({"temperature": 100.5}, Code.BAD_REQUEST, "temperature: 100.5 is outside the allowed range, 0 to 100"),
        ({"top_p": 1.5}, Code.BAD_REQUEST, "top_p: 1.5"),
        ({"repetition_penalty": 0.0}, Code.BAD_REQUEST, "repetition_penalty: 0"),
        ({"repetition_penalty": 101.0}, Code.BAD_REQUEST, "repetition_penalty: 101"),
        ({"encoding": 1, "messages": [b"12345"]}, Code.BAD_REQUEST, "messages[0]: 5 bytes"),
        ({"encoding": 1, "messages": [b"1234"], "system": b"123"}, Code.BAD_REQUEST, "system_prompt: 3 bytes"),
    ],
)
def test_each_rule_names_its_field(fields, code, text):
    error = refusal(ask(**fields))
    assert error.code is code
    assert error.message.startswith(text)


def test_the_limits_themselves_pass():
    rules.check_request(ask(messages=[b"a"] * 15, stop=[b"s" * 64] * 4, temperature=100.0, top_p=1.0))


def test_token_ids_are_held_to_the_vocabulary():
    good = ask(encoding=1, messages=[codec.pack_tokens([0, 99])], context=codec.pack_tokens([5]))
    rules.check_tokens(good, 100)
    rules.check_tokens(ask(messages=["text é".encode()]), 1)
    for packed, index, token in ((codec.pack_tokens([1, 100]), 1, 100), (codec.pack_tokens([-3]), 0, -3)):
        with pytest.raises(RequestError) as caught:
            rules.check_tokens(ask(encoding=1, messages=[packed]), 100)
        assert caught.value.message == (
            f"messages[0]: token {token} at index {index} is outside the vocabulary, 0 to 99"
        )
