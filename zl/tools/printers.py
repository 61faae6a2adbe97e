"""How `zl nc` prints the frames of a server: as text, as JSON lines, or as the bytes that came.

State: of a TextPrinter, the answers whose turn has not come. Refuses torch, numpy, asyncio and sockets.
"""

from __future__ import annotations

import base64
import json
import sys

from zl.errors import Finish
from zl.net.messages import Response


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
