"""Socket addresses as text: `tcp:HOST:PORT`, `unix:PATH`, for clients `tls:HOST:PORT`; where zl listens by default.

Owns no state. Refuses everything but the standard library, and within it asyncio and ssl.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from zl.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7433
_HOST_MAX = 253  # RFC 1035, section 2.3.4: 255 bytes as sent, with a length before each label and an empty one behind
_UNIX_PATH_MAX = 107  # sun_path is 108 bytes with its closing zero (unix(7))


class TcpAddress(NamedTuple):
    """A TCP end; `host` is without the brackets of an IPv6 literal."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


class UnixAddress(NamedTuple):
    """A Unix socket in the file system."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


class TlsAddress(NamedTuple):
    """A server that speaks TLS, as a client names it: the host is also what its certificate must be for."""

    host: str
    port: int

    def __str__(self) -> str:
        return str(TcpAddress(self.host, self.port)).replace("tcp:", "tls:", 1)


Address = TcpAddress | UnixAddress
Target = TcpAddress | UnixAddress | TlsAddress
"""Where a client may connect to."""


def parse_host_port(text: str, *, port_zero: bool = False, example: int = DEFAULT_PORT) -> TcpAddress:
    """Read `HOST:PORT`; an IPv6 host stands in brackets. Port 0 (the system picks) only where `port_zero`.

    example  the port that an error shows

    Raises  ConfigError: what is wrong with the text, with a correct example
    """
    for kind in ("tcp:", "tls:", "http://", "https://"):
        if text.startswith(kind):
            plain = text.removeprefix(kind).partition("/")[0]
            shown = plain or f"{DEFAULT_HOST}:{example}"
            raise ConfigError(f"{text!r} is no HOST:PORT: write it without {kind}, as in {shown}")
    host, colon, port_text = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r} is no HOST:PORT: put an IPv6 host in brackets, as in [::1]:{example}")
    if not colon or not host:
        raise ConfigError(f"{text!r} is no HOST:PORT: write for example {DEFAULT_HOST}:{example}")
    if not _is_host(host):
        raise ConfigError(f"{text!r} has a host that cannot be: it is a name or an IP address, with 1 to 63 characters "
                          f"between its dots; write for example {DEFAULT_HOST}:{example}")  # fmt: skip
    lowest = 0 if port_zero else 1
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) < 10 and lowest <= int(port_text) <= 65_535):
        raise ConfigError(f"{text!r} has port {port_text!r}: it must be a number from {lowest} to 65535")
    return TcpAddress(host, int(port_text))


def _is_host(host: str) -> bool:
    # What this refuses, resolvers and ssl answer with exceptions of many kinds.
    try:
        return "\0" not in host and len(host.encode("idna")) <= _HOST_MAX
    except UnicodeError:
        return False


def parse_address(text: str, *, port_zero: bool = False) -> Address:
    """Read `tcp:HOST:PORT` or `unix:PATH`, where something listens.

    Raises  ConfigError: what is wrong with the text, with a correct example
    """
    kind, colon, rest = text.partition(":")
    if kind == "tls" and colon:
        raise ConfigError(f"{text!r} is for clients: write tcp:{rest} here; a server speaks TLS on its TCP addresses "
                          "once tls_cert and tls_key are set")  # fmt: skip
    if kind == "tcp" and colon:
        return parse_host_port(rest, port_zero=port_zero)
    if kind == "unix" and colon:
        if not rest or "\0" in rest:
            raise ConfigError(f"{text!r} has no path: write for example unix:{default_socket()}")
        if len(os.fsencode(rest)) > _UNIX_PATH_MAX:
            raise ConfigError(f"{text!r}: a Unix socket path has at most {_UNIX_PATH_MAX} bytes, take a shorter one")
        return UnixAddress(rest)
    raise ConfigError(
        f"{text!r} is no address: write tcp:HOST:PORT or unix:PATH, for example tcp:{DEFAULT_HOST}:{DEFAULT_PORT}"
    )


def parse_target(text: str) -> Target:
    """Read `tcp:HOST:PORT`, `unix:PATH` or `tls:HOST:PORT`, where a client is to connect to.

    Raises  ConfigError: what is wrong with the text, with a correct example
    """
    kind, colon, rest = text.partition(":")
    if kind == "tls" and colon:
        return TlsAddress(*parse_host_port(rest))
    if colon and kind in ("tcp", "unix"):
        return parse_address(text)
    raise ConfigError(
        f"{text!r} is no address: write tcp:HOST:PORT or unix:PATH, or tls:HOST:PORT where the server has a "
        f"certificate, for example tcp:{DEFAULT_HOST}:{DEFAULT_PORT}"
    )


def default_socket(environ: Mapping[str, str] | None = None) -> str:
    """Path of the Unix socket that server and client meet at when no address is given."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # The runtime directory of the XDG specification is the user's own; /tmp is everybody's, hence the uid in the name.
    if runtime and os.path.isdir(runtime):
        return os.path.join(runtime, "zl.sock")
    return f"/tmp/zl-{os.getuid()}.sock"


def default_listen(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The two addresses that a server takes when none is given."""
    return (f"tcp:{DEFAULT_HOST}:{DEFAULT_PORT}", f"unix:{default_socket(environ)}")
