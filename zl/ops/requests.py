"""The request log: one line for each request's end, with its ids and numbers; its text only where that was asked for.

State: how much to say. Called on the event-loop thread, once or twice a request, never a token. Refuses torch, asyncio
and gpu.
"""

from __future__ import annotations

import logging
from typing import Any

from zl.errors import Finish, PeerError, RequestError
from zl.net.messages import Encoding, Request, Usage
from zl.ops.logs import event
from zl.rows import Job

log = logging.getLogger("zl.requests")

MODES = ("off", "on", "text")
"""off: nothing; on: ids and numbers; text: also what the peer wrote."""


class RequestLog:
    """Say how requests begin and end. `mode` is one of MODES and may change at any time."""

    def __init__(self, mode: str = "off"):
        self.mode = mode

    def began(self, conn: Any, request: Request) -> None:
        """Note an admitted request, where its text is wanted."""
        if self.mode == "text":
            event(log, logging.INFO, "request text", conn=conn.number, request_id=request.request_id, **_text(request))

    def refused(self, conn: Any, request: Request, refusal: RequestError) -> None:
        """Note a request that was turned away."""
        if self.mode == "off":
            return
        event(log, logging.INFO, "request refused", conn=conn.number, request_id=request.request_id,
              code=refusal.code.name, field=refusal.field or None,
              retry_after_ms=refusal.retry_after_ms or None)  # fmt: skip

    def ended(self, job: Job, finish: Finish, usage: Usage, error: PeerError | None) -> None:
        """Note the last frame of a request. The server's own failures count as warnings."""
        if self.mode == "off":
            return
        level = logging.INFO if error is None else logging.WARNING
        event(log, level, "request", conn=job.conn.number, request_id=job.request_id, finish=finish.name,
              code=error.code.name if error is not None else None, prompt_tokens=usage.prompt_tokens,
              constant_tokens=usage.constant_tokens, completion_tokens=usage.completion_tokens,
              truncated=usage.truncated or None, queue_us=usage.queue_us, prefill_us=usage.prefill_us,
              decode_us=usage.decode_us, glue_us=usage.glue_us)  # fmt: skip

    def gone(self, job: Job) -> None:
        """Note a request whose connection has gone before its last frame."""
        if self.mode != "off":
            event(log, logging.INFO, "request dropped: its connection is gone", conn=job.conn.number,
                  request_id=job.request_id, completion_tokens=job.n_new)  # fmt: skip


def _text(request: Request) -> dict[str, object]:
    """Return what the peer wrote; token ids are counted, not shown."""
    if request.encoding == Encoding.TOKENS:
        n_bytes = sum(len(message) for message in request.messages)
        return {"tokens": n_bytes // 4}
    fields: dict[str, object] = {"system": bytes(request.system).decode("utf-8", "replace")} if request.system else {}
    if request.context:
        fields["context"] = bytes(request.context).decode("utf-8", "replace")
    texts = [bytes(message).decode("utf-8", "replace") for message in request.messages]
    return fields | {f"message_{number}": text for number, text in enumerate(texts)}
