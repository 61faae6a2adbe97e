"""Every vector gets what its index says, over real sockets, however it is cut."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.net.harness import App, Peer, run, serving
from zl.errors import Code
from zl.net.frames import Ping

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text())


def test_the_index_names_every_vector():
    assert set(INDEX) == {path.stem for path in VECTORS.glob("*.bin")}


def cut(data: bytes, how: str, rng: random.Random) -> list[bytes]:
    match how:
        case "bytes":
            return [data[i : i + 1] for i in range(len(data))]
        case "random":
            edges = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(4))})
            return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]  # noqa: RUF007
        case _:
            return [data]


async def check(peer: Peer, name: str) -> None:
    expected = INDEX[name]
    request_id = expected.get("request_id", 0)
    if expected.get("reply") == "ping":
        for _ in range(expected.get("count", 1)):
            assert await peer.event() == Ping()
        return
    frames = await peer.answer()
    assert {frame.request_id for frame in frames} == {request_id}
    last = frames[-1]
    if expected.get("outcome") == "ok" or (expected.get("outcome") == "ok_or_error" and last.error is None):
        assert last.error is None
        assert last.usage is not None
        assert last.usage.completion_tokens == sum(len(frame.token_ids) for frame in frames) > 0
        assert last.usage.completion_tokens <= expected.get("max_completion_tokens", 10**9)
        assert frames[0].seed == expected.get("seed", frames[0].seed)
    else:
        assert len(frames) == 1
        assert last.error is not None
        wanted = (Code[expected["error"]],) if "error" in expected else (Code.BAD_REQUEST, Code.LIMIT_EXCEEDED)
        assert last.error.code in wanted


@pytest.mark.parametrize("how", ["whole", "bytes", "random"])
@pytest.mark.parametrize("where", ["tcp", "unix"])
@pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
def test_each_vector_gets_what_its_index_says(tmp_path, kind, where, how):
    async def main() -> None:
        rng = random.Random(f"{kind} {where} {how}")
        async with serving(tmp_path, App(n_tokens=40)) as served:
            for name, expected in INDEX.items():
                peer = await served.peer(where)
                for piece in cut((VECTORS / f"{name}.bin").read_bytes(), how, rng):
                    await peer.send(piece)
                    await asyncio.sleep(0)  # so that the pieces arrive as pieces
                try:
                    await check(peer, name)
                    if expected.get("closes"):
                        assert await peer.event() is None
                    else:
                        await peer.ping()
                        peer.writer.write_eof()
                        assert await peer.event() is None
                except Exception as error:
                    raise AssertionError(f"vector {name}") from error

    run(main(), kind)


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_sending_and_half_closing_in_one_go_delivers_every_answer(tmp_path, where):
    async def main() -> None:
        async with serving(tmp_path) as served:
            for name in INDEX:
                peer = await served.peer(where)
                peer.writer.write((VECTORS / f"{name}.bin").read_bytes())
                peer.writer.write_eof()
                await check(peer, name)
                assert await peer.event() is None, name

    run(main())


def test_all_good_vectors_pipeline_on_one_connection(tmp_path):
    names = [name for name, expected in INDEX.items() if expected.get("outcome") == "ok"]

    async def main() -> None:
        async with serving(tmp_path) as served:
            peer = await served.peer()
            # Two of them have no id of their own, and an id can be in flight only once.
            ids = [INDEX[name]["request_id"] for name in names if "request_id" in INDEX[name]]
            await peer.send(b"".join((VECTORS / f"{n}.bin").read_bytes() for n in names if "request_id" in INDEX[n]))
            finished = []
            while len(finished) < len(ids):
                finished.append((await peer.answer())[-1].request_id)
            assert sorted(finished) == sorted(ids)

    run(main())
