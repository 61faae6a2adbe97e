"""The Python client: `Client` for threads, `AsyncClient` for asyncio, pools of several servers, and the exceptions.

    from zl.client import Client

    with Client() as client:
        for chunk in client.stream("What is the capital of France?"):
            print(chunk.text, end="", flush=True)

Owns no state. Imports nothing heavier than protobuf; asyncio and ssl come only with the first use of what needs them.
"""

from __future__ import annotations

import importlib
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
    TlsFailed,
    Unauthenticated,
    UnsupportedContent,
    ZlClientError,
)
from zl.client.messages import Answer, Chunk, Options, Result, ServerInfo, Timeouts, Usage
from zl.client.sync import Client, Stream
from zl.client.trust import Trust
from zl.errors import Code, Finish

if TYPE_CHECKING:
    from zl.client.aio import AsyncClient, AsyncStream
    from zl.client.aio_pool import AsyncPool, AsyncPoolStream
    from zl.client.editing import Debounce, DoubleBuffer
    from zl.client.pool import Pool, PoolStream

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncPool",
    "AsyncPoolStream",
    "AsyncStream",
    "BadRequest",
    "Chunk",
    "Client",
    "Code",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Debounce",
    "DoubleBuffer",
    "Draining",
    "Finish",
    "LimitExceeded",
    "Options",
    "Overloaded",
    "Pool",
    "PoolStream",
    "RequestRefused",
    "Result",
    "ServerError",
    "ServerInfo",
    "Stream",
    "StreamBroken",
    "TimedOut",
    "Timeouts",
    "TlsFailed",
    "Trust",
    "Unauthenticated",
    "UnsupportedContent",
    "Usage",
    "ZlClientError",
]


_LAZY = {
    "AsyncClient": "aio",
    "AsyncStream": "aio",
    "AsyncPool": "aio_pool",
    "AsyncPoolStream": "aio_pool",
    "Debounce": "editing",
    "DoubleBuffer": "editing",
    "Pool": "pool",
    "PoolStream": "pool",
}


def __getattr__(name: str) -> object:
    # What only some need, and asyncio with it, would double the time that the import takes.
    if name in _LAZY:
        return getattr(importlib.import_module(f"zl.client.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
