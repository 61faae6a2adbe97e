"""Send the bytes of files to a server and print its answers as text, JSON lines or raw bytes: what `zl nc` does.

State: of one exchange, what has been sent and which answers are open. Refuses torch, numpy and asyncio.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import BinaryIO

from zl.address import TlsAddress
from zl.client.channel import Channel, open_channel
from zl.client.endpoints import broke
from zl.client.errors import ConnectionFailed
from zl.client.trust import Trust
from zl.client.wire import MAX_RESPONSE
from zl.errors import Code, ConfigError, FrameError
from zl.net.codec import decode_request, decode_response
from zl.net.frames import FrameDecoder, Payload, Ping
from zl.net.messages import Operation, Response
from zl.streams import standard_input
from zl.tools.printers import JsonPrinter, Printer, RawPrinter, TextPrinter

REFUSED, BROKEN = 3, 4
_READ_BYTES = 1 << 16
_LEAVING_S = 1.0
"""How long the sending thread may take to see that it is over."""


def exchange(address: str, files: Sequence[str], output: str, timeout: float, ca_file: str | None = None) -> int:
    """Send the files' bytes, half-close, print the answers as `output` says; return the exit status of `zl nc`."""
    with ExitStack() as opened:
        sources = [_open(path, opened) for path in files]
        try:
            channel = open_channel(address, timeout, Trust(ca_file))
        except ConnectionFailed as error:
            return _fail(str(error))
        opened.callback(channel.close)
        sent = Sent()
        # A daemon: another process may read from a terminal what poll has seen, and then a read would wait after all.
        sender = threading.Thread(target=_send, args=(channel, sources, sent), daemon=True)
        sender.start()
        try:
            printer = {"text": TextPrinter, "json": JsonPrinter, "raw": RawPrinter}[output]()
            return _receive(channel, sent, printer, timeout)
        finally:
            sent.give_up()
            channel.shut()
            sender.join(_LEAVING_S)
            if not sender.is_alive():
                sent.close()


class Sent:
    """What was sent, as far as it can be read: which requests an answer must come for; and whether to send no more."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder(2**32 - 1)
        self._over, self._giving_up = os.pipe()  # readable once it is over
        self._given_up = False
        self._open = 0  # requests and pings without an answer
        self._changed = threading.Condition()
        self.expected: list[int] = []
        self.n_pings = 0  # without a pong
        self.error = ""

    def ponged(self) -> None:
        """Note that a ping has come back."""
        with self._changed:
            self.n_pings -= 1
        self.answered()

    def answered(self) -> None:
        """Note that a request has ended."""
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def give_up(self) -> None:
        """Send no more: nobody answers any longer. Wakes who waits for input or for answers."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        os.write(self._giving_up, b"x")

    def close(self) -> None:
        """Give the pipe up; who sends has ended."""
        os.close(self._over)
        os.close(self._giving_up)

    def has_input(self, source: BinaryIO) -> bool:
        """Wait until a source has bytes, or its end; False: it is over."""
        poll = select.poll()
        poll.register(self._over, select.POLLIN)
        poll.register(source, select.POLLIN)
        return all(fd != self._over for fd, _ in poll.poll())

    def wait(self) -> None:
        """Wait until all is answered; not where the bytes end inside a frame, for nothing will come for that one."""
        if self._decoder.eof() is None:
            with self._changed:
                self._changed.wait_for(lambda: self._given_up or self._open <= 0)

    def feed(self, data: bytes) -> None:
        """Note the requests in the next bytes."""
        with self._changed:
            for event in self._decoder.feed(data):
                if isinstance(event, Ping):
                    self._open += 1
                    self.n_pings += 1
                elif isinstance(event, Payload):
                    try:
                        request = decode_request(event.data)
                    except FrameError:
                        continue  # the server will say so
                    if request.operation != Operation.CANCEL:
                        self._open += 1
                        self.expected.append(request.request_id)


def _receive(channel: Channel, sent: Sent, printer: Printer, timeout: float) -> int:
    decoder = FrameDecoder(MAX_RESPONSE)
    status, closing = 0, ""
    ended: list[int] = []
    try:
        while data := _next(channel, timeout):
            printer.raw(data)
            for event in decoder.feed(data):
                if isinstance(event, FrameError):
                    return _fail(f"the server does not speak zl's protocol: {event}")
                if isinstance(event, Ping):
                    printer.pong()
                    sent.ponged()
                    continue
                response = decode_response(event.data)
                printer.response(response)
                if response.is_finished:
                    ended.append(response.request_id)
                    sent.answered()
                if response.error is not None and response.error.code != Code.OK:
                    status = REFUSED
                    _complain(response)
    except FrameError as error:
        closing = f"the server does not speak zl's protocol: {error}"
    except _GoneError as error:
        closing = str(error)
    printer.close()
    cut = decoder.eof()
    # After an error of the connection itself (id 0) the server owes no further answers.
    owed = not (status == REFUSED and 0 in ended)
    missing = _without(sent.expected, ended) if owed else []
    if not closing and cut is not None:
        closing = str(cut)
    if not closing and missing:
        closing = f"the server closed the connection before request {missing[0]} was answered"
    if not closing and owed and sent.n_pings > 0:
        closing = ("the server closed the connection instead of answering a ping: it drains, its engine stands still, "
                   "or it is not zl's port")  # fmt: skip
    if closing:
        return _fail(closing)
    return _fail(sent.error) if sent.error else status


class _GoneError(Exception):
    """Nothing more comes from the server; the text says why. No OSError, which standard output could raise as well."""


def _next(channel: Channel, timeout: float) -> bytes:
    try:
        return _received(channel, timeout)
    except TimeoutError:
        raise _GoneError("the server has been silent for too long") from None
    except OSError as error:
        raise _GoneError(broke(error)) from error


def _received(channel: Channel, timeout: float) -> bytes:
    end = time.monotonic() + timeout
    try:
        while (data := channel.receive(max(0.0, end - time.monotonic()))) is None:
            if time.monotonic() >= end:
                raise TimeoutError
    except ConnectionError:
        channel.ask_for_tls(end - time.monotonic())
        raise
    if not data:
        channel.ask_for_tls(end - time.monotonic())
    return data


def _without(expected: list[int], ended: list[int]) -> list[int]:
    left = list(expected)
    for each in ended:
        if each in left:
            left.remove(each)
    return left


def _send(channel: Channel, sources: list[BinaryIO], sent: Sent) -> None:
    try:
        for source in sources:
            for data in _chunks(source, sent):
                sent.feed(data)
                channel.send(data)
        if isinstance(channel.address, TlsAddress):
            sent.wait()  # a server cannot keep one direction of TLS open: it would take this for the end of all
        channel.end_sending()
    except OSError as error:
        # The server may have closed on purpose and said why: the reading side judges. Only a source's failure is ours.
        if not isinstance(error, BrokenPipeError | ConnectionResetError | TimeoutError):
            sent.error = str(error)


def _open(path: str, opened: ExitStack) -> BinaryIO:
    if path == "-":
        return standard_input().buffer
    try:
        return opened.enter_context(open(path, "rb"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def _chunks(source: BinaryIO, sent: Sent) -> Iterator[bytes]:
    # What a terminal or a slow pipe has given goes out at once. Not through Python's buffer: the interpreter aborts at
    # its end if a thread waits for input with the lock of stdin's.
    while sent.has_input(source) and (data := os.read(source.fileno(), _READ_BYTES)):
        yield data


def _complain(response: Response) -> None:
    assert response.error is not None
    who = f"request {response.request_id}" if response.request_id else "the connection"
    retry = f" (retry after {response.error.retry_after_ms} ms)" if response.error.retry_after_ms else ""
    print(f"zl: {who}: {response.error.code.name}: {response.error.message}{retry}", file=sys.stderr)


def _fail(text: str) -> int:
    print(f"zl: {text}", file=sys.stderr)
    return BROKEN
