"""The Python client: `Client` for threads, `AsyncClient` for asyncio, and the exceptions of both.

    from zl.client import Client

    with Client() as client:
        for chunk in client.stream("What is the capital of France?"):
            print(chunk.text, end="", flush=True)

Owns no state. Imports nothing heavier than protobuf; asyncio comes only with the first use of `AsyncClient`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zl.client.errors import (
    BadRequest,
    ConnectionFailed,
    DeadlineExceeded,
    Draining,
    LimitExceeded,
    Overloaded,
    RequestRefused,
    ServerError,
    StreamBroken,
    TimedOut,
    Unauthenticated,
    ZlClientError,
)
from zl.client.messages import Answer, Chunk, Options, Result, ServerInfo, Timeouts, Usage
from zl.client.sync import Client, Stream
from zl.errors import Code, Finish

if TYPE_CHECKING:
    from zl.client.aio import AsyncClient, AsyncStream

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BadRequest",
    "Chunk",
    "Client",
    "Code",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Draining",
    "Finish",
    "LimitExceeded",
    "Options",
    "Overloaded",
    "RequestRefused",
    "Result",
    "ServerError",
    "ServerInfo",
    "Stream",
    "StreamBroken",
    "TimedOut",
    "Timeouts",
    "Unauthenticated",
    "Usage",
    "ZlClientError",
]


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "AsyncStream"):
        from zl.client import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
