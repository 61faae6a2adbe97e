"""The clients over TLS: what they say and hear, whom they believe, what a failure is called, and what a pool does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.certificates import make
from tests.client.kit import Clock, run, until
from tests.fake_server import FakeServer
from zl.client import (
    AsyncClient,
    AsyncPool,
    Client,
    ConnectionFailed,
    Pool,
    StreamBroken,
    TimedOut,
    Timeouts,
    TlsFailed,
)
from zl.client.channel import Channel, open_channel
from zl.client.trust import Trust
from zl.errors import ConfigError
from zl.net.tls import Certificate, tls_context

both = pytest.mark.parametrize("kind", ["sync", "asyncio"])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    return {
        "here": make(folder, "here"),
        "other": make(folder, "other"),
        "elsewhere": make(folder, "elsewhere", "DNS:zl.example"),
        "expired": make(folder, "expired", days=-1),
    }


@pytest.fixture
def here(pairs):
    with FakeServer(tls=pairs["here"].context()) as server:
        yield server


def once(kind: str, address: str, question: str = "say x", **more) -> str:
    """Connect, ask and leave, with either client."""

    async def ask() -> str:
        async with AsyncClient(address, **more) as client:
            return (await client.ask(question)).text

    if kind == "asyncio":
        return run(ask())
    with Client(address, **more) as client:
        return client.ask(question).text


class Peer:
    """A listening socket, and a thread that does something with the first connection."""

    def __init__(self, serve):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._done = ThreadPoolExecutor(1)
        self._result = self._done.submit(self._run, serve)

    def _run(self, serve):
        self._listener.settimeout(10)
        with self._listener:
            peer, _ = self._listener.accept()
            with peer:
                peer.settimeout(10)
                return serve(peer)

    def result(self):
        try:
            return self._result.result(20)
        finally:
            self._done.shutdown()


class Relay:
    """Passes bytes between a client and a server in pieces of a few bytes."""

    def __init__(self, port: int, largest: int):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, args=(port, largest))]
        self._threads[0].start()

    def _accept(self, port, largest):
        with self._listener:
            client, _ = self._listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=self._pass, args=(server, client, largest))
            back.start()
            self._pass(client, server, largest)
            back.join()

    def _pass(self, source, sink, largest):
        sizes = random.Random(7)
        with contextlib.suppress(OSError):
            while data := source.recv(sizes.randint(1, largest)):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def join(self):
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


def port_of(server: FakeServer) -> int:
    return int(server.address.rpartition(":")[2])


def test_streams_of_one_connection_and_large_requests(here, pairs):
    with Client(here.address, timeout=10, ca_file=pairs["here"].cert) as client:
        assert 0 <= client.ping() < 10
        assert client.hello().model == "fake"
        streams = [client.stream(f"say {i} {i} {i}") for i in range(20)]
        assert [next(stream).text for stream in reversed(streams)] == [f"{i} " for i in reversed(range(20))]
        assert ["".join(c.text for c in stream) for stream in streams] == [f"{i} {i} " for i in range(20)]
        assert client.ask("say big", system="s" * 250_000).text == "big "
        assert len(here.requests[-1].system) == 250_000
        assert len(client.ask("flood 4000").token_ids) == 4_000
        for _ in client.stream("endless"):
            break  # and is cancelled
        assert here.was_cancelled.wait(10)
        assert client.ask("say on").text == "on "


def test_threads_share_one_connection_and_their_records_keep_their_order(here, pairs):
    with Client(here.address, timeout=20, ca_file=pairs["here"].cert) as client:

        def work(n: int) -> list[str]:
            found = []
            for i in range(6):
                found.append(client.ask(f"say {n} {n}", system="s" * (30_000 * i)).text)
                assert client.ping() < 10
            return found

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == [[f"{n} {n} "] * 6 for n in range(8)]


def test_asyncio_streams_of_one_connection_and_large_requests(here, pairs):
    async def main():
        async with AsyncClient(here.address, timeout=10, ca_file=pairs["here"].cert) as client:
            big = "s" * 200_000
            answers = await asyncio.gather(*(client.ask(f"say {i} {i}", system=big) for i in range(20)))
            assert [answer.text for answer in answers] == [f"{i} {i} " for i in range(20)]
            assert 0 <= await client.ping() < 10
            assert len((await client.ask("flood 4000")).token_ids) == 4_000
            task = asyncio.create_task(client.ask("endless"))
            await until(lambda: here.requests[-1].messages == [b"endless"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(here.was_cancelled.is_set)
            assert (await client.ask("say on")).text == "on "

    run(main())


@both
@pytest.mark.parametrize("largest", [1, 700])
def test_records_in_pieces(kind, largest, here, pairs):
    relay = Relay(port_of(here), largest)
    text = once(kind, f"tls:localhost:{relay.port}", "say a b c", timeout=10, ca_file=pairs["here"].cert)
    assert text == "a b c "
    relay.join()


def test_what_comes_with_the_end_of_the_handshake_is_not_left_behind(pairs):
    def serve(peer):
        context = pairs["here"].context()
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # there the server has the handshake's last word
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=True)
        while True:
            incoming.write(peer.recv(65_536))
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                tls.write(b"early")
                peer.sendall(outgoing.read())
                return peer.recv(65_536)  # until the client leaves
            peer.sendall(outgoing.read())

    peer = Peer(serve)
    channel = open_channel(f"tls:127.0.0.1:{peer.port}", 10, Trust(pairs["here"].cert))
    assert channel.receive(0) == b"early"
    assert channel.receive(0) is None
    channel.shut()
    channel.close()
    peer.result()


@both
def test_leaving_says_goodbye_and_waits_for_nobody(kind, pairs):
    def serve(peer):
        with pairs["here"].context().wrap_socket(peer, server_side=True, suppress_ragged_eofs=False) as tls:
            tls.settimeout(10)
            while data := tls.recv(65_536):
                said.append(data)
            return True  # an end without close_notify would have raised

    said: list[bytes] = []
    peer = Peer(serve)
    with pytest.raises((TimedOut, StreamBroken)):
        once(kind, f"tls:127.0.0.1:{peer.port}", timeout=Timeouts(5, 0.05, 0.05), ca_file=pairs["here"].cert)
    assert peer.result()
    assert said


def test_the_servers_goodbye_ends_the_answers(here, pairs):
    with Client(here.address, timeout=10, ca_file=pairs["here"].cert) as client:
        with pytest.raises(StreamBroken, match="closed the connection") as caught:
            client.ask("break")
        assert caught.value.tokens_received == 2
        with pytest.raises(ConnectionFailed):
            client.ping()


def test_waits_have_ends(here, pairs):
    with Client(here.address, timeout=Timeouts(5, 0.05, 0.1), ca_file=pairs["here"].cert) as client:
        with pytest.raises(TimedOut, match="first token"):
            client.ask("silent")
        with pytest.raises(TimedOut, match="next token"):
            client.ask("hang")
        assert client.ask("say on").text == "on "


def test_a_send_within_a_send_comes_after_it():
    class Sock:
        sent: list[bytes] = []

        def sendall(self, data):
            if not self.sent:
                channel.send(b"from within")
            self.sent.append(bytes(data))

    channel = Channel(Sock(), None)
    channel.send(b"first")
    channel.send(b"last")
    assert Sock.sent == [b"first", b"from within", b"last"]


def test_after_a_send_that_broke_off_nothing_is_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.05)
        channel = Channel(ours, None)
        for _ in range(2):  # the second must not continue in the middle of the first
            with pytest.raises(TimeoutError):
                channel.send(bytes(4_000_000))


FAILURES = {
    "no authority": ("here", None, "not of an authority that this system knows.*--ca or ZL_CA"),
    "another authority": ("here", "other", r"not of an authority in .*other\.pem"),
    "another name": ("elsewhere", "elsewhere", r"for another name than 127\.0\.0\.1.*subjectAltName"),
    "expired": ("expired", "expired", "has expired; renew it"),
}


@both
@pytest.mark.parametrize("case", FAILURES)
def test_who_is_not_to_be_believed_is_not_talked_to(kind, case, pairs, monkeypatch):
    monkeypatch.delenv("ZL_CA", raising=False)
    shown, believed, words = FAILURES[case]
    with FakeServer(tls=pairs[shown].context()) as server:
        whole = f"^cannot connect to {server.address}: its certificate .*{words}"
        with pytest.raises(TlsFailed, match=whole) as caught:
            once(kind, server.address, timeout=10, ca_file=pairs[believed].cert if believed else None)
        assert "\n" not in str(caught.value)
        assert not server.requests


@both
def test_a_server_without_tls_is_named(kind, pairs):
    def serve(peer):  # as zl does with bytes that are no frame
        peer.recv(65_536)
        peer.sendall(b"\0\0\0\x05\x1a\x03\x08\x01\x18")

    peer = Peer(serve)
    with pytest.raises(TlsFailed, match=f"does not speak TLS; write tcp:127.0.0.1:{peer.port}, or set tls_cert"):
        once(kind, f"tls:127.0.0.1:{peer.port}", timeout=10, ca_file=pairs["here"].cert)
    peer.result()


@both
def test_a_server_with_tls_behind_a_tcp_address_is_hinted_at(kind, here):
    address = here.address.replace("tls:", "tcp:")
    with pytest.raises((ConnectionFailed, StreamBroken), match=f"certificate and must be called {here.address}"):
        once(kind, address, timeout=10)
    with Client(address, timeout=0.1) as client, pytest.raises(TimedOut, match=f"must be called {here.address}"):
        client.ping()


@both
def test_a_handshake_has_an_end_and_may_break_off(kind, pairs):
    peer = Peer(lambda sock: [sock.recv(65_536), sock.recv(65_536)])  # listens, and says nothing
    with pytest.raises(ConnectionFailed, match="no answer in time"):
        once(kind, f"tls:127.0.0.1:{peer.port}", timeout=0.2, ca_file=pairs["here"].cert)
    peer.result()
    peer = Peer(lambda sock: sock.recv(65_536))  # closes
    with pytest.raises(ConnectionFailed, match="closed during the TLS handshake") as caught:
        once(kind, f"tls:127.0.0.1:{peer.port}", timeout=5, ca_file=pairs["here"].cert)
    assert not isinstance(caught.value, TlsFailed)  # it may be back in a moment
    peer.result()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionFailed, match=r"refused.*zl serve"):
            once(kind, f"tls:127.0.0.1:{taken.getsockname()[1]}", ca_file=pairs["here"].cert)


def test_a_handshake_can_be_cancelled(pairs):
    async def main(port):
        task = asyncio.create_task(AsyncClient(f"tls:127.0.0.1:{port}", ca_file=pairs["here"].cert).connect())
        await until(heard.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def serve(sock):
        sock.recv(65_536)
        heard.set()
        return sock.recv(65_536)

    heard = threading.Event()
    peer = Peer(serve)
    run(main(peer.port))
    with contextlib.suppress(ConnectionResetError):
        assert peer.result() == b""


def test_the_authorities_file(here, pairs, tmp_path, monkeypatch):
    path = tmp_path / "ca.pem"
    for text in (None, "no certificate"):
        if text is not None:
            path.write_text(text)
        for kind in (Client, Pool):
            with pytest.raises(ConfigError, match=r"ca\.pem.*give a PEM file"):
                kind(here.address, ca_file=path)
    shutil.copy(pairs["other"].cert, path)
    with Pool(here.address, ca_file=path) as pool:
        with pytest.raises(TlsFailed):
            pool.ask("say x")
        shutil.copy(pairs["here"].cert, tmp_path / "new")
        (tmp_path / "new").rename(path)
        with Client(here.address, ca_file=pool._trust) as client:
            assert client.ping() < 10  # the file was read again
    monkeypatch.setenv("ZL_CA", pairs["here"].cert)
    assert once("sync", here.address) == "x "


def test_a_pool_uses_the_others_and_says_what_is_wrong_with_one(pairs, tmp_path):
    clock = Clock()
    certificate = Certificate(*pairs["elsewhere"])
    authorities = tmp_path / "ca.pem"
    authorities.write_text("".join(Path(pairs[name].cert).read_text() for name in ("here", "elsewhere")))
    with contextlib.ExitStack() as stack:
        wrong, right = (stack.enter_context(FakeServer(tls=context)) for context in
                        (certificate.context, pairs["here"].context()))  # fmt: skip
        plain = stack.enter_context(FakeServer(tmp_path / "s"))
        addresses = [wrong.address, right.address, plain.address]
        pool = stack.enter_context(Pool(addresses, ca_file=authorities, clock=clock, sleep=clock.sleep, timeout=10))
        assert [pool.ask("say x").text for _ in range(9)] == ["x "] * 9
        assert (len(wrong.requests), len(plain.requests) > 2, len(right.requests) > 2) == (0, True, True)
        assert "another name than 127.0.0.1" in repr(pool.endpoints[0])
        assert clock.slept == []
        certificate.use(tls_context(*pairs["here"]))
        clock.now += 60
        pool.ask("say y")
        deadline = threading.Event()
        for _ in range(500):
            if pool.endpoints[0].probe_at is None:
                break
            deadline.wait(0.01)
        assert [pool.ask("say y").text for _ in range(6)] == ["y "] * 6
        assert wrong.requests
        assert "alive" in repr(pool.endpoints[0])


@both
def test_a_pool_without_anyone_to_believe_does_not_wait(kind, pairs):
    clock = Clock()
    with FakeServer(tls=pairs["expired"].context()) as old, FakeServer(tls=pairs["here"].context()) as other:
        for addresses, words in (
            ([old.address], "has expired"),
            ([old.address, other.address], f"{old.address}: .*expired.*{other.address}: .*not of an authority"),
        ):
            more = {"ca_file": pairs["expired"].cert, "clock": clock}

            async def asked(addresses=addresses, words=words, more=more):
                async with AsyncPool(addresses, **more, sleep=clock.sleep_async) as pool:
                    for _ in range(2):
                        with pytest.raises(TlsFailed, match=words):
                            await pool.ask("say x")

            if kind == "asyncio":
                run(asked())
            else:
                with Pool(addresses, **more, sleep=clock.sleep) as pool:
                    for _ in range(2):
                        with pytest.raises(TlsFailed, match=words):
                            pool.ask("say x")
        assert clock.slept == []


def test_asyncio_pool_of_endpoints_of_each_kind(pairs, tmp_path):
    async def main():
        with FakeServer(tls=pairs["here"].context()) as a, FakeServer(tmp_path / "s") as b, FakeServer() as c:
            async with AsyncPool([a.address, b.address, c.address], ca_file=pairs["here"].cert) as pool:
                assert [(await pool.ask("say x")).text for _ in range(9)] == ["x "] * 9
                assert [len(each.requests) for each in (a, b, c)] == [3, 3, 3]

    run(main())
