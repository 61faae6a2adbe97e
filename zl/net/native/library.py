"""Compile, load and open the wire's native code: a decoder of valid requests, as a builtin function.

It is a shortcut, never a second truth: it returns a `Request` only where `codec.decode_request` would return an equal
one that passes `codec.check_request`, and None wherever it is not sure: the caller then asks codec, which decides.

State: one file in the cache folder, named by a hash of sources, flags and machine; the bits of a request do not hang on
the compiler, so that is not in the name, and a library in the cache needs no compiler any more.
Refuses torch, numpy, asyncio and gpu; the client never loads it.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from pathlib import Path
from types import MemberDescriptorType

from zl.compiled import cache_dir, shared_library
from zl.errors import DeviceError, InvariantError
from zl.net.codec import MAX_PENALTY, MAX_TEMPERATURE, MICRO, Decoder
from zl.net.messages import Encoding, Request, RequestType
from zl.shapes import MAX_MESSAGES, MAX_STOP_BYTES, MAX_STOPS

HERE = Path(__file__).parent

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-Wall", "-Wextra",
)  # fmt: skip

SLOTS = (
    "request_id", "operation", "encoding", "system", "messages", "context", "temperature", "top_p",
    "repetition_penalty", "max_tokens", "type", "seed", "stop", "deadline_ms", "ignore_eos", "logprobs", "auth_token",
    "read_ns", "parse_ns",
)  # fmt: skip
"""The order in which door.cpp fills a `Request`."""


class Limits(ctypes.Structure):
    """zl::wire::Limits."""

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("encodings", "types", "turns", "stops", "stop_bytes", "temperature", "top_p", "penalty")
    ]


def limits() -> Limits:
    """Give the limits of codec's field rules; sampling values in millionths, as they travel."""
    temperature, penalty = (int(value * MICRO) for value in (MAX_TEMPERATURE, MAX_PENALTY))
    return Limits(len(Encoding), len(RequestType), MAX_MESSAGES, MAX_STOPS, MAX_STOP_BYTES, temperature, MICRO, penalty)


def path() -> Path:
    """Give the path of the shared library, compiling it when the cache has none.

    Raises  DeviceError: no compiler, or it refused a source; OSError: the cache cannot be written
    """
    digest = hashlib.sha256(" ".join((platform.machine(), *FLAGS)).encode())
    for source in sorted(HERE.glob("*.[ch]pp")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    target = cache_dir() / digest.hexdigest()[:32] / "zl_wire.so"
    return shared_library("the wire's native code", target, [HERE / "door.cpp"], FLAGS)


def open_decoder() -> Decoder:
    """Load the decoder; it answers in about a microsecond.

    Raises  DeviceError: not on this interpreter or machine, no compiler, or it refused a source; OSError: the cache
            cannot be written, or the library not loaded
    """
    if sys.implementation.name != "cpython" or "t" in sys.abiflags or sys.maxsize < 2**32:
        raise DeviceError(f"the wire's native code needs CPython on 64 bits with its lock, not {sys.version}")
    if Request.__slots__ != SLOTS:
        raise InvariantError(f"door.cpp fills other slots than Request has: {Request.__slots__}")
    members = tuple(vars(Request)[name] for name in SLOTS)
    if not all(isinstance(member, MemberDescriptorType) for member in members):
        raise InvariantError("a slot of Request has no member descriptor")
    make = ctypes.PyDLL(str(path())).zl_decoder
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.POINTER(Limits)]
    decoder: Decoder | None = make(Request, members, ctypes.byref(limits()))
    if decoder is None:
        raise InvariantError("door.cpp counts other slots than library.py")
    return decoder
