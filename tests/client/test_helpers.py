"""zl/client/helpers.py, and the refusal of what holds no text; where it matters, what the server then gets."""

from __future__ import annotations

import pytest

from tests.fake_server import FakeServer
from zl.client import BadRequest, Client, UnsupportedContent
from zl.client.helpers import MARKER, dedupe, from_chat, retrieval_segment, truncate, truncate_turns
from zl.text import prompt


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        (["a"], ["a"]),
        (["a", "a"], ["a"]),
        (["a", "a ", " a\n"], ["a"]),
        (["a", "", "a"], ["a"]),
        (["a", "answer", "a"], ["a", "answer", "a"]),  # asked again on purpose
        (["a", "answer", "b", "b"], ["a", "answer", "b"]),
        (["a", "answer", "b", " ", "b"], ["a", "answer", "b"]),
        ([], []),
    ],
)
def test_dedupe_drops_a_question_that_repeats_itself(turns, kept):
    assert dedupe(turns) == kept


def test_the_server_gets_the_question_once():
    with FakeServer() as server, Client(server.address, timeout=10) as client:
        client.ask(dedupe(["say a", "a", "say b", "", "say b"]))
        assert server.requests[0].messages == [b"say a", b"a", b"say b"]


def test_truncate_cuts_between_characters_and_marks_the_cut():
    assert MARKER == prompt.MARKER
    assert truncate("short", 5) == "short"
    assert truncate("é" * 20, 24) == "é" * 6 + MARKER
    assert len(truncate("é" * 20, 24).encode()) == 23
    assert truncate("x" * 12, 11) == MARKER
    with pytest.raises(ValueError, match="at least 11"):
        truncate("x" * 12, 10)
    assert truncate_turns(["x" * 30, "ok"], 12) == ["x" + MARKER, "ok"]


def test_a_retrieval_segment_has_one_length_whatever_was_found():
    found = [[], ["one"], ["one", " ", "two"], ["é" * 500], ["x" * 89, "y"]]
    segments = [retrieval_segment(passages, 100) for passages in found]
    assert {len(segment.encode()) for segment in segments} == {100}
    assert segments[2].rstrip() == "one\n\ntwo"
    assert segments[3].rstrip().endswith(MARKER)


def test_a_chat_of_objects_becomes_system_prompt_and_turns():
    chat = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    assert from_chat(chat) == ("be kind", ["one two", "three", "four"])
    with pytest.raises(BadRequest, match="message 1 has role 'user'"):
        from_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(BadRequest, match="message 0 has no text"):
        from_chat([{"role": "user", "content": None}])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,xyz"}}


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (IMAGE, "image_url"),
        ([{"type": "text", "text": "look"}, IMAGE], "image_url"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input_audio"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"\xff\xd8\xff\xe0", "a JPEG image"),
        (b"%PDF-1.7", "a PDF file"),
    ],
)
def test_what_is_no_text_is_refused_before_it_is_sent(turn, words):
    with FakeServer() as server, Client(server.address, timeout=10) as client:
        with pytest.raises(UnsupportedContent, match=words) as refused:
            client.ask(["say a", "a", turn])
        assert "messages[2]" in str(refused.value)
        assert "text models only" in str(refused.value)
        with pytest.raises(UnsupportedContent, match="context"):
            client.ask("say a", context=b"\x89PNG")
        assert client.ask("say a").text == "a "
        assert len(server.requests) == 1
    if not isinstance(turn, bytes):
        content = turn["content"] if "content" in turn else turn if isinstance(turn, list) else [turn]
        with pytest.raises(UnsupportedContent, match="message 0"):
            from_chat([{"role": "user", "content": content}])


def test_a_chat_object_as_a_turn_gets_told_of_the_helper():
    with FakeServer() as server, Client(server.address) as client, pytest.raises(BadRequest, match="from_chat"):
        client.ask([{"role": "user", "content": "hi"}])
