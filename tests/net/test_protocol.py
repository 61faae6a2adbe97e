"""Connections over real sockets: berths, pauses, half-close, slow readers, ends. Both loops where it is cheap."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import socket
import ssl
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.certificates import self_signed
from tests.net.harness import INFO, App, ask, run, serving
from zl.errors import Code, Finish, InvariantError
from zl.net import codec
from zl.net.codec import Operation
from zl.net.frames import PING, Payload, Ping, frame
from zl.net.host import Limits
from zl.net.protocol import Connection

both_loops = pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
both_sockets = pytest.mark.parametrize("where", ["tcp", "unix"])


class Spy(Connection):
    """Records where each piece of a payload lands."""

    landed: list[int] = []

    def buffer_updated(self, nbytes: int) -> None:
        if self._berth is not None:
            self.landed.append(ctypes.addressof(ctypes.c_char.from_buffer(self._target)))
        super().buffer_updated(nbytes)


@both_loops
def test_a_payload_is_received_into_the_arena(tmp_path, kind):
    Spy.landed.clear()

    async def main() -> None:
        async with serving(tmp_path, factory=Spy) as served:
            peer = await served.peer()
            for request_id in range(3):
                await peer.ask(request_id, messages=["x" * 200_000])
                assert (await peer.answer())[-1].error is None
            assert served.app.submitted[0].messages == [b"x" * 200_000]
            assert Spy.landed
            assert all(served.arena.address <= at < served.arena.address + served.arena.n_bytes for at in Spy.landed)

    run(main(), kind)


@both_loops
def test_time_to_receive_and_parse_is_kept_by_frame_and_waiting_for_the_peer_is_not_in_it(tmp_path, kind):
    async def main() -> None:
        async with serving(tmp_path) as served:
            peer = await served.peer()
            data = ask(1, messages=["x" * 2_000])
            await peer.send(data[:1_000])
            await asyncio.sleep(0.6)
            await peer.send(data[1_000:])
            assert (await peer.answer())[-1].error is None
            await peer.send(PING)
            assert isinstance(await peer.event(), Ping)
            await peer.ask(2, messages=[""])  # parsed and refused
            assert (await peer.answer())[-1].error is not None
            counters = served.net.counters
            assert counters.frame_read.count == counters.parse.count == 2, "a ping has no payload"
            (request,) = served.app.submitted
            assert 0 < request.read_ns * 1e-9 < counters.frame_read.total < 0.5
            assert 0 < request.parse_ns * 1e-9 < counters.parse.total
            assert counters.write.count >= 1

    run(main(), kind)


def test_the_connection_is_no_data_received_protocol():
    assert issubclass(Connection, asyncio.BufferedProtocol)
    assert not issubclass(Connection, asyncio.Protocol)
    assert not hasattr(Connection, "data_received")


@both_loops
@both_sockets
def test_without_a_berth_reading_pauses_and_nothing_is_lost(tmp_path, kind, where):
    async def main() -> None:
        async with serving(tmp_path, n_berths=1) as served:
            holder = await served.peer(where)
            slow = ask(100, messages=["slow"])
            await holder.send(slow[:10])
            await served.until(lambda: served.arena.in_use == 1)
            waiting = [await served.peer(where) for _ in range(5)]
            for i, peer in enumerate(waiting):
                # Two requests and a ping at once, so that what is behind the waiting header is kept too.
                await peer.send(ask(i, messages=[f"{i} " * (20_000 * i + 1)]) + PING + ask(50 + i))
                await served.until(lambda i=i: served.arena.waiting == i + 1)
            served.arena.check()
            assert not served.app.submitted
            await holder.send(slow[10:])
            for i, peer in enumerate(waiting):
                seen = [await peer.event() for _ in range(2 * 4 + 1)]
                assert seen.count(Ping()) == 1
                done = [codec.decode_response(e.data) for e in seen if isinstance(e, Payload)]
                assert sorted(d.request_id for d in done if d.is_finished) == [i, 50 + i]
            assert (await holder.answer())[-1].request_id == 100
            order = [request.request_id for request in served.app.submitted]
            assert [i for i in order if i < 50] == [0, 1, 2, 3, 4]  # first come, first served
            assert served.app.submitted[order.index(4)].messages == [("4 " * 80_001).encode()]
            assert served.net.counters.berth_waits >= 5

    run(main(), kind)


@both_loops
@pytest.mark.parametrize("how", ["close", "reset"])
def test_vanishing_inside_a_frame_frees_the_berth_for_who_waits(tmp_path, kind, how):
    async def main() -> None:
        async with serving(tmp_path, n_berths=1) as served:
            holder, waiter, gone = [await served.peer() for _ in range(3)]
            await holder.send(ask(1)[:10])
            await served.until(lambda: served.arena.in_use == 1)
            for peer in (gone, waiter):
                await peer.send(ask(2))
            await served.until(lambda: served.arena.waiting == 2)
            gone.reset()
            await (holder.close() if how == "close" else asyncio.sleep(0, holder.reset()))
            assert (await waiter.answer())[-1].error is None
            await served.until(lambda: served.arena.in_use == 0)

    run(main(), kind)


@both_loops
@both_sockets
def test_half_close_still_delivers_and_then_closes(tmp_path, kind, where):
    async def main() -> None:
        async with serving(tmp_path, App(held=True)) as served:
            peer = await served.peer(where)
            peer.writer.write(ask(1) + ask(2))
            peer.writer.write_eof()
            await served.until(lambda: served.net.hangups.n_watched == 1)
            for _ in range(3):
                served.app.step()
                await asyncio.sleep(0.01)
            ended = [frame.request_id for _ in range(2) for frame in await peer.answer() if frame.is_finished]
            assert ended == [1, 2]
            assert await peer.event() is None
            assert not served.app.cancelled
            assert served.net.counters.hangups == 0

    run(main(), kind)


@both_loops
def test_the_end_inside_a_frame_is_a_framing_error(tmp_path, kind):
    async def main() -> None:
        async with serving(tmp_path, App(held=True)) as served:
            peer = await served.peer()
            await peer.send(ask(1))
            await peer.send(ask(2)[:-1])
            await served.until(lambda: served.app.submitted)
            peer.writer.write_eof()
            assert await peer.error() == (Code.BAD_FRAME, 0)
            assert await peer.event() is None
            assert not served.app.jobs

    run(main(), kind)


@both_loops
@both_sockets
def test_a_peer_that_closed_is_noticed_without_waiting_for_a_failed_write(tmp_path, kind, where):
    async def main() -> None:
        async with serving(tmp_path, App(held=True, n_tokens=1000)) as served:
            peer = await served.peer(where)
            await peer.ask(1)
            await served.until(lambda: served.app.jobs)
            await peer.close()
            if where == "tcp":
                # Until something is sent, a close looks like a half-close on TCP; one step's frame brings the reset.
                await served.until(lambda: served.net.hangups.n_watched == 1)
                served.app.step()
            await served.until(lambda: served.app.closed_conns)
            assert not served.app.jobs
            assert served.net.counters.hangups == 1

    run(main(), kind)


@both_loops
def test_a_reset_cancels_everything(tmp_path, kind):
    async def main() -> None:
        async with serving(tmp_path, App(held=True)) as served:
            peer = await served.peer()
            await peer.send(ask(1) + ask(2))
            await served.until(lambda: len(served.app.submitted) == 2)
            peer.reset()
            await served.until(lambda: not served.app.jobs)

    run(main(), kind)


@both_loops
def test_a_framing_error_cancels_the_rest_and_reaches_a_peer_that_is_still_sending(tmp_path, kind):
    async def main() -> None:
        async with serving(tmp_path, App(held=True)) as served:
            peer = await served.peer()
            await peer.ask(1)
            await served.until(lambda: served.app.jobs)
            # A close with these bytes unread would be a reset, and the answer would be lost with it.
            await peer.send(b"\xff" * 300_000)
            assert await peer.error() == (Code.BAD_FRAME, 0)
            assert await peer.event() is None
            assert not served.app.jobs
            assert served.net.counters.errors[Code.BAD_FRAME] == 1

    run(main(), kind)


def test_a_peer_that_lingers_is_cut_off(tmp_path):
    async def main() -> None:
        async with serving(tmp_path, limits=Limits(linger_s=0.05)) as served:
            peer = await served.peer()
            await peer.send(b"GET / HTTP/1.1\r\n\r\n")
            assert await peer.error() == (Code.BAD_FRAME, 0)
            await served.until(lambda: not served.net.connections)

    run(main())


@both_loops
def test_a_slow_reader_is_bounded_and_its_requests_are_cancelled(tmp_path, kind):
    cap = 1 << 20

    async def main() -> None:
        app = App(held=True, n_tokens=10**9, text=b"t" * 50_000)
        async with serving(tmp_path, app, limits=Limits(output_cap=cap)) as served:
            peer = await served.peer()
            await peer.ask(1, max_tokens=10**9)
            await served.until(lambda: app.jobs)
            (conn,) = served.net.connections
            n_steps = 0
            while app.jobs:
                app.step()
                assert conn._transport.get_write_buffer_size() <= cap
                n_steps += 1
                await asyncio.sleep(0)
            assert n_steps > 20
            assert served.net.counters.aborted_slow == 1
            await served.until(lambda: not served.net.connections)

    run(main(), kind)


@both_loops
def test_while_a_peer_does_not_read_its_requests_are_not_read(tmp_path, kind):
    async def main() -> None:
        app = App(held=True, n_tokens=10**9, text=b"t" * 50_000)
        async with serving(tmp_path, app, limits=Limits(output_cap=64 << 20)) as served:
            peer = await served.peer()
            await peer.ask(1, max_tokens=10**9)
            await served.until(lambda: app.jobs)
            (conn,) = served.net.connections
            n_steps = 0
            while not conn._pauses:
                app.step()
                n_steps += 1
                await asyncio.sleep(0)
            await peer.ask(2)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert len(app.submitted) == 1
            for _ in range(n_steps):
                await peer.response()
            await served.until(lambda: len(app.submitted) == 2)
            app.n_tokens = 1

    run(main(), kind)


def test_a_duplicate_id_is_refused_and_the_connection_lives_on(tmp_path):
    async def main() -> None:
        async with serving(tmp_path, App(held=True)) as served:
            peer = await served.peer()
            await peer.send(ask(1) + ask(1))
            assert await peer.error() == (Code.DUPLICATE_ID, 1)
            for _ in range(3):
                served.app.step()
            assert (await peer.answer())[-1].error is None
            await peer.ask(1)  # the id is free again
            await served.until(lambda: len(served.app.submitted) == 2)
            assert served.net.counters.errors[Code.DUPLICATE_ID] == 1
            assert served.app.refusals == [(1, Code.DUPLICATE_ID)]

    run(main())


def test_the_applications_refusal_reaches_the_peer_with_its_id_and_hint(tmp_path):
    async def main() -> None:
        async with serving(tmp_path, App(held=True, queue_limit=1)) as served:
            peer = await served.peer()
            await peer.send(ask(1) + ask(2) + ask(2))
            for _ in range(2):  # a refused id is free at once
                response = await peer.response()
                assert response.request_id == 2
                assert response.error is not None
                assert (response.error.code, response.error.retry_after_ms) == (Code.OVERLOADED, 20)
            (conn,) = served.net.connections
            assert conn.n_in_flight == 1

    run(main())


def test_cancel_ends_one_request_and_leaves_the_other(tmp_path):
    async def main() -> None:
        async with serving(tmp_path, App(held=True)) as served:
            peer = await served.peer()
            await peer.send(ask(1) + ask(2))
            await peer.ask(1, operation=Operation.CANCEL, messages=())
            (last,) = await peer.answer()
            assert (last.request_id, last.finish) == (1, Finish.CANCELLED)
            await peer.ask(99, operation=Operation.CANCEL, messages=())
            await peer.ping()
            assert served.app.cancelled == [1]
            (conn,) = served.net.connections
            assert conn.n_in_flight == 1

    run(main())


def test_hello_tells_and_unlocks(tmp_path):
    async def main() -> None:
        async with serving(tmp_path, auth_token=b"secret") as served:
            peer = await served.peer()
            await peer.ping()
            await peer.ask(5, operation=Operation.HELLO, auth_token=b"secret", messages=())
            response = await peer.response()
            assert (response.request_id, response.server, response.is_finished) == (5, INFO, True)
            await peer.ask(6)
            assert (await peer.answer())[-1].error is None
            for first in (ask(7), ask(7, operation=Operation.HELLO, auth_token=b"secreT", messages=())):
                stranger = await served.peer("unix")
                await stranger.send(first + ask(8))
                assert await stranger.error() == (Code.UNAUTHENTICATED, 7)
                assert await stranger.event() is None
            assert [request.request_id for request in served.app.submitted] == [6]

    run(main())


@pytest.mark.parametrize("field", ["accepting", "healthy"])
def test_an_unready_server_closes_new_pingers_and_keeps_old_ones(tmp_path, field):
    async def main() -> None:
        async with serving(tmp_path) as served:
            old = await served.peer()
            await old.ping()
            setattr(served.app, field, False)
            new = await served.peer()
            await new.send(PING)
            assert await new.event() is None
            await old.ping()

    run(main())


def test_draining_refuses_new_finishes_old_and_closes(tmp_path):
    async def main() -> None:
        async with serving(tmp_path, App(held=True)) as served:
            peer = await served.peer()
            await peer.ask(1)
            await served.until(lambda: served.app.jobs)
            served.app.accepting = False
            await peer.ask(2)
            assert await peer.error() == (Code.DRAINING, 2)
            for _ in range(3):
                served.app.step()
            assert (await peer.answer())[-1].finish is Finish.LENGTH
            served.net.close_connections()
            assert await peer.event() is None

    run(main())


@both_loops
def test_a_peer_that_may_be_about_to_ask_is_expected_until_it_knows_of_the_drain(tmp_path, kind, monkeypatch):
    async def main() -> None:
        async with serving(tmp_path) as served:
            net = served.net
            assert not net.expecting
            silent, served_before, half_closed, gone = [await served.peer() for _ in range(4)]
            await served.until(lambda: len(net.connections) == 4)
            await served_before.ask(1)
            assert (await served_before.answer())[-1].error is None
            served.app.accepting = False
            half_closed.writer.write_eof()
            await gone.close()
            await served.until(lambda: len(net.connections) == 2)  # both have nothing to say any more
            for request_id in range(2, 5):  # a connection is shared: what follows on it is answered too
                for peer in (silent, served_before):
                    assert net.expecting
                    await peer.ask(request_id)
                    assert await peer.error() == (Code.DRAINING, request_id)
                await asyncio.sleep(0.1)
            assert net.expecting
            monkeypatch.setattr("zl.net.protocol.TOLD_S", 0.05)
            await served.until(lambda: not net.expecting)  # both know

            late, slow = await served.peer(), await served.peer()
            await served.until(lambda: len(net.connections) == 4)
            assert net.expecting
            monkeypatch.setattr("zl.net.protocol.LAST_CALL_S", 0.05)
            await served.until(lambda: not net.expecting)
            await slow.send(ask(3)[:7])
            await served.until(lambda: net.expecting)
            await asyncio.sleep(0.1)
            assert net.expecting  # however long ago it began
            await slow.send(ask(3)[7:])
            assert await slow.error() == (Code.DRAINING, 3)
            await served.until(lambda: not net.expecting)
            await late.ask(4)
            assert await late.error() == (Code.DRAINING, 4)  # as long as its connection is there
            net.close_connections()
            assert net.telling
            await served.until(lambda: not net.telling)

    run(main(), kind)


@both_loops
@pytest.mark.parametrize("sent", [2, 10])
def test_a_frame_that_takes_too_long_loses_its_berth(tmp_path, kind, sent):
    async def main() -> None:
        async with serving(tmp_path, limits=Limits(frame_timeout_s=0.05)) as served:
            peer = await served.peer()
            await peer.ask(1)
            assert (await peer.answer())[-1].error is None
            await peer.send(ask(2)[:sent])
            assert await peer.error() == (Code.BAD_FRAME, 0)
            assert await peer.event() is None
            assert served.arena.in_use == 0

    run(main(), kind)


def test_waiting_for_a_berth_is_not_the_peers_delay(tmp_path):
    async def main() -> None:
        async with serving(tmp_path, n_berths=1, limits=Limits(frame_timeout_s=0.2)) as served:
            taken = served.arena.acquire()
            peer = await served.peer()
            await peer.ask(1)
            await asyncio.sleep(0.5)
            served.arena.release(taken)
            assert (await peer.answer())[-1].error is None

    run(main())


@both_loops
def test_who_does_not_read_answers_cannot_keep_a_berth_with_half_a_frame(tmp_path, kind):
    async def main() -> None:
        app = App(held=True, n_tokens=10**9, text=b"t" * 50_000)
        limits = Limits(output_cap=64 << 20, frame_timeout_s=0.2, linger_s=0.2)
        async with serving(tmp_path, app, n_berths=1, limits=limits) as served:
            peer, other = await served.peer(), await served.peer()
            await peer.ask(1, max_tokens=10**9)
            await served.until(lambda: app.jobs)
            await peer.send(ask(2)[:10])
            await served.until(lambda: served.arena.in_use == 1)
            (conn,) = (conn for conn in served.net.connections if conn.n_in_flight)
            while not conn._pauses:
                app.step()
                await asyncio.sleep(0)
            await other.ask(3, max_tokens=1)
            await served.until(lambda: len(app.submitted) == 2)
            assert served.net.counters.errors[Code.BAD_FRAME] == 1
            app.n_tokens = 1

    run(main(), kind)


@both_loops
def test_a_peer_that_leaves_while_it_waits_for_a_berth_is_noticed(tmp_path, kind):
    async def main() -> None:
        async with serving(tmp_path, n_berths=1) as served:
            taken = served.arena.acquire()
            peer, other = await served.peer("unix"), await served.peer("unix")
            await peer.send(ask(1))
            await served.until(lambda: served.arena.waiting == 1)
            await peer.close()
            await served.until(lambda: served.net.counters.connections_open == 1)
            assert (served.arena.waiting, served.net.counters.hangups) == (0, 1)
            served.arena.release(taken)
            await other.ask(2)
            assert (await other.answer())[-1].error is None

    run(main(), kind)


@both_loops
def test_many_requests_pipeline_on_one_connection(tmp_path, kind):
    async def main() -> None:
        async with serving(tmp_path) as served:
            peer = await served.peer()
            await peer.send(b"".join(ask(i) for i in range(500)))
            finished = set()
            while len(finished) < 500:
                finished.add((await peer.answer())[-1].request_id)
            assert finished == set(range(500))
            counters = served.net.counters
            assert (counters.frames_in, counters.frames_out) == (500, 500 * 4)

    run(main(), kind)


@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=200), eof=st.booleans())
def test_random_bytes_leave_nothing_behind(tmp_path_factory, data, eof):
    async def main() -> None:
        async with serving(tmp_path_factory.mktemp("s"), limits=Limits(max_frame=100)) as served:
            peer = await served.peer()
            await peer.send(data)
            if eof:
                peer.writer.write_eof()
                while (event := await peer.event()) is not None:
                    assert isinstance(event, Ping | Payload)

    run(main())


def test_an_application_bug_ends_the_connection_and_nothing_else(tmp_path):
    class Buggy(App):
        def submit(self, conn: Any, request: codec.Request) -> None:
            if request.request_id == 13:
                raise InvariantError("a bug")
            super().submit(conn, request)

    async def main() -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with serving(tmp_path, Buggy()) as served:
            unlucky, other = await served.peer(), await served.peer()
            await unlucky.ask(13)
            with contextlib.suppress(ConnectionError):  # either an end or a reset will do
                assert await unlucky.event() is None
            await other.ask(1)
            assert (await other.answer())[-1].error is None
        assert any(isinstance(context.get("exception"), InvariantError) for context in reported)

    run(main())


# --- writes, seen from a transport that records -----------------------------------------------------------------------


class Recorder(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.aborted = False
        self.waiting = 0

    def write(self, data: Any) -> None:
        self.writes.append(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


def test_a_steps_frames_leave_in_one_write_of_bytes(tmp_path):
    async def main() -> None:
        async with serving(tmp_path) as served:
            conn, transport = Connection(served.net), Recorder()
            conn.connection_made(transport)
            frames = [codec.encode_tokens(i, [i], b"x") for i in range(32)]
            for data in frames:
                conn.queue(data)
            assert transport.writes == []
            conn.flush()
            conn.flush()
            assert transport.writes == [b"".join(frames)]
            assert type(transport.writes[0]) is bytes
            transport.waiting = served.net.limits.output_cap
            conn.queue(frames[0])
            conn.flush()
            assert transport.aborted
            assert len(transport.writes) == 1
            conn.queue(frames[0])  # in silence: the application has been told
            conn.flush()
            conn.connection_lost(None)
            conn.close()

    run(main())


@both_loops
def test_a_connection_knows_who_its_peer_is(tmp_path, kind):
    async def main() -> None:
        async with serving(tmp_path) as served:
            tcp, _ = await served.peer(), await served.peer("unix")
            await served.until(lambda: len(served.net.connections) == 2)
            host, port = tcp.writer.get_extra_info("sockname")
            named = {conn.name.partition("-")[0]: conn.peer for conn in served.net.connections}
            assert named == {"tcp": f"{host}:{port}", "unix": f"uid {os.getuid()}"}

    run(main(), kind)


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    return self_signed(tmp_path_factory.mktemp("tls"), "localhost", "IP:127.0.0.1")


@both_loops
def test_tls_carries_the_same_wire(tmp_path, kind, certificate):
    from zl.net.tls import tls_context

    async def main() -> None:
        client = ssl.create_default_context(cafile=certificate[0])
        async with serving(tmp_path, n_berths=1, tls=tls_context(*certificate)) as served:
            peers = [await served.peer(ssl=client) for _ in range(3)]
            taken = served.arena.acquire()
            for i, peer in enumerate(peers):
                await peer.send(ask(i, messages=["x" * 200_000]) + PING)
            await served.until(lambda: served.arena.waiting == 3)
            await asyncio.sleep(0.02)
            served.arena.release(taken)
            for peer in peers:
                events = [await peer.event() for _ in range(5)]
                assert events.count(Ping()) == 1
                await peer.send(frame(b"\x00\x01"))
                assert await peer.error() == (Code.BAD_FRAME, 0)
                assert await peer.event() is None
            assert [request.messages for request in served.app.submitted] == [[b"x" * 200_000]] * 3
            plain = await served.peer("unix")  # a Unix peer is on this machine and needs no TLS
            await plain.ping()

    run(main(), kind)


@both_loops
def test_one_amid_a_handshake_is_expected_and_one_that_failed_at_it_is_not_for_long(
    tmp_path, kind, certificate, monkeypatch
):
    from zl.net.tls import tls_context

    async def main() -> None:
        client = ssl.create_default_context(cafile=certificate[0])
        async with serving(tmp_path, tls=tls_context(*certificate)) as served:
            peer = await served.peer()
            await served.until(lambda: served.net.expecting)
            assert not served.net.connections
            await peer.send(PING * 2)  # no handshake
            with contextlib.suppress(ConnectionError):
                await peer.reader.read()
            monkeypatch.setattr("zl.net.protocol.LAST_CALL_S", 0.05)
            await served.until(lambda: not served.net.expecting)
            monkeypatch.undo()
            good = await served.peer(ssl=client)
            assert served.net.expecting
            await good.ping()

    run(main(), kind)


def test_a_peer_that_speaks_http_is_told_so(tmp_path):
    async def main() -> None:
        async with serving(tmp_path) as served:
            peer = await served.peer()
            await peer.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            event = await peer.event()
            response = codec.decode_response(event.data)
            assert response.error.code is Code.BAD_FRAME
            assert "HTTP request" in response.error.message
            assert "9433" in response.error.message

    run(main())


def test_the_last_descriptors_are_warned_of_once_a_minute(tmp_path, caplog):
    async def main() -> None:
        with socket.socket() as probe:
            lowest = probe.fileno()
        limit = lowest + 32
        async with serving(tmp_path, max_files=limit) as served:
            peers = 0
            while not caplog.records:
                await served.peer()
                peers += 1
                assert peers < 40
            await served.until(lambda: len(served.net.connections) == peers)
            highest = max(conn.fd for conn in served.net.connections)
            assert limit - 8 <= highest < limit
            (record,) = caplog.records
            for words in (f"limit of {limit} open files", "will be reset", "LimitNOFILE=", "ulimit -Hn"):
                assert words in record.getMessage()
            await served.peer()
            await served.until(lambda: len(served.net.connections) == peers + 1)
            assert len(caplog.records) == 1
            served.net._warned_at -= 61
            await served.peer()
            await served.until(lambda: len(caplog.records) == 2)

    run(main())
