"""TLS: files that do not fit say so; a certificate is exchanged while the listener runs."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.certificates import self_signed
from tests.net.harness import run
from zl.errors import ConfigError
from zl.net.listen import Bound, listen
from zl.net.tls import Certificate, tls_context

both_loops = pytest.mark.parametrize("kind", ["uvloop", "asyncio"])


def test_files_that_do_not_fit_say_so(tmp_path):
    missing = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"none\.pem"):
        tls_context(missing, missing)
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("hello")
    with pytest.raises(ConfigError, match="cannot be used"):
        tls_context(str(wrong), str(wrong))


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("one", "two.key", "the key is another certificate's"),
        ("one", "locked.key", "the key has a password"),
        ("one.key", "one.key", "the first has no PEM certificate"),
        ("one", "one", "the second has no whole PEM key"),
        ("one", "half.key", "the second has no whole PEM key"),
    ],
)
def test_a_pair_that_does_not_fit_is_told_apart_and_nobody_is_asked_for_a_password(
    pairs, tmp_path, certificate, key, words
):
    paths = {"one": pairs["one"][0], "one.key": pairs["one"][1], "two.key": pairs["two"][1]}
    paths |= {name: str(tmp_path / name) for name in ("locked.key", "half.key")}
    lock = ["openssl", "pkey", "-in", paths["one.key"], "-aes256", "-passout", "pass:x", "-out", paths["locked.key"]]
    subprocess.run(lock, check=True, capture_output=True)
    whole = Path(paths["one.key"]).read_text()
    Path(paths["half.key"]).write_text(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=words):
        tls_context(paths[certificate], paths[key])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[str, str]]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    return {name: self_signed(folder, name, f"DNS:{name}") for name in ("one", "two")}


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@both_loops
def test_a_certificate_is_exchanged_under_way(kind, pairs):
    async def shown(port: int, name: str, server_name: str | None):
        """Connect as one who trusts only `name`'s certificate."""
        client = ssl.create_default_context(cafile=pairs[name][0])
        client.check_hostname = server_name is not None
        where = {"ssl": client} | ({"server_hostname": server_name} if server_name else {"server_hostname": ""})
        return await asyncio.open_connection("127.0.0.1", port, **where)

    async def echoes(reader, writer) -> bool:
        writer.write(b"hello")
        return await reader.readexactly(5) == b"hello"

    async def end(writer) -> None:
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        certificate = Certificate(*pairs["one"])
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        listeners = await listen([Bound(sock, "tcp:x")], Echo, tls=certificate.context)
        port = sock.getsockname()[1]
        old = await shown(port, "one", "one")
        with pytest.raises(ConfigError, match="cannot be used"):  # a certificate with another's key
            tls_context(pairs["two"][0], pairs["one"][1])
        certificate.use(tls_context(*pairs["two"]))
        for server_name in ("two", None):
            new = await shown(port, "two", server_name)
            assert await echoes(*new)
            await end(new[1])
            with pytest.raises(ssl.SSLError):
                await shown(port, "one", server_name)
        assert await echoes(*old)  # a connection from before lives on
        await end(old[1])
        listeners.close()
        await asyncio.sleep(0.05)

    run(main(), kind)
