"""Error branches and wire codes: peer, build, device and ourselves are separate.

Every exception carries the fields that a caller acts on; the text names culprit, place and remedy.
Imports nothing but the standard library.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import IntEnum


class Code(IntEnum):
    """`zl.Code` of the wire; the values are the schema's."""

    OK = 0
    BAD_FRAME = 1
    BAD_REQUEST = 2
    LIMIT_EXCEEDED = 3
    UNAUTHENTICATED = 4
    OVERLOADED = 5
    DEADLINE_EXCEEDED = 6
    DRAINING = 7
    INTERNAL = 8
    NUMERIC = 9
    DUPLICATE_ID = 10


class Finish(IntEnum):
    """`zl.FinishReason` of the wire."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


INSTALL_CUDA = "in a clone of zl, pip install '.[cuda]'"
"""What to do where the CUDA device lacks a package; zl is on no package index, so that its name alone is no remedy."""


class ZlError(Exception):
    """Base of everything zl raises on purpose.

    exit_status  what a command ends with: 2 where trying again cannot help: somebody has to change something first
    """

    exit_status = 1


class PeerError(ZlError):
    """The peer sent something wrong."""

    def __init__(self, code: Code, message: str, *, request_id: int = 0, field: str = "", retry_after_ms: int = 0):
        super().__init__(message)
        self.code = code
        self.message = message
        self.request_id = request_id
        self.field = field
        self.retry_after_ms = retry_after_ms


class FrameError(PeerError):
    """The byte stream is broken; the connection ends (WIRE.md, rule 2)."""

    def __init__(self, message: str):
        super().__init__(Code.BAD_FRAME, message)


class RequestError(PeerError):
    """One request is wrong; the connection lives on (WIRE.md, rule 3)."""


class ConfigError(ZlError):
    """A setting, flag or address is wrong; the text says which and what to write instead."""

    exit_status = 2


class ModelError(ZlError):
    """A model file is missing, damaged or of a kind that zl cannot serve."""

    exit_status = 2


class TransferError(ModelError):
    """A model cannot be fetched or written now: no network, no room. Trying again may help."""

    exit_status = 1


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FOR_GOOD = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT,
                       errno.ELOOP, errno.ENAMETOOLONG})  # fmt: skip


def unwritable(
    what: str, error: OSError, instead: str = "set XDG_CACHE_HOME to", passing: Callable[[str], ZlError] = TransferError
) -> ZlError:
    """Make the error for a place that cannot be written: ConfigError where a right is lacking, and will be at the next
    start; `passing` where the disk is full, which may pass.

    what     what could not be written, and where
    instead  how to name another folder: words that go before it
    """
    text = f"{what}: {error.strerror or error}; "
    if error.errno in _FULL:
        return passing(f"{text}free some room there, or {instead} a folder that has it")
    if error.errno in _FOR_GOOD:
        return ConfigError(f"{text}{instead} a folder that this user can write")
    return passing(f"{text}try again, or {instead} another folder")


class DeviceError(ZlError):
    """A device call failed or a device lacks what was asked of it.

    lasting  trying again cannot help: something is not installed, or this machine cannot do it
    """

    def __init__(self, message: str, *, call: str = "", status: int = 0, lasting: bool = False):
        super().__init__(message)
        self.call = call
        self.status = status
        self.exit_status = 2 if lasting else 1


class CapacityError(ZlError):
    """Memory does not suffice for what was asked; the text has the numbers.

    lasting  it would not if nothing else ran here either
    """

    def __init__(self, message: str, *, lasting: bool = False):
        super().__init__(message)
        self.exit_status = 2 if lasting else 1


class ShapeError(ZlError):
    """A kernel argument has the wrong shape, dtype or stride: our own mistake, found at the launcher."""

    def __init__(self, argument: str, found: object, expected: object):
        super().__init__(f"{argument}: found {found}, expected {expected}")
        self.argument = argument
        self.found = found
        self.expected = expected


class InvariantError(ZlError):
    """Our own books do not balance. Never caught to go on as if nothing had happened."""
