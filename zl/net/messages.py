"""What travels, as plain objects: requests, answers, usage, server info, and the enums of their fields.

State: none. Imports the standard library, errors and lease only; `codec` turns these into payloads and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from zl.errors import Finish, PeerError
from zl.lease import Lease


class RequestType(IntEnum):
    """`zl.RequestType`: each names a compiled sampling profile."""

    CHAT = 0
    SUMMARIZE = 1
    CREATIVE = 2


class Operation(IntEnum):
    """`zl.Operation`: what a request asks for."""

    GENERATE = 0
    CANCEL = 1
    HELLO = 2


class Encoding(IntEnum):
    """`zl.Encoding`: what the bytes of the prompt fields are."""

    TEXT = 0
    TOKENS = 1


Content = bytes | memoryview
"""What a prompt field holds: bytes, or under TOKENS a view of the berth that the request came in."""


@dataclass(slots=True)
class Request:
    """One client ask, as it came: `check_request` says whether it can be served.

    system, messages, context   UTF-8 text, or packed little-endian int32 token ids under TOKENS
    messages                    turns from the first; the unused entries at the end are gone, empty turns between stay
    temperature, top_p, repetition_penalty, seed   None: absent
    read_ns, parse_ns   not of the wire: what its frame took in the connection's callbacks and in the parser
    lease   not of the wire: the berth that the prompt fields of a TOKENS request are views of; whoever takes the
            request ends it
    """

    request_id: int = 0
    operation: int = Operation.GENERATE
    encoding: int = Encoding.TEXT
    system: Content = b""
    messages: list[Content] = field(default_factory=list)
    context: Content = b""
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int = 0
    type: int = RequestType.CHAT
    seed: int | None = None
    stop: list[bytes] = field(default_factory=list)
    deadline_ms: int = 0
    ignore_eos: bool = False
    logprobs: bool = False
    auth_token: bytes = b""
    read_ns: int = 0
    parse_ns: int = 0
    lease: Lease | None = None

    @property
    def in_berth(self) -> bool:
        """Say whether prompt fields are views of what the request was read from."""
        return bool(self.messages) and isinstance(self.messages[0], memoryview)

    def copy_out(self) -> None:
        """Make the prompt fields bytes of their own."""
        self.system, self.context = bytes(self.system), bytes(self.context)
        self.messages = [bytes(turn) for turn in self.messages]

    def give_back(self) -> None:
        """End the lease, if there is one: nobody will look at the prompt fields any more."""
        if self.lease is not None:
            self.lease.end()


@dataclass(slots=True)
class Usage:
    """`zl.Usage`: what a request took; counts in tokens, times in microseconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    constant_tokens: int = 0
    truncated: bool = False
    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    glue_us: int = 0


@dataclass(slots=True)
class ServerInfo:
    """`zl.ServerInfo`: what a server says of itself to a HELLO."""

    version: str = ""
    model: str = ""
    tokenizer_sha256: str = ""
    vocab_size: int = 0
    max_batch: int = 0
    max_model_len: int = 0
    max_tokens: int = 0
    max_messages: int = 0
    max_frame: int = 0
    device: str = ""
    build_id: str = ""


@dataclass(slots=True)
class Response:
    """One frame of an answer. `error`, `usage` and `server` are None where the frame has none."""

    request_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_finished: bool = False
    text: bytes = b""
    finish: Finish = Finish.NONE
    error: PeerError | None = None
    usage: Usage | None = None
    server: ServerInfo | None = None
    seed: int = 0
