"""Send the bytes of files to a server and print its answers as text, JSON lines or raw bytes: what `zl nc` does.

State: of one exchange, what has been sent and which answers are open. Refuses torch, numpy and asyncio.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from zl.address import TlsAddress
from zl.client.channel import Channel, open_channel
from zl.client.endpoints import broke
from zl.client.errors import ConnectionFailed
from zl.client.trust import Trust
from zl.client.wire import MAX_RESPONSE
from zl.errors import Code, ConfigError, Finish, FrameError
from zl.net.codec import decode_request, decode_response
from zl.net.frames import FrameDecoder, Payload, Ping
from zl.net.messages import Operation, Response

REFUSED, BROKEN = 3, 4
_READ_BYTES = 1 << 16


def exchange(address: str, files: Sequence[str], output: str, timeout: float, ca_file: str | None = None) -> int:
    """Send the files' bytes, half-close, print the answers as `output` says; return the exit status of `zl nc`."""
    sources = [_open(path) for path in files]
    try:
        channel = open_channel(address, timeout, Trust(ca_file))
    except ConnectionFailed as error:
        return _fail(str(error))
    sent = Sent()
    try:
        sender = threading.Thread(target=_send, args=(channel, sources, sent), daemon=True)
        sender.start()
        printer = {"text": TextPrinter, "json": JsonPrinter, "raw": RawPrinter}[output]()
        return _receive(channel, sent, printer, timeout)
    finally:
        channel.shut()
        channel.close()


class Sent:
    """What was sent, as far as it can be read: which requests an answer must come for."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder(2**32 - 1)
        self._open = 0  # requests and pings without an answer
        self._changed = threading.Condition()
        self.expected: list[int] = []
        self.error = ""

    def answered(self) -> None:
        """Note that a request has ended, or a ping come back."""
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all is answered; not where the bytes end inside a frame, for nothing will come for that one."""
        if self._decoder.eof() is None:
            with self._changed:
                self._changed.wait_for(lambda: self._open <= 0)

    def feed(self, data: bytes) -> None:
        """Note the requests in the next bytes."""
        with self._changed:
            for event in self._decoder.feed(data):
                if isinstance(event, Ping):
                    self._open += 1
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
                    sent.answered()
                    continue
                response = decode_response(event.data)
                printer.response(response)
                if response.is_finished:
                    ended.append(response.request_id)
                    sent.answered()
                if response.error is not None and response.error.code != Code.OK:
                    status = REFUSED
                    _complain(response)
    except TimeoutError:
        closing = "the server has been silent for too long"
    except FrameError as error:
        closing = f"the server does not speak zl's protocol: {error}"
    except OSError as error:
        closing = broke(error)
    printer.close()
    cut = decoder.eof()
    # After an error of the connection itself (id 0) the server owes no further answers.
    missing = [] if status == REFUSED and 0 in ended else _without(sent.expected, ended)
    if not closing and cut is not None:
        closing = str(cut)
    if not closing and missing:
        closing = f"the server closed the connection before request {missing[0]} was answered"
    if closing:
        return _fail(closing)
    return _fail(sent.error) if sent.error else status


def _next(channel: Channel, timeout: float) -> bytes:
    end = time.monotonic() + timeout
    while (data := channel.receive(max(0.0, end - time.monotonic()))) is None:
        if time.monotonic() >= end:
            raise TimeoutError
    return data


def _without(expected: list[int], ended: list[int]) -> list[int]:
    left = list(expected)
    for each in ended:
        if each in left:
            left.remove(each)
    return left


class Printer:
    """Prints answers to stdout."""

    def raw(self, data: bytes) -> None:
        """Take the bytes as they came."""

    def pong(self) -> None:
        """Take the answer to a ping."""

    def response(self, response: Response) -> None:
        """Take a frame."""

    def close(self) -> None:
        """Take the end."""
        sys.stdout.flush()


class RawPrinter(Printer):
    """Passes the bytes on."""

    def raw(self, data: bytes) -> None:
        """Write the bytes."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


class JsonPrinter(Printer):
    """One object a frame; text that is no UTF-8 cannot come, since answers are whole characters."""

    def pong(self) -> None:
        """Write a ping's object."""
        print(json.dumps({"ping": True}), flush=True)

    def response(self, response: Response) -> None:
        """Write what the frame has."""
        print(json.dumps(as_json(response), ensure_ascii=False), flush=True)


def as_json(response: Response) -> dict[str, object]:
    """Turn a frame into plain values; what it has not is left out."""
    out: dict[str, object] = {"request_id": response.request_id}
    for name in ("token_ids", "logprobs", "seed", "is_finished"):
        if value := getattr(response, name):
            out[name] = value
    if response.text:
        try:
            out["text"] = response.text.decode()
        except UnicodeDecodeError:
            out["text_base64"] = base64.b64encode(response.text).decode()
    if response.finish != Finish.NONE:
        out["finish_reason"] = response.finish.name
    if response.error is not None:
        error = response.error
        out["error"] = {"code": error.code.name, "message": error.message, "retry_after_ms": error.retry_after_ms}
    for name in ("usage", "server"):
        if (part := getattr(response, name)) is not None:
            out[name] = {key: getattr(part, key) for key in part.__slots__}
    return out


class TextPrinter(Printer):
    """The text of one answer after the other, in the order in which they begin; each streams when its turn comes."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[str]] = {}  # by request, in order; the first is the one that streams
        self._done: set[int] = set()
        self._last = "\n"

    def pong(self) -> None:
        """Write `pong`."""
        self._newline()
        self._write("pong\n")

    def response(self, response: Response) -> None:
        """Write the text, or keep it until its answer's turn."""
        text = response.text.decode("utf-8", "replace")
        if response.server is not None:
            text += "".join(f"{key}: {getattr(response.server, key)}\n" for key in response.server.__slots__)
        self._waiting.setdefault(response.request_id, []).append(text)
        if response.is_finished:
            self._done.add(response.request_id)
        while self._waiting:
            current = next(iter(self._waiting))
            self._write("".join(self._waiting[current]))
            self._waiting[current].clear()
            if current not in self._done:
                return
            self._newline()
            del self._waiting[current]
            self._done.discard(current)

    def close(self) -> None:
        """Write what answers that broke off had."""
        for parts in self._waiting.values():
            self._write("".join(parts))
            self._newline()
        super().close()

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text[-1]

    def _newline(self) -> None:
        if self._last != "\n":
            self._write("\n")


def _send(channel: Channel, sources: list[Callable[[], Iterator[bytes]]], sent: Sent) -> None:
    try:
        for source in sources:
            for data in source():
                sent.feed(data)
                channel.send(data)
        if isinstance(channel.address, TlsAddress):
            sent.wait()  # a server cannot keep one direction of TLS open: it would take this for the end of all
        channel.end_sending()
    except OSError as error:
        # The server may have closed on purpose and said why: the reading side judges. Only a source's failure is ours.
        if not isinstance(error, BrokenPipeError | ConnectionResetError | TimeoutError):
            sent.error = str(error)


def _open(path: str) -> Callable[[], Iterator[bytes]]:
    try:
        file: BinaryIO = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115 (closed after its chunks)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error

    def chunks() -> Iterator[bytes]:
        # read1 and not read: what a terminal or a slow pipe has given goes out at once.
        reader = file.read1 if hasattr(file, "read1") else file.read
        while data := reader(_READ_BYTES):
            yield data
        if file is not sys.stdin.buffer:
            file.close()

    return chunks


def _complain(response: Response) -> None:
    assert response.error is not None
    who = f"request {response.request_id}" if response.request_id else "the connection"
    retry = f" (retry after {response.error.retry_after_ms} ms)" if response.error.retry_after_ms else ""
    print(f"zl: {who}: {response.error.code.name}: {response.error.message}{retry}", file=sys.stderr)


def _fail(text: str) -> int:
    print(f"zl: {text}", file=sys.stderr)
    return BROKEN
