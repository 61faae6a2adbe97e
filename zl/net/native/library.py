"""Compile, load and open the wire's native code, as builtin functions: a decoder of valid requests, `encode_token`.

The decoder is a shortcut, never a second truth: it returns a `Request` only where `codec.decode_request` would return
an equal one that passes `rules.check_request`, and None wherever it is not sure: the caller then asks codec, which
decides. The encoder makes codec's bytes.

State: one file in the cache folder, named by a hash of sources, flags and machine; the bits of a request do not hang on
the compiler, so that is not in the name, and a library in the cache needs no compiler any more.
Refuses torch, numpy, asyncio and gpu; the client never loads it.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from zl.compiled import cache_dir, shared_library
from zl.errors import ConfigError, DeviceError, InvariantError
from zl.net.codec import (
    MICRO,
    Decoder,
    TokenEncoder,
    decode_request,
    encode_request,
    encode_token,
)
from zl.net.messages import Encoding, Request, RequestType
from zl.net.rules import MAX_PENALTY, MAX_TEMPERATURE
from zl.shapes import HEADER_BYTES, MAX_MESSAGES, MAX_STOP_BYTES, MAX_STOPS

HERE = Path(__file__).parent

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-Wall", "-Wextra",
)  # fmt: skip

SLOTS = (
    "request_id", "operation", "encoding", "system", "messages", "context", "temperature", "top_p",
    "repetition_penalty", "max_tokens", "type", "seed", "stop", "deadline_ms", "ignore_eos", "logprobs", "auth_token",
    "read_ns", "parse_ns", "lease",
)  # fmt: skip
"""The order in which door.cpp fills a `Request`."""


# A request with something else in each field: what comes out of a new decoder is compared with protobuf's.
_PROOF = encode_request(
    request_id=1, messages=["turn", "", "end"], system="system", context="context", temperature=2, top_p=0.5,
    repetition_penalty=4, max_tokens=5, type=1, seed=6, stop=["stop"], deadline_ms=7, logprobs=True, auth_token="token",
)[HEADER_BYTES:]  # fmt: skip


class Limits(ctypes.Structure):
    """zl::wire::Limits."""

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("encodings", "types", "turns", "stops", "stop_bytes", "temperature", "top_p", "penalty")
    ]


def limits() -> Limits:
    """Give the limits of the field rules; sampling values in millionths, as they travel."""
    temperature, penalty = (int(value * MICRO) for value in (MAX_TEMPERATURE, MAX_PENALTY))
    return Limits(len(Encoding), len(RequestType), MAX_MESSAGES, MAX_STOPS, MAX_STOP_BYTES, temperature, MICRO, penalty)


class WireCode(NamedTuple):
    """What a server reads requests and writes tokens with; `decode` None: codec reads them all."""

    decode: Decoder | None
    encode_token: TokenEncoder


def path() -> Path:
    """Give the path of the shared library, compiling it when the cache has none.

    Raises  DeviceError, ConfigError: as `shared_library`
    """
    digest = hashlib.sha256(" ".join((platform.machine(), *FLAGS)).encode())
    for source in sorted(HERE.glob("*.[ch]pp")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    target = cache_dir() / digest.hexdigest()[:32] / "zl_wire.so"
    return shared_library("the wire's native code", target, [HERE / "door.cpp"], FLAGS)


def open_code() -> WireCode:
    """Load the native code.

    Raises  DeviceError: not on this interpreter or machine, no compiler, or it refused a source; ConfigError: the
            cache cannot be written; OSError: the library cannot be loaded
    """
    if sys.implementation.name != "cpython" or "t" in sys.abiflags or sys.maxsize < 2**32:
        raise DeviceError(f"the wire's native code needs CPython on 64 bits with its lock, not {sys.version}")
    if Request.__slots__ != SLOTS:
        raise InvariantError(f"door.cpp fills other slots than Request has: {Request.__slots__}")
    library = ctypes.PyDLL(str(path()))
    make = library.zl_decoder
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.py_object, ctypes.c_ssize_t, ctypes.py_object, ctypes.POINTER(Limits)]
    values = tuple(object() for _ in SLOTS)
    sample: Any = Request(*values)  # type: ignore[arg-type]
    n_words = Request.__basicsize__ // ctypes.sizeof(ctypes.c_void_p)
    decoder: Decoder | None = make(sample, n_words, values, ctypes.byref(limits()))
    if decoder is None or decoder(_PROOF) != decode_request(_PROOF):
        raise DeviceError(f"the wire's native code does not know how this interpreter lays out objects: {sys.version}")
    library.zl_token_encoder.restype = ctypes.py_object
    return WireCode(decoder, library.zl_token_encoder())


def code_if_possible(say: Callable[[str], None]) -> WireCode:
    """Load the native code; where that cannot be, say why in one line: protobuf then does all the work."""
    try:
        return open_code()
    except (ConfigError, DeviceError, OSError) as error:
        say(f"requests and tokens pass without native code, a few microseconds slower each: {error}")
        return WireCode(None, encode_token)
