"""The request log: ids and numbers, text only where asked for."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from zl.errors import Code, Finish, PeerError, RequestError
from zl.net.messages import Encoding, Request, Usage
from zl.ops.requests import RequestLog
from zl.rows import Job

CONN = SimpleNamespace(number=3)
REQUEST = Request(request_id=9, system=b"be kind", messages=[b"my secret", b"\xff"], context=b"facts")


def job() -> Job:
    return Job(CONN, 9, np.zeros(4, np.int32), 0, 8, None, 0, None, 0.0)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [(r.levelname, r.getMessage(), r.fields) for r in caplog.records]


def everything(log: RequestLog) -> None:
    log.began(CONN, REQUEST)
    log.refused(CONN, REQUEST, RequestError(Code.OVERLOADED, "my secret is busy", retry_after_ms=50))
    log.ended(job(), Finish.STOP, Usage(prompt_tokens=4, completion_tokens=2, queue_us=5), None)
    log.ended(job(), Finish.ERROR, Usage(), PeerError(Code.NUMERIC, "not finite"))
    log.gone(job())


def test_off_says_nothing(said):
    everything(RequestLog())
    assert said() == []


def test_on_says_ids_and_numbers_and_no_text(said):
    everything(RequestLog("on"))
    lines = said()
    assert [(level, text) for level, text, _ in lines] == [
        ("INFO", "request refused"), ("INFO", "request"), ("WARNING", "request"),
        ("INFO", "request dropped: its connection is gone"),
    ]  # fmt: skip
    assert all((fields["conn"], fields["request_id"]) == (3, 9) for _, _, fields in lines)
    assert lines[0][2]["code"] == "OVERLOADED"
    assert {"finish": "STOP", "prompt_tokens": 4, "completion_tokens": 2, "queue_us": 5}.items() <= lines[1][2].items()
    assert lines[2][2]["code"] == "NUMERIC"
    assert "secret" not in str(lines)


def test_text_is_there_where_asked_for(said):
    log = RequestLog("text")
    log.began(CONN, REQUEST)
    log.began(CONN, Request(request_id=1, encoding=Encoding.TOKENS, messages=[bytes(12)]))
    (_, text, fields), (_, _, tokens) = said()
    assert text == "request text"
    assert fields == {"conn": 3, "request_id": 9, "system": "be kind", "context": "facts", "message_0": "my secret",
                      "message_1": "\ufffd"}  # fmt: skip
    assert tokens == {"conn": 3, "request_id": 1, "tokens": 3}
