"""The clients over TLS: what they say and hear, whom they believe, what a failure is called, and what a pool does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.certificates import Pair, make, signed
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
    Trust,
)
from zl.client.channel import Channel, open_channel
from zl.client.tls import client_context
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
        "signed": signed(folder, "signed", make(folder, "authority", authority=True)),
        "authority": Pair(str(folder / "authority.pem"), str(folder / "authority.key")),
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


def test_a_send_that_was_interrupted_is_the_last():
    class Sock:
        calls = 0

        def sendall(self, data):
            self.calls += 1
            raise KeyboardInterrupt

    sock = Sock()
    channel = Channel(sock, None)
    with pytest.raises(KeyboardInterrupt):
        channel.send(b"cut short")
    depths = set()
    for _ in range(3):
        with pytest.raises(OSError, match="interrupted") as caught:
            channel.send(b"never")
        depths.add(len(caught.traceback))
    assert sock.calls == 1
    assert len(depths) == 1  # the exception is one and the same, its traceback does not grow


class Gate:
    """A socket on which each send waits until it is let through."""

    def __init__(self):
        self.sent: list[tuple[str, bytes]] = []
        self.entered, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.error: OSError | None = None

    def sendall(self, data):
        self.entered.release()
        assert self.let.acquire(timeout=10)
        if self.error:
            raise self.error
        self.sent.append((threading.current_thread().name, bytes(data[:1])))


def sender(channel, data):
    thread = threading.Thread(target=channel.send, args=(data,), name=data[:1].decode())
    thread.start()
    return thread


def queued(channel):
    wait = threading.Event()
    for _ in range(1_000):
        if channel._queued:
            return
        wait.wait(0.01)
    raise AssertionError("nobody waits")


def test_behind_a_mebibyte_that_waits_a_sender_waits_and_takes_over():
    sock = Gate()
    channel = Channel(sock, None)
    first = sender(channel, b"a")
    assert sock.entered.acquire(timeout=10)
    channel.send(b"b" * (1 << 20))  # room for it, so this is left to the other thread
    last = sender(channel, b"c")
    queued(channel)
    channel.send(b"d", wait=False)  # a __del__ never waits
    sock.let.release(4)
    first.join(10)
    last.join(10)
    assert not first.is_alive()
    assert not last.is_alive()
    assert sock.sent == [("a", b"a"), ("c", b"b"), ("c", b"c"), ("c", b"d")]


def test_a_sender_that_waits_hears_that_the_connection_broke():
    sock = Gate()
    sock.error = OSError("gone")
    channel = Channel(sock, None)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(channel.send, b"a")
        assert sock.entered.acquire(timeout=10)
        channel.send(b"b" * (1 << 20))
        last = threads.submit(channel.send, b"c")
        queued(channel)
        sock.let.release()
        for each in (first, last):
            with pytest.raises(OSError, match="gone"):
                each.result(10)
    assert not sock.sent


@pytest.mark.parametrize("broken", [False, True])
def test_leaving_does_not_wait_for_a_server_that_does_not_read(broken, pairs):
    left = threading.Event()

    def serve(peer):
        with pairs["here"].context().wrap_socket(peer, server_side=True):
            assert left.wait(10)

    peer = Peer(serve)
    channel = open_channel(f"tls:127.0.0.1:{peer.port}", 5, Trust(pairs["here"].cert))
    channel._socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        while True:
            channel.send(bytes(1 << 20))
    channel._socket.settimeout(5)
    if not broken:
        channel._broken = None  # as though what was sent had just fitted
    start = time.monotonic()
    channel.shut()
    assert time.monotonic() - start < 2
    channel.close()
    left.set()
    with contextlib.suppress(ConnectionResetError):
        peer.result()


def test_an_error_behind_good_data_does_not_wait_for_more(pairs):
    def serve(peer):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = pairs["here"].context().wrap_bio(incoming, outgoing, server_side=True)
        while True:
            incoming.write(peer.recv(65_536))
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                tls.write(b"good")
                peer.sendall(outgoing.read() + b"\x17\x03\x03\x00\x20" + bytes(32))
                return left.wait(10)
            peer.sendall(outgoing.read())

    left = threading.Event()
    peer = Peer(serve)
    channel = open_channel(f"tls:127.0.0.1:{peer.port}", 10, Trust(pairs["here"].cert))
    found = b""
    while not found:
        found = channel.receive(5) or b""
    assert found == b"good"
    depths = set()
    for _ in range(3):
        with pytest.raises(ssl.SSLError) as caught:
            channel.receive(0)
        depths.add(len(caught.traceback))
    assert len(depths) == 1
    channel.close()
    left.set()
    peer.result()


@pytest.mark.parametrize("timeout", [1e7, 1e12, float("inf")])
def test_waits_may_be_longer_than_poll_counts(timeout, here, pairs):
    for address in (here.address, None):
        if address is None:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.sendall(b"x")
                assert Channel(ours, None).receive(timeout) == b"x"
        else:
            assert once("sync", address, timeout=timeout, ca_file=pairs["here"].cert) == "x "


def test_a_wait_in_pieces_ends_and_one_that_is_over_does_not_begin(monkeypatch):
    monkeypatch.setattr("zl.client.channel._LONGEST_S", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = time.monotonic()
        assert Channel(ours, None).receive(0.05) is None
        assert 0.04 < time.monotonic() - start < 5
        assert Channel(ours, None).receive(-1) is None


@both
@pytest.mark.parametrize("python", ["before 3.13", "from 3.13"])
@pytest.mark.parametrize("believed", ["authority", "signed"])
def test_a_signed_certificate_is_believed_by_its_authority_and_by_itself(kind, python, believed, pairs, monkeypatch):
    def default(cafile=None):
        context = made(cafile=cafile)
        context.verify_flags &= ~added
        if python == "from 3.13":
            context.verify_flags |= added
        return context

    added = ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    made = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", default)
    assert client_context().verify_flags & added == ssl.VERIFY_X509_PARTIAL_CHAIN
    with FakeServer(tls=pairs["signed"].context()) as server:
        assert once(kind, server.address, timeout=10, ca_file=pairs[believed].cert) == "x "
        with pytest.raises(TlsFailed, match="not of an authority"):
            once(kind, server.address, timeout=10, ca_file=pairs["other"].cert)


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
@pytest.mark.parametrize("question", ["say x", "x" * 3_000_000])
def test_a_server_with_tls_behind_a_tcp_address_is_named(kind, question, here):
    address = here.address.replace("tls:", "tcp:")
    whole = f"^the server at {here.address.removeprefix('tls:')} speaks TLS: use {here.address}$"
    with pytest.raises(TlsFailed, match=whole):
        once(kind, address, question, timeout=10)
    with pytest.raises(TlsFailed, match=whole):
        once(kind, address, question, timeout=10, auth_token="t")


@both
@pytest.mark.parametrize("alert", [b"\x15\x03\x01\0\x02\x02\x46", b"\x15\x03\x03\0\x02\x02\x0a"])
def test_a_tls_alert_is_understood(kind, alert):
    def serve(sock):  # as other TLS ends do before they close
        sock.recv(65_536)
        sock.sendall(alert)

    peer = Peer(serve)
    with pytest.raises(TlsFailed, match=f"speaks TLS: use tls:127.0.0.1:{peer.port}"):
        once(kind, f"tcp:127.0.0.1:{peer.port}", timeout=10)
    peer.result()


@both
def test_a_server_that_closes_without_a_word_and_has_no_tls_is_not_said_to_speak_it(kind):
    def serve():
        for _ in range(2):  # the question, and whether it is TLS
            sock, _ = listening.accept()
            with sock:
                heard.append(sock.recv(65_536))

    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises((ConnectionFailed, StreamBroken), match=r"without a word.*it has a certificate") as caught:
            once(kind, f"tcp:127.0.0.1:{listening.getsockname()[1]}", timeout=10)
        thread.join(10)
    assert not isinstance(caught.value, TlsFailed)
    assert [each[:2] for each in heard] == [b"\0\0", b"\x16\x03"]


@both
def test_a_client_that_is_closed_before_it_heard_anything_asks_nobody(kind):
    async def left(address):
        async with AsyncClient(address, timeout=0.1) as client:
            with pytest.raises(TimedOut):
                await client.ask("say x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp:127.0.0.1:{listening.getsockname()[1]}"
        if kind == "asyncio":
            run(left(address))
        else:
            client = Client(address, timeout=0.1)
            stream = client.stream("say x")
            reader = threading.Thread(target=client.pump, args=(stream._call.readable, 10))
            reader.start()
            client.close()
            reader.join(10)
            assert client.closed == "this client was closed"
        listening.settimeout(0.2)
        listening.accept()[0].close()
        with pytest.raises(TimeoutError):
            listening.accept()


@both
def test_a_ping_to_a_server_with_tls_is_told_of_it(kind, here):
    address = here.address.replace("tls:", "tcp:")
    told = pytest.raises(TimedOut, match=f"must be called {here.address}")

    async def ping() -> None:
        async with AsyncClient(address, timeout=0.1) as client:
            with told:
                await client.ping()

    if kind == "asyncio":
        run(ping())
        return
    with Client(address, timeout=0.1) as client, told:
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
