"""Token ids stay in the berth that they arrived in: who holds it, how many do, and that it always comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from tests.net.harness import VOCAB, App, run, serving
from zl.errors import Code, InvariantError, RequestError
from zl.net import codec, rules
from zl.net.frames import Payload
from zl.net.native.library import open_code

IDS = [5, 6, VOCAB - 1, 0]
TOKENS: dict[str, Any] = {"encoding": codec.Encoding.TOKENS, "messages": [codec.pack_tokens(IDS)]}

decode = open_code().decode


class Holding(App):
    """Keeps requests until `step`; notes which came with a lease."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(held=True, n_tokens=1, **fields)
        self.leased: list[bool] = []

    def submit(self, conn: Any, request: codec.Request) -> None:
        self.leased.append(request.lease is not None)
        super().submit(conn, request)

    def forget(self) -> None:
        """Drop the requests: views of berths keep the arena from being unmapped."""
        self.submitted.clear()
        gc.collect()


def test_ids_are_views_of_a_berth_that_is_held_until_the_request_ends(tmp_path):
    async def main() -> None:
        app = Holding()
        async with serving(tmp_path, app, decode=decode) as served:
            peer = await served.peer()
            await peer.ask(1, system=codec.pack_tokens([9]), context=codec.pack_tokens([8, 7]), **TOKENS)
            await served.until(lambda: len(app.submitted) == 1)
            (request,) = app.submitted
            assert (served.arena.in_use, served.arena.lent) == (1, 1)
            for part, ids in ((request.system, [9]), (request.messages[0], IDS), (request.context, [8, 7])):
                assert isinstance(part, memoryview)
                at = request.lease.offset(part)
                assert served.arena.memory[at : at + 4 * len(ids)].tobytes() == codec.pack_tokens(ids)
            await peer.ask(2, messages=["text"])  # a text request holds nothing
            await served.until(lambda: len(app.submitted) == 2)
            assert served.arena.in_use == 1
            app.step()
            assert (await peer.answer())[-1].error is None
            assert (served.arena.in_use, served.arena.lent) == (0, 0)
            del request, part
            app.forget()

    run(main())


def test_beyond_half_of_the_berths_ids_are_copied_and_frames_still_come_in(tmp_path):
    async def main() -> None:
        app = Holding()
        async with serving(tmp_path, app, decode=decode, n_berths=4) as served:
            peer = await served.peer()
            for request_id in range(8):
                await peer.ask(request_id, **TOKENS)
            await served.until(lambda: len(app.submitted) == 8)
            assert app.leased == [True, True, *[False] * 6]
            assert [bytes(request.messages[0]) for request in app.submitted] == TOKENS["messages"] * 8
            assert isinstance(app.submitted[-1].messages[0], bytes)
            assert (served.arena.in_use, served.net.counters.berth_waits) == (2, 0)
            await peer.ask(0, operation=codec.Operation.CANCEL)
            await served.until(lambda: bool(app.cancelled))
            await peer.ask(8, **TOKENS)  # the cancelled one's place
            await served.until(lambda: len(app.submitted) == 9)
            assert app.leased[-1]
            app.step()
            app.forget()

    run(main())


@pytest.mark.parametrize("how", ["refused", "duplicate", "draining", "vocabulary", "broken"])
def test_a_request_that_is_not_taken_leaves_its_berth(tmp_path, how):
    async def main() -> None:
        app = Holding(queue_limit=1)
        async with serving(tmp_path, app, decode=decode) as served:
            peer = await served.peer()
            await peer.ask(1, **TOKENS)
            await served.until(lambda: len(app.submitted) == 1)
            if how == "vocabulary":
                app.queue_limit = 2
                bad = {**TOKENS, "messages": [codec.pack_tokens([VOCAB])]}
                await peer.ask(2, **bad)
                assert await peer.error() == (Code.BAD_REQUEST, 2)
            elif how == "broken":
                await peer.send(b"\0\0\0\2\xff\xff")
                assert isinstance(await peer.event(), Payload)
                assert served.arena.in_use == 0  # its connection took the first request along
            else:
                app.accepting = how != "draining"
                await peer.ask(1 if how == "duplicate" else 2, **TOKENS)
                code, _ = await peer.error()
                assert code is {
                    "refused": Code.OVERLOADED, "duplicate": Code.DUPLICATE_ID, "draining": Code.DRAINING
                }[how]  # fmt: skip
            if how != "broken":
                assert (served.arena.in_use, served.arena.lent) == (1, 1)
            app.step()
            assert served.arena.in_use == 0
            app.forget()

    run(main())


def test_a_bug_in_the_application_costs_no_berth(tmp_path):
    class Buggy(App):
        def submit(self, conn: Any, request: codec.Request) -> None:
            raise InvariantError("a bug")

    async def main() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(type(context["exception"])))
        async with serving(tmp_path, Buggy(), decode=decode) as served:
            peer = await served.peer()
            await peer.ask(1, **TOKENS)
            with contextlib.suppress(ConnectionError):
                assert await peer.event() is None
            assert served.arena.lent == served.arena.in_use == 0
            gc.collect()
        assert InvariantError in reported

    run(main())


def test_without_native_code_ids_are_bytes_of_their_own(tmp_path):
    async def main() -> None:
        app = Holding()
        async with serving(tmp_path, app) as served:
            peer = await served.peer()
            await peer.ask(1, **TOKENS)
            await served.until(lambda: len(app.submitted) == 1)
            assert app.leased == [False]
            assert app.submitted[0].messages == TOKENS["messages"]
            assert served.arena.in_use == 0
            app.step()

    run(main())


def test_a_copied_out_request_is_the_same_request():
    payload = codec.encode_request(request_id=3, **TOKENS)[4:]
    found = decode(memoryview(bytearray(payload)))
    assert found.in_berth
    found.copy_out()
    assert not found.in_berth
    assert found == codec.decode_request(payload)
    with pytest.raises(RequestError):
        rules.check_tokens(found, VOCAB - 1)
