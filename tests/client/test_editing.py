"""zl/client/editing.py: a fake clock for the quiet and the keeping, a real socket for the requests."""

from __future__ import annotations

import asyncio

import pytest

from tests.client.kit import Alarm, run, until
from tests.fake_server import FakeServer
from zl.client import AsyncClient, AsyncPool, BadRequest, Debounce, DoubleBuffer


def questions(server):
    return [request.messages[-1].decode() for request in server.requests]


def test_debounce_asks_once_the_typing_pauses():
    async def main():
        alarm, heard = Alarm(), []
        with FakeServer() as server:
            async with AsyncClient(server.address) as client, Debounce(client, heard.append, sleep=alarm.sleep) as live:
                for text in ("s", "sa", "say", "say a b"):
                    live.edit(text)
                    await alarm.advance(0.9)
                assert questions(server) == []
                await alarm.advance(0.1)
                answer = await live.answer()
                assert (answer.text, heard) == ("a b ", [None, "a ", "b "])
                assert questions(server) == ["say a b"]

    run(main())


def test_an_edit_cancels_the_request_that_runs():
    async def main():
        alarm, heard = Alarm(), []
        with FakeServer() as server:
            async with AsyncClient(server.address) as client:
                live = Debounce(client, heard.append, sleep=alarm.sleep)
                live.edit("endless")
                await alarm.advance(1)
                await until(lambda: len(heard) > 3)
                waiting = asyncio.create_task(live.answer())
                live.edit("say new", seed=3)
                await until(server.was_cancelled.is_set)
                await alarm.advance(1)
                assert (await waiting).text == "new "
                assert server.requests[-1].seed == 3
                live.edit("endless")
                await alarm.advance(1)
                await until(lambda: len(server.requests) == 3)
                live.cancel()
                assert await live.answer() is None
                live.edit("fail BAD_REQUEST")
                await alarm.advance(1)
                with pytest.raises(BadRequest):
                    await live.answer()
                await live.close()
                assert await client.ping() > 0
                assert client._wire.in_flight == 0

    run(main())


def test_double_buffer_gives_the_answer_that_was_prepared():
    async def main():
        alarm = Alarm()
        with FakeServer() as server:
            async with AsyncClient(server.address) as client, DoubleBuffer(client, sleep=alarm.sleep) as buffer:
                await buffer.prepare("say next", seed=1)
                await buffer.prepare("say next", seed=1)
                await until(lambda: len(server.requests) == 1)
                stream = await buffer.take("say next", seed=1)
                assert [chunk.text async for chunk in stream] == ["next "]
                assert questions(server) == ["say next"]
                stream = await buffer.take("say next", seed=1)  # taken once
                assert [chunk.text async for chunk in stream] == ["next "]
                assert len(server.requests) == 2

    run(main())


def test_double_buffer_drops_what_is_not_used():
    async def main():
        alarm = Alarm()
        with FakeServer() as server:
            async with AsyncClient(server.address) as client, DoubleBuffer(client, sleep=alarm.sleep) as buffer:
                await buffer.prepare("endless")
                stream = await buffer.take("say other")
                assert [chunk.text async for chunk in stream] == ["other "]
                await until(lambda: len(server.cancelled) == 1)
                await buffer.prepare("endless")
                await buffer.prepare("endless", seed=2)  # another request, though of the same words
                await until(lambda: len(server.cancelled) == 2)
                await alarm.advance(29)
                assert len(server.cancelled) == 2
                await alarm.advance(1)
                await until(lambda: len(server.cancelled) == 3)
                await client.ping()
                assert client._wire.in_flight == 0

    run(main())


def test_both_work_over_a_pool(tmp_path):
    async def main():
        alarm = Alarm()
        with FakeServer(tmp_path / "a") as one, FakeServer(tmp_path / "b") as other:
            async with AsyncPool([one.address, other.address]) as pool:
                async with DoubleBuffer(pool, sleep=alarm.sleep) as buffer:
                    await buffer.prepare("say early")
                    await until(lambda: one.requests or other.requests)  # sent though nobody has asked for it yet
                    assert [chunk.text async for chunk in await buffer.take("say early")] == ["early "]
                    await buffer.prepare("endless")
                    await until(lambda: len(one.requests) + len(other.requests) == 2)
                await until(lambda: one.cancelled or other.cancelled)
                async with Debounce(pool, sleep=alarm.sleep) as live:
                    live.edit("say late")
                    await alarm.advance(1)
                    assert (await live.answer()).text == "late "
                assert [endpoint.in_flight for endpoint in pool.endpoints] == [0, 0]

    run(main())
