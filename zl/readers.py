"""Readers of setting values: each takes what TOML, the environment or a flag holds and returns the checked value.

A reader raises ValueRefusedError, whose text says what is allowed where the setting's own words do not suffice.
Owns no state; refuses everything of zl but addresses and errors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

from zl.address import parse_address, parse_host_port
from zl.errors import ConfigError

_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


METRICS_PORT = 9_433
"""Where metrics are when nothing is said."""


class ValueRefusedError(Exception):
    """A value is not what its setting allows."""


def size(value: object) -> int:
    """Read bytes: a whole number, or text such as `2GiB`, `512MiB`, `1.5G` (K, M, G, T alone are powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueRefusedError
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def whole(low: int, high: int) -> Callable[[object], int]:
    """Make the reader of whole numbers from `low` to `high`."""

    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9][0-9_]*", value.strip(), re.ASCII):
            value = int(value.strip().replace("_", ""))
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueRefusedError
        return value

    return read


def number(low: float, high: float) -> Callable[[object], float]:
    """Make the reader of numbers from `low` to `high`."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueRefusedError
        try:
            found = float(value)
        except ValueError as error:
            raise ValueRefusedError from error
        if not (math.isfinite(found) and low <= found <= high):
            raise ValueRefusedError
        return found

    return read


def one_of(*choices: str) -> Callable[[object], str]:
    """Make the reader of one word out of `choices`."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueRefusedError
        return value

    return read


def text(value: object) -> str:
    """Read a text that may be empty."""
    if not isinstance(value, str):
        raise ValueRefusedError
    return value


def name(value: object) -> str:
    """Read a text that is not empty."""
    if not text(value):
        raise ValueRefusedError
    return str(value)


def secret(value: object) -> str:
    """Read a secret: an empty one would open the server to everybody."""
    if not text(value).strip():
        raise ValueRefusedError("a text that is not empty; leave it out, or unset it, where no token is asked for")
    if "\0" in str(value) or not _is_unicode(str(value)):
        raise ValueRefusedError("text in UTF-8")
    return str(value)


def path(value: object) -> str:
    """Read the path of a file: one that is empty is no way to leave it out."""
    if not text(value):
        raise ValueRefusedError("the path of a file that this user can read; leave it out, or unset it, where there is "
                                "none")  # fmt: skip
    return str(value)


def _is_unicode(text: str) -> bool:
    # The environment's bytes that are no UTF-8 come as lone surrogates.
    return not any("\ud800" <= char <= "\udfff" for char in text)


def listen(value: object) -> tuple[str, ...]:
    """Read addresses: a list, or one text with commas between them."""
    items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items or not all(isinstance(item, str) for item in items):
        raise ValueRefusedError
    try:
        addresses = tuple(str(parse_address(item, port_zero=True)) for item in items)
    except ConfigError as error:
        raise ValueRefusedError(f"tcp:HOST:PORT or unix:PATH; {error}") from error
    # Port 0 asks for any free port, so it may stand there twice.
    fixed = [address for address in addresses if not address.endswith(":0")]
    if len(set(fixed)) != len(fixed):
        raise ValueRefusedError("addresses that are all different")
    return addresses


def metrics(value: object) -> str:
    """Read `HOST:PORT` or `off`."""
    if value == "off":
        return "off"
    try:
        return str(parse_host_port(text(value), port_zero=True, example=METRICS_PORT)).removeprefix("tcp:")
    except ConfigError as error:
        raise ValueRefusedError(f"HOST:PORT or off; {error}") from error


def texts(value: object) -> tuple[str, ...]:
    """Read a list of texts; in one text, as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueRefusedError from error
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueRefusedError
    return tuple(value)


def patterns(value: object) -> tuple[tuple[str, str], ...]:
    """Read a table of names and regular expressions; in one text, as JSON. An empty expression is one as well."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueRefusedError from error
    if not isinstance(value, dict):
        raise ValueRefusedError
    for name_, pattern in value.items():
        if not isinstance(pattern, str):
            raise ValueRefusedError
        try:
            re.compile(pattern)
        except (re.error, OverflowError) as error:
            raise ValueRefusedError(f"a table of names and regular expressions; {name_}: {error}") from error
    return tuple(value.items())


def read_token(path: str, said: str) -> str:
    """Read an auth token from a file, without the white space around it.

    said    what names the file: a setting or flag, for the errors
    Raises  ConfigError: no file is named, or it is unreadable or empty
    """
    if not path:
        raise ConfigError(f"{said} names no file: give the path of one, or leave it out")
    try:
        token = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{said} {path}: {why}; name a file with the secret that this user can read") from error
    if not token:
        raise ConfigError(f"{said} {path} is empty: write the secret into it")
    return token
