"""What can go wrong at the client, as exceptions that carry what a caller acts on. Owns no state."""

from __future__ import annotations

from zl.errors import Code, PeerError, ZlError


class ZlClientError(ZlError):
    """Base of all errors of the client. `tokens_received`: tokens of the answer that had come before it."""

    def __init__(self, message: str, *, tokens_received: int = 0):
        super().__init__(message)
        self.tokens_received = tokens_received


class ConnectionFailed(ZlClientError, ConnectionError):  # noqa: N818 (says what happened, as ConnectionRefusedError's kin)
    """No connection, or it is gone and nothing was being answered on it."""


class TlsFailed(ConnectionFailed):
    """No TLS comes about: the certificate is not to be trusted, or only one side speaks it. Asking again is no help."""


class StreamBroken(ZlClientError, ConnectionError):  # noqa: N818
    """The connection ended in the middle of an answer."""


class TimedOut(ZlClientError, TimeoutError):  # noqa: N818
    """Nothing came in time; the request is cancelled and the connection stays usable. `phase` says what was awaited."""

    def __init__(self, message: str, *, phase: str, tokens_received: int = 0):
        super().__init__(message, tokens_received=tokens_received)
        self.phase = phase


class RequestRefused(ZlClientError):  # noqa: N818
    """The server answered with an error; `code` is the wire's."""

    code = Code.INTERNAL

    def __init__(self, message: str, *, code: Code | None = None, retry_after: float = 0.0, tokens_received: int = 0):
        super().__init__(message, tokens_received=tokens_received)
        self.code = type(self).code if code is None else code
        self.retry_after = retry_after


class BadRequest(RequestRefused):
    """The request is wrong; the message names the field."""

    code = Code.BAD_REQUEST


class UnsupportedContent(BadRequest):
    """A turn holds an image, a sound or a file; the message says what can be sent. Nothing went to the server."""


class LimitExceeded(RequestRefused):
    """The request is larger than the server allows."""

    code = Code.LIMIT_EXCEEDED


class Unauthenticated(RequestRefused):
    """The server wants another auth token, or one at all."""

    code = Code.UNAUTHENTICATED


class Overloaded(RequestRefused):
    """No row and no queue place is left; try again after `retry_after` seconds."""

    code = Code.OVERLOADED


class DeadlineExceeded(RequestRefused):
    """The request's own deadline passed."""

    code = Code.DEADLINE_EXCEEDED


class Draining(RequestRefused):
    """The server is going down and takes nothing new."""

    code = Code.DRAINING


class ServerError(RequestRefused):
    """The server failed: a bug of its own, or numbers that are not finite."""


_BY_CODE: dict[int, type[RequestRefused]] = {
    Code.BAD_FRAME: BadRequest,
    Code.BAD_REQUEST: BadRequest,
    Code.DUPLICATE_ID: BadRequest,
    Code.LIMIT_EXCEEDED: LimitExceeded,
    Code.UNAUTHENTICATED: Unauthenticated,
    Code.OVERLOADED: Overloaded,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.DRAINING: Draining,
}


def from_wire(error: PeerError, tokens_received: int = 0) -> RequestRefused:
    """Make the exception for an error frame."""
    kind = _BY_CODE.get(error.code, ServerError)
    text = error.message or error.code.name.lower().replace("_", " ")
    return kind(text, code=error.code, retry_after=error.retry_after_ms / 1000, tokens_received=tokens_received)
