"""Who may use a server: the warning about TCP that others reach and that asks for no token.

Owns no state. Refuses sockets, torch, asyncio and everything of zl but settings.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from zl.config import Settings


def warning(ends: Iterable[tuple[str, str]], settings: Settings) -> str:
    """Name the TCP addresses that anybody who reaches them may use, and what to set; "" where there are none.

    ends  (name, IP address it is bound to) of each TCP listener
    """
    names = [name for name, host in ends if not is_loopback(host)]
    if not names or settings.auth_token:
        return ""
    remedy = "auth_token_file" + ("" if settings.tls_cert else " and tls_cert")
    return f"anybody who reaches {' or '.join(names)} may use this server: set {remedy}, or listen on 127.0.0.1"


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a bound IP address."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
