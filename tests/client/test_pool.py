"""zl/client/pool.py and aio_pool.py over real sockets: balancing, retry, back-off, ejection, probing, reconnecting."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.client.kit import Clock, HoldingServer, run, until
from tests.fake_server import INFO, FakeServer
from zl.client import (
    AsyncPool,
    BadRequest,
    ConnectionFailed,
    DeadlineExceeded,
    Overloaded,
    Pool,
    StreamBroken,
    TimedOut,
    Timeouts,
    Unauthenticated,
    ZlClientError,
)
from zl.errors import Code, PeerError
from zl.net.codec import encode_error, encode_server_info, pack_server_info


class BusyServer(FakeServer):
    """Refuses the first requests with a hint, then answers."""

    def __init__(self, refusals: int, code: Code, retry_after_ms: int = 0, unix=None):
        super().__init__(unix)
        self.refusals, self._code, self._retry_after_ms = refusals, code, retry_after_ms

    async def _answer(self, request, writer):
        if self.refusals > 0:
            self.refusals -= 1
            error = PeerError(self._code, "not now", retry_after_ms=self._retry_after_ms)
            writer.write(encode_error(error, request.request_id))
        else:
            await super()._answer(request, writer)


class LeavingServer(HoldingServer):
    """Two servers behind one address: once `leaving`, connections that were answered before are refused."""

    def __init__(self, unix=None):
        super().__init__(unix)
        self.old, self.leaving, self.refused = set(), False, 0

    async def _answer(self, request, writer):
        if not self.leaving:
            self.old.add(writer)
        elif writer in self.old:
            self.refused += 1
            writer.write(encode_error(PeerError(Code.DRAINING, "going down"), request.request_id))
            return
        await super()._answer(request, writer)


@pytest.fixture
def three(tmp_path):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(HoldingServer(tmp_path / f"s{i}")) for i in range(3)]


def addresses(servers):
    return [server.address for server in servers]


def in_flight(pool):
    return [endpoint.in_flight for endpoint in pool.endpoints]


def test_requests_go_where_the_fewest_are(three):
    with Pool(addresses(three)) as pool:
        streams = [pool.stream("held x") for _ in range(6)]
        assert in_flight(pool) == [2, 2, 2]
        for server in three:
            assert server.holding.acquire(timeout=10)
            server.release()
        assert ["".join(chunk.text for chunk in stream) for stream in streams] == ["x "] * 6
        assert in_flight(pool) == [0, 0, 0]
        pool.stream("endless").close()
        left = pool.stream("endless")
        next(left)
        del left
        assert in_flight(pool) == [0, 0, 0]


@pytest.mark.parametrize("code", [Code.OVERLOADED, Code.DRAINING, Code.INTERNAL])
def test_a_refused_request_moves_to_another_endpoint_at_once(tmp_path, code):
    clock = Clock()
    with BusyServer(100, code, 60_000, tmp_path / "a") as busy, FakeServer(tmp_path / "b") as free:
        with Pool([busy.address, free.address], clock=clock, sleep=clock.sleep) as pool:
            assert [pool.ask("say x").text for _ in range(4)] == ["x "] * 4
        assert (clock.slept, len(busy.requests)) == ([], 1)  # spared for the minute that it asked for


def test_back_off_waits_as_long_as_the_server_said(tmp_path):
    clock = Clock()
    with BusyServer(2, Code.OVERLOADED, 1_500, tmp_path / "a") as server:
        with Pool(server.address, clock=clock, sleep=clock.sleep) as pool:
            assert pool.ask("say x").text == "x "
        assert clock.slept == [1.5, 1.5]
        server.refusals = 100
        with Pool(server.address, clock=clock, sleep=clock.sleep, attempts=3) as pool, pytest.raises(Overloaded):
            pool.ask("say x")
        with Pool(server.address, clock=clock, sleep=clock.sleep) as pool, pytest.raises(Overloaded):
            pool.ask("say x", deadline_ms=1_000)  # before the deadline there is no second attempt


def test_the_deadline_shrinks_with_each_attempt(tmp_path):
    clock = Clock()
    with BusyServer(1, Code.OVERLOADED, 400, tmp_path / "a") as server:
        with Pool(server.address, clock=clock, sleep=clock.sleep) as pool:
            assert pool.ask("say x", deadline_ms=1_000).text == "x "
        assert [request.deadline_ms for request in server.requests] == [1_000, 600]
    with BusyServer(1, Code.OVERLOADED, 400, tmp_path / "b") as server:
        # The pause ends before the deadline, but the sleep took longer than it should.
        slow = Clock()
        pool = Pool(server.address, clock=slow, sleep=lambda seconds: slow.sleep(seconds + 1))
        with pool, pytest.raises(DeadlineExceeded):
            pool.ask("say x", deadline_ms=1_000)


def test_what_only_the_caller_can_mend_is_not_tried_again(three):
    with Pool(addresses(three)) as pool:
        with pytest.raises(BadRequest):
            pool.ask("fail BAD_REQUEST")
        with pytest.raises(StreamBroken) as broken:
            pool.ask("break")
        assert broken.value.tokens_received == 2
        assert sum(len(server.requests) for server in three) == 2
        with pytest.raises(BadRequest):
            pool.ask("x", temperatur=1)
        assert in_flight(pool) == [0, 0, 0]


def test_a_dead_endpoint_is_ejected_probed_and_taken_back(tmp_path):
    clock = Clock()
    path = tmp_path / "late"
    with FakeServer(tmp_path / "a") as alive:
        with Pool([f"unix:{path}", alive.address], clock=clock, sleep=clock.sleep) as pool:
            assert [pool.ask("say x").text for _ in range(4)] == ["x "] * 4
            dead = pool.endpoints[0]
            assert dead.probe_at is not None
            with FakeServer(path) as late:
                clock.now += 60
                assert pool.ask("say x").text == "x "  # this one starts the probe, and waits for nothing
                for _ in range(1_000):
                    if dead.probe_at is None:
                        break
                    clock.sleep(0)
                assert [pool.ask("say y").text for _ in range(4)] == ["y "] * 4
                assert len(late.requests) == 2
        assert clock.slept.count(0) == len(clock.slept)


def test_a_server_that_drains_is_left_for_the_one_that_took_its_address(tmp_path):
    clock = Clock()
    with LeavingServer(tmp_path / "s") as server, Pool(server.address, clock=clock, sleep=clock.sleep) as pool:
        held = pool.stream("held to the end")
        assert server.holding.acquire(timeout=10)
        assert pool.ask("say x").text == "x "
        server.leaving = True
        assert [pool.ask("say y").text for _ in range(5)] == ["y "] * 5
        assert (server.refused, clock.slept) == (1, [])  # a new connection at once, and the old one never again
        server.closed.clear()
        server.release()
        assert "".join(chunk.text for chunk in held) == "to the end "  # it was not closed on what it still said
        assert server.closed.wait(10)  # with its last answer it has gone
        assert in_flight(pool) == [0]


def test_asyncio_a_server_that_drains_is_left_for_the_one_that_took_its_address(tmp_path):
    async def main():
        clock = Clock()
        with LeavingServer(tmp_path / "s") as server:
            async with AsyncPool(server.address, clock=clock, sleep=clock.sleep_async) as pool:
                held = asyncio.create_task(pool.ask("held to the end"))
                await until(lambda: server.holding.acquire(blocking=False))
                assert (await pool.ask("say x")).text == "x "
                server.leaving = True
                answers = await asyncio.gather(*(pool.ask("say y") for _ in range(5)))
                assert [answer.text for answer in answers] == ["y "] * 5
                assert (server.refused, clock.slept) == (5, [])
                await pool.ask("say y")
                server.release()
                assert (await held).text == "to the end "
                server.closed.clear()
                await pool.ask("say z")
                await until(server.closed.is_set)
                assert (server.refused, in_flight(pool)) == (5, [0])

    run(main())


def test_an_answer_that_times_out_leaves_the_others_of_its_connection_alone(tmp_path):
    with HoldingServer(tmp_path / "s") as server, Pool(server.address, timeout=Timeouts(5, 0.2, 5)) as pool:
        begun = pool.stream("hang")
        assert next(begun).text == "one "
        with pytest.raises(TimedOut):
            pool.ask("silent")
        assert next(begun).text == "two "
        assert pool.ask("say x").text == "x "
        begun.close()


def test_a_restarted_server_is_connected_to_again(tmp_path):
    clock = Clock()
    path = tmp_path / "s"
    with Pool(f"unix:{path}", clock=clock, sleep=clock.sleep) as pool:
        for word in ("one", "two"):
            with FakeServer(path):
                assert pool.ask(f"say {word}").text == f"{word} "
            path.unlink(missing_ok=True)
        with pytest.raises(ConnectionFailed):
            pool.ask("say three")
    with pytest.raises(ConnectionFailed, match="closed"):
        pool.ask("say four")


def test_an_auth_token_opens_every_endpoint(tmp_path):
    with FakeServer(tmp_path / "a", auth_token=b"t") as a, FakeServer(tmp_path / "b", auth_token=b"t") as b:
        with Pool([a.address, b.address], auth_token="t") as pool:
            assert [pool.ask("say x").text for _ in range(2)] == ["x "] * 2
        with Pool([a.address, b.address], auth_token="wrong") as pool, pytest.raises(Unauthenticated):
            pool.ask("say x")


def test_three_endpoints_one_killed_loses_no_request_that_had_not_begun(tmp_path):
    with contextlib.ExitStack() as others, contextlib.ExitStack() as doomed:
        servers = [others.enter_context(HoldingServer(tmp_path / f"s{i}")) for i in range(2)]
        servers.append(doomed.enter_context(HoldingServer(tmp_path / "s2")))
        pool = others.enter_context(Pool(addresses(servers)))
        begun = [pool.stream("hang") for _ in range(3)]
        for stream in begun:
            next(stream)  # one on each, begun
        waiting = [pool.stream(f"held {i}") for i in range(30)]
        for server in servers:
            for _ in range(10):
                assert server.holding.acquire(timeout=10)
        doomed.close()
        with ThreadPoolExecutor(33) as threads:
            texts = [threads.submit(lambda s: "".join(chunk.text for chunk in s), stream) for stream in waiting]
            for server in servers[:2]:
                for _ in range(5):
                    assert server.holding.acquire(timeout=10)  # those of the killed one have come
                server.release()
            assert [each.result(10) for each in texts] == [f"{i} " for i in range(30)]
        (lost,) = [stream for stream in begun if stream.address == servers[2].address]
        with pytest.raises(StreamBroken):
            list(lost)
        assert pool.endpoints[2].probe_at is not None
        for stream in begun:
            stream.close()
        assert in_flight(pool) == [0, 0, 0]


def test_asyncio_three_endpoints_one_killed_loses_no_request_that_had_not_begun(tmp_path):
    async def main():
        with contextlib.ExitStack() as others, contextlib.ExitStack() as doomed:
            servers = [others.enter_context(HoldingServer(tmp_path / f"s{i}")) for i in range(2)]
            servers.append(doomed.enter_context(HoldingServer(tmp_path / "s2")))
            async with AsyncPool(addresses(servers)) as pool:
                tasks = [asyncio.create_task(pool.ask(f"held {i}")) for i in range(30)]
                for server in servers:
                    for _ in range(10):
                        await until(lambda server=server: server.holding.acquire(blocking=False))
                stopping = threading.Thread(target=doomed.close)
                stopping.start()
                for server in servers[:2]:
                    for _ in range(5):
                        await until(lambda server=server: server.holding.acquire(blocking=False))
                    server.release()
                assert [(await task).text for task in tasks] == [f"{i} " for i in range(30)]
                stopping.join(10)
                assert in_flight(pool) == [0, 0, 0]

    run(main())


def test_asyncio_pool_backs_off_ejects_probes_and_takes_back(tmp_path):
    async def main():
        clock = Clock()
        path = tmp_path / "late"
        with BusyServer(2, Code.OVERLOADED, 1_500, tmp_path / "a") as server:
            async with AsyncPool(server.address, clock=clock, sleep=clock.sleep_async) as pool:
                assert (await pool.ask("say x", deadline_ms=9_000)).text == "x "
                assert clock.slept == [1.5, 1.5]
                assert server.requests[-1].deadline_ms == 6_000
            async with AsyncPool([f"unix:{path}", server.address], clock=clock, sleep=clock.sleep_async) as pool:
                assert [(await pool.ask("say x")).text for _ in range(4)] == ["x "] * 4
                dead = pool.endpoints[0]
                assert dead.probe_at is not None
                with FakeServer(path) as late:
                    clock.now += 60
                    await pool.ask("say x")
                    await until(lambda: dead.probe_at is None)
                    assert [(await pool.ask("say y")).text for _ in range(4)] == ["y "] * 4
                    assert len(late.requests) == 2

    run(main())


def test_asyncio_streams_end_cancel_and_close_without_leaving_anything(three):
    async def main():
        async with AsyncPool(addresses(three)) as pool:
            async with pool.stream("endless") as stream:
                async for _ in stream:
                    stream.cancel()
                    break
                assert [chunk async for chunk in stream][-1:] != [None]
                assert stream.result.finish_reason.name == "CANCELLED"
            early = pool.stream("endless")
            await early.close()
            assert [chunk async for chunk in early] == []
            task = asyncio.create_task(pool.ask("silent"))
            await until(lambda: sum(in_flight(pool)) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(BadRequest):
                await pool.ask("fail BAD_REQUEST")
            pool.stream("say unread")  # dropped unread: its request ends with the pool
            await asyncio.sleep(0.05)
            assert in_flight(pool) == [0, 0, 0]
        with pytest.raises(ConnectionFailed, match="closed"):
            await pool.ask("x")

    run(main())


def ended_after(stop, consume):
    """Run `consume` in a thread, do `stop`, and give what it returned; it must not take long."""
    found: Future = Future()

    def run_it():
        try:
            found.set_result(consume())
        except ZlClientError as error:
            found.set_exception(error)

    threading.Thread(target=run_it, daemon=True).start()  # one that waits for an hour does not keep the tests
    stop()
    return found.result(10)


def spared(pool):
    """Wait until the request has been refused, and waits for its server."""
    for _ in range(5_000):
        if pool.endpoints[0].free_at:
            return
        threading.Event().wait(0.002)
    raise AssertionError("nobody was refused")


@pytest.mark.parametrize("leave", ["cancel", "close"])
def test_leaving_ends_a_request_that_waits_for_a_server(tmp_path, leave):
    with BusyServer(3_600, Code.OVERLOADED, 600_000, tmp_path / "a") as server:
        with Pool(server.address, patience=3_600, attempts=3_600) as pool:
            stream = pool.stream("say x")

            def stop():
                spared(pool)
                getattr(stream, leave)()

            assert ended_after(stop, lambda: list(stream)) == []
            assert (stream.result is None) == (leave == "close")
            assert stream.result is None or stream.result.finish_reason.name == "CANCELLED"
            assert list(stream) == []
            stream.close()
            stream.cancel()
            assert in_flight(pool) == [0]
        assert len(server.requests) == 1


def test_closing_the_pool_ends_what_waits_for_a_server(tmp_path):
    with BusyServer(3_600, Code.OVERLOADED, 600_000, tmp_path / "a") as server:
        pool = Pool(server.address, patience=3_600, attempts=3_600)

        def stop():
            spared(pool)
            pool.close()

        with pytest.raises(ConnectionFailed, match="pool was closed"):
            ended_after(stop, lambda: pool.ask("say x"))


def test_what_was_cancelled_is_not_tried_again(tmp_path):
    with BusyServer(1, Code.OVERLOADED, 0, tmp_path / "a") as server, Pool(server.address) as pool:
        stream = pool.stream("say x")
        pool._clients[pool.endpoints[0]].ping()  # the refusal has come, and nobody has seen it
        stream.cancel()
        assert list(stream) == []
        assert stream.result.finish_reason.name == "CANCELLED"
        assert len(server.requests) == 1


def test_a_request_that_is_cancelled_while_it_moves_is_cancelled_where_it_arrives(tmp_path):
    moving, seen = threading.Event(), threading.Event()

    class Slow(Pool):
        def begin(self, messages, retry):
            at = super().begin(messages, retry)
            if retry.last is not None:
                moving.set()
                assert seen.wait(10)
            return at

    for leave in ("cancel", "close"):
        moving.clear()
        seen.clear()
        with BusyServer(1, Code.OVERLOADED, 1, tmp_path / leave) as server, Slow(server.address) as pool:
            stream = pool.stream("endless")

            def stop(stream=stream, leave=leave):
                assert moving.wait(10)
                getattr(stream, leave)()
                seen.set()

            ended_after(stop, lambda stream=stream: list(stream))
            assert server.was_cancelled.wait(10)
            assert server.cancelled[-1:] == [server.requests[1].request_id]
            assert in_flight(pool) == [0]


@pytest.mark.parametrize("leave", ["cancel", "close"])
@pytest.mark.parametrize("there", [True, False])
def test_asyncio_leaving_ends_a_request_that_waits_for_a_server_and_not_its_reader(tmp_path, leave, there):
    async def main():
        with BusyServer(3_600, Code.OVERLOADED, 600_000, tmp_path / "a") as server:
            address = server.address if there else f"unix:{tmp_path}/nobody"
            async with AsyncPool(address, patience=3_600, attempts=3_600) as pool:
                stream = pool.stream("say x")

                async def read():
                    return [chunk async for chunk in stream]

                reader = asyncio.create_task(read())
                await until(lambda: pool.endpoints[0].free_at or pool.endpoints[0].failures > 1)
                found = getattr(stream, leave)()
                if leave == "close":
                    await found
                assert await asyncio.wait_for(asyncio.shield(reader), 10) == []
                assert [chunk async for chunk in stream] == []
                assert (stream.result.finish_reason.name if stream.result else "") == (
                    "CANCELLED" if leave == "cancel" else ""
                )
                stream.cancel()
                await stream.close()
                assert in_flight(pool) == [0]
            assert len(server.requests) == there

    run(main())


def test_asyncio_what_was_cancelled_or_closed_is_not_tried_again(tmp_path):
    async def main():
        for leave in ("cancel", "close"):
            with BusyServer(1, Code.OVERLOADED, 0, tmp_path / leave) as server:
                async with AsyncPool(server.address) as pool:
                    stream = pool.stream("say x")
                    await until(lambda stream=stream: stream._at)
                    await stream._at.client.ping()  # the refusal has come, and nobody has seen it
                    if leave == "close":  # while the reader is about to try again
                        failed = pool.failed

                        async def slowly(*what, failed=failed, stream=stream):
                            await failed(*what)
                            await asyncio.create_task(stream.close())

                        pool.failed = slowly
                    else:
                        stream.cancel()
                    assert [chunk async for chunk in stream] == []
                    await asyncio.sleep(0.05)
                    assert in_flight(pool) == [0]
                assert len(server.requests) == 1
                assert (stream.result is None) == (leave == "close")

    run(main())


def test_asyncio_whoever_cancels_the_reader_cancels_it(tmp_path):
    async def main():
        async with AsyncPool(f"unix:{tmp_path}/nobody", patience=3_600, attempts=3_600) as pool:
            reader = asyncio.create_task(pool.ask("say x"))
            await until(lambda: pool.endpoints[0].failures > 1)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert in_flight(pool) == [0]

    run(main())


def test_asyncio_a_pool_that_is_closed_keeps_no_connection_that_was_being_made(tmp_path):
    async def main():
        asked, go, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(reader, writer):
            await reader.read(65_536)
            asked.set()
            await go.wait()
            writer.write(encode_server_info(1, pack_server_info(INFO)))
            assert await reader.read() == b""
            writer.close()
            left.set()

        async with await asyncio.start_unix_server(serve, tmp_path / "s"):
            pool = AsyncPool(f"unix:{tmp_path}/s", auth_token="t")
            asking = asyncio.create_task(pool.ask("say x"))
            await asked.wait()
            await pool.close()
            go.set()
            with pytest.raises(ConnectionFailed, match="pool was closed"):
                await asking
            await asyncio.wait_for(left.wait(), 10)

    run(main())


def test_asyncio_a_pool_whose_closing_is_cancelled_keeps_no_connection(tmp_path):
    async def main():
        with FakeServer(tmp_path / "a") as a, FakeServer(tmp_path / "b") as b:
            pool = AsyncPool([a.address, b.address])
            await asyncio.gather(*(pool.ask("say x") for _ in range(4)))
            closing = asyncio.create_task(pool.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await until(lambda: a.closed.is_set() and b.closed.is_set())

    run(main())
