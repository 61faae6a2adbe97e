"""Certificates for tests, made by the openssl program: self-signed, so that each is its own authority."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

HERE = ("DNS:localhost", "IP:127.0.0.1")


class Pair(NamedTuple):
    cert: str
    key: str

    def context(self) -> ssl.SSLContext:
        """Give a server's context."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context


def make(folder: Path, name: str, *names: str, days: int = 2, authority: bool = False) -> Pair:
    """Make a certificate for `names` (here, by default); one of -1 days has expired, an `authority` may sign others."""
    cert, key, asked = (str(folder / f"{name}.{end}") for end in ("pem", "key", "csr"))
    openssl(
        "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
        "-addext", f"subjectAltName={','.join(names or HERE)}",
        *(("-addext", "basicConstraints=critical,CA:TRUE") if authority else ()), "-keyout", key, "-out", asked,
    )  # fmt: skip
    openssl("x509", "-req", "-in", asked, "-signkey", key, "-days", str(days), "-copy_extensions", "copy", "-out", cert)
    return Pair(cert, key)


def self_signed(folder: Path, name: str, *names: str) -> Pair:
    """Make a certificate for `names` as `openssl req -x509` does, key identifiers and CA:TRUE included."""
    folder.mkdir(exist_ok=True)
    cert, key = (str(folder / f"{name}.{end}") for end in ("pem", "key"))
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", f"subjectAltName={','.join(names or HERE)}", "-keyout", key, "-out", cert,
    )  # fmt: skip
    return Pair(cert, key)


def signed(folder: Path, name: str, authority: Pair) -> Pair:
    """Make a certificate for here that an authority signed, without the key identifiers that RFC 5280 asks for."""
    pair = make(folder, name)
    openssl(
        "x509", "-req", "-in", str(folder / f"{name}.csr"), "-CA", authority.cert, "-CAkey", authority.key,
        "-CAcreateserial", "-days", "2", "-copy_extensions", "copy", "-out", pair.cert,
    )  # fmt: skip
    return pair


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
