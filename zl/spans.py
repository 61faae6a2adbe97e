"""Spans: where patterns match in an answer's text, and which of its tokens that is.

State: `Finder` owns a process that searches (`zl.span_search` says why), started at need and replaced when a pattern
takes too long. Refuses torch, numpy, asyncio and net.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from zl import span_search
from zl.text.detok import TextStream, TokenTable

START_S = 10.0
"""How long the process may take to come up; a busy machine needs more than the usual 20 ms."""


class Answer(NamedTuple):
    """An answer's text and where its tokens are in it.

    text     what the client was sent, joined
    starts   of each character of `text` the first byte, and one more: the end of the last; bytes as the tokens spell it
    ends     of each token, the byte after its last
    """

    text: str
    starts: Sequence[int]
    ends: list[int]

    def tokens_of(self, start: int, end: int) -> tuple[int, int]:
        """Return (first, end) of the tokens that have a byte in common with the characters from `start` to `end`."""
        first_byte, last_byte = self.starts[start], self.starts[end] - 1
        first = bisect_right(self.ends, first_byte)
        return first, bisect_left(self.ends, last_byte + 1) + 1


class Finder:
    """Search texts for named patterns; for one thread.

    patterns   (name, regular expression)
    timeout_s  for one pattern in one text
    """

    def __init__(self, patterns: Sequence[tuple[str, str]], timeout_s: float = 1.0):
        self.names = [name for name, _ in patterns]
        self._patterns = patterns
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._rest = b""

    def find(self, text: str) -> list[list[tuple[int, int]] | None]:
        """Return for each pattern its spans in characters, in order and not overlapping; None: it took too long.

        Raises  OSError: the process cannot be started
        """
        found: list[list[tuple[int, int]] | None] = []
        if not text:
            return [[] for _ in self.names]
        while len(found) < len(self.names):
            fresh = self._sock is None
            if fresh:
                self._start()
            try:
                self._send({"text": text, "first": len(found)})
                while len(found) < len(self.names):
                    found.append([(start, end) for start, end in self._receive(self._timeout_s)])
            except (OSError, ValueError) as error:
                self.close()
                # One that had gone since the last text, whatever took it, is no fault of this pattern.
                if fresh or isinstance(error, TimeoutError):
                    found.append(None)
        return found

    def close(self) -> None:
        """End the process."""
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._sock = self._process = None
        self._rest = b""

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(span_search.__file__))],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
            )  # fmt: skip
        self._sock = ours
        try:
            self._send(self._patterns)
            self._send({"text": "", "first": 0})  # a text of nothing is searched in no time: it is up
            for _ in self.names:
                self._receive(START_S)
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"the process that searches for audit patterns did not start: {error}") from error

    def _send(self, message: object) -> None:
        assert self._sock is not None
        self._sock.settimeout(START_S)
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, timeout_s: float) -> list[tuple[int, int]]:
        assert self._sock is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionError("it has ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        spans: list[tuple[int, int]] = json.loads(line)
        return spans


def answer_of(table: TokenTable, tokens: Sequence[int], stops: Sequence[bytes] = ()) -> Answer:
    """Put an answer's text together as its client has seen it, and note where each token is."""
    stream = TextStream(table, stops)
    text = b"".join([*map(stream.push, tokens), stream.finish()]).decode()
    pieces = list(_pieces(table, tokens))
    ends, end = [], 0
    for piece in pieces:
        end += len(piece)
        ends.append(end)
    return Answer(text, _char_starts(b"".join(pieces)), ends)


def _pieces(table: TokenTable, tokens: Iterable[int]) -> Iterable[bytes]:
    """Spell the tokens as `text.detok.TextStream` does: the first that is no control token may lose a blank."""
    first = bool(table.first)
    for token in tokens:
        piece = table.pieces[token] if token < len(table.pieces) else b""
        if first and token not in table.control_ids and token < len(table.pieces):
            first = False
            piece = table.first.get(token, piece)
        yield piece


def _char_starts(raw: bytes) -> Sequence[int]:
    """Return the first byte of each character that `raw` decodes to with "replace", and the end of the last."""
    if raw.isascii():
        return range(len(raw) + 1)
    starts: list[int] = []
    view, at = memoryview(raw), 0
    while at < len(raw):
        try:
            str(view[at:], "utf-8")
            good, bad = len(raw) - at, 0
        except UnicodeDecodeError as error:
            good, bad = error.start, error.end - error.start
        starts += [n for n in range(at, at + good) if raw[n] & 0xC0 != 0x80]
        if bad:
            starts.append(at + good)  # one U+FFFD for all of them
        at += good + bad
    return [*starts, len(raw)]
