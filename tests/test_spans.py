"""zl/spans: an answer's text and its tokens' places in it against an independent reading; searches that go wrong."""

from __future__ import annotations

import codecs
import os
import re
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zl.spans import Finder, answer_of
from zl.text.detok import TokenTable

STOPS = (b"END", "→".encode())
PIECES = [b"a", b" b", b"12", b"3.", b"", "é".encode(), "€ 5".encode(), b"\xe2", b"\x82\xac", b"\xf0\x9f", b"\xa6\x8a",
          b"\xff", b"\xc3", b"E", b"ND", b"\xe2\x86", b"\x92!", b"<control>"]  # fmt: skip
CONTROL = frozenset({4, 17})


def table(first: dict[int, bytes] | None = None) -> TokenTable:
    pieces = [b"" if index in CONTROL else piece for index, piece in enumerate(PIECES)]
    return TokenTable.of(pieces, first or {}, CONTROL)


def read(raw: bytes) -> tuple[str, list[tuple[int, int]]]:
    """Decode with "replace" and tell each character's bytes: the oracle, by Python's own error handler."""
    holes: list[tuple[int, int]] = []

    def note(error: UnicodeError):
        holes.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("zl-test-note", note)
    text, places, at = raw.decode("utf-8", "zl-test-note"), [], 0
    gaps = iter(holes)
    gap = next(gaps, None)
    for char in text:
        if gap is not None and at == gap[0]:
            places.append(gap)
            at, gap = gap[1], next(gaps, None)
        else:
            places.append((at, at + len(char.encode())))
            at = places[-1][1]
    assert at == len(raw)
    return text, places


@settings(deadline=None, max_examples=400)
@given(
    tokens=st.lists(st.integers(0, len(PIECES) + 1), max_size=30),
    stops=st.sampled_from([(), STOPS]),
    blank=st.booleans(),
)
def test_tokens_of_a_span_are_those_that_share_a_byte_with_it(tokens, stops, blank):
    words = table({1: b"b"} if blank else None)
    answer = answer_of(words, tokens, stops)
    if not stops:
        assert answer.text == words.text_of(tokens).decode()
    pieces = [words.pieces[t] if t < len(PIECES) else b"" for t in tokens]
    spoken = next((i for i, t in enumerate(tokens) if t < len(PIECES) and t not in CONTROL), None)
    if blank and spoken is not None and tokens[spoken] == 1:
        pieces[spoken] = b"b"
    whole, places = read(b"".join(pieces))
    assert whole.startswith(answer.text)
    assert not stops or not any(stop.decode() in answer.text for stop in stops)
    edges = [0]
    for piece in pieces:
        edges.append(edges[-1] + len(piece))
    for start in range(len(answer.text)):
        for end in range(start + 1, len(answer.text) + 1):
            low, high = places[start][0], places[end - 1][1]
            overlapping = [i for i in range(len(tokens)) if edges[i] < high and edges[i + 1] > low and pieces[i]]
            first, last = answer.tokens_of(start, end)
            assert [i for i in range(first, last) if pieces[i]] == overlapping
            assert (first, last - 1) == (overlapping[0], overlapping[-1])


def test_many_broken_bytes_are_mapped_in_reasonable_time():
    words = table()
    answer = answer_of(words, [11, 7] * 20_000)
    assert answer.text == "\ufffd" * 40_000
    assert answer.tokens_of(39_999, 40_000) == (39_999, 40_000)


@pytest.fixture
def finder():
    made = []

    def make(patterns, **options) -> Finder:
        made.append(Finder(patterns, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_is_found_is_what_re_finds(finder):
    patterns = [("number", r"\d+"), ("word", r"\b\w+\b"), ("nothing", r"x*"), ("line", r"(?m)^.*$")]
    texts = ["", "a 12\n€ 345 é", "xx 1", "9" * 100_000]
    search = finder(patterns)
    for text in texts:
        wanted = [[m.span() for m in re.finditer(p, text) if m.group()] for _, p in patterns]
        assert search.find(text) == wanted


def test_a_search_without_end_stops_nobody_and_is_told_apart(finder):
    search = finder([("before", "b"), ("evil", "(a+)+$"), ("after", "c")], timeout_s=0.3)
    ticks, done = [0], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    found = search.find("b" + "a" * 60 + "c")
    done.set()
    thread.join()
    assert found == [[(0, 1)], None, [(61, 62)]]
    assert ticks[0] > 20  # with `re` in this process it would be none: a search keeps the interpreter's lock
    assert search.find("bc") == [[(0, 1)], [], [(1, 2)]]


def test_a_process_that_was_killed_is_replaced_without_a_loss(finder):
    search = finder([("b", "b")])
    assert search.find("b") == [[(0, 1)]]
    search._process.kill()
    search._process.wait()
    assert search.find("ab") == [[(1, 2)]]


def test_the_servers_signals_do_not_end_it_and_closing_does(finder):
    search = finder([("b", "b")])
    search.find("b")
    process = search._process
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.05)
    assert search.find("b") == [[(0, 1)]]
    assert search._process is process
    assert os.getpgid(process.pid) != os.getpgid(0)
    search.close()
    assert process.returncode is not None


def test_one_that_cannot_start_says_so(finder, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(OSError, match="did not start"):
        finder([("b", "b")]).find("b")
