"""zl/client: answers, pipelining, cancelling, time limits, and what every kind of failure becomes."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import subprocess
import sys
import threading

import pytest

from tests.fake_server import FakeServer
from zl.client import (
    AsyncClient,
    BadRequest,
    Client,
    Code,
    ConnectionFailed,
    DeadlineExceeded,
    Draining,
    Finish,
    LimitExceeded,
    Overloaded,
    ServerError,
    StreamBroken,
    TimedOut,
    Timeouts,
    Unauthenticated,
    UnsupportedContent,
    ZlClientError,
)
from zl.client.messages import request_fields
from zl.errors import ConfigError
from zl.net.frames import frame

ERRORS = [
    ("BAD_REQUEST", BadRequest),
    ("DUPLICATE_ID", BadRequest),
    ("LIMIT_EXCEEDED", LimitExceeded),
    ("UNAUTHENTICATED", Unauthenticated),
    ("OVERLOADED", Overloaded),
    ("DEADLINE_EXCEEDED", DeadlineExceeded),
    ("DRAINING", Draining),
    ("INTERNAL", ServerError),
    ("NUMERIC", ServerError),
]


@pytest.fixture(params=["tcp", "unix"])
def server(request, tmp_path):
    with FakeServer(tmp_path / "s" if request.param == "unix" else None) as running:
        yield running


@pytest.fixture
def tcp():
    with FakeServer() as running:
        yield running


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_stream_gives_chunks_and_then_a_result(server):
    with Client(server.address, timeout=10) as client:
        stream = client.stream("say one two three", seed=5)
        assert [(c.text, c.token_ids) for c in stream] == [("one ", (1,)), ("two ", (2,)), ("three ", (3,))]
        assert stream.result is not None
        assert (stream.result.finish_reason, stream.result.seed) == (Finish.STOP, 5)
        assert (stream.result.usage.prompt_tokens, stream.result.usage.queue_us) == (7, 1000)
        assert list(stream) == []


def test_ask_joins_the_answer_with_logprobs(tcp):
    with Client(tcp.address, timeout=10) as client:
        answer = client.ask("say a b", logprobs=True)
    assert (answer.text, str(answer), answer.token_ids, answer.logprobs) == ("a b ", "a b ", (1, 2), (-0.5, -1.0))
    assert (answer.finish_reason, answer.seed) == (Finish.STOP, 99)


def test_every_option_reaches_the_wire(tcp):
    with Client(tcp.address, timeout=10) as client:
        client.ask(
            ["hi", b"hello", "say x"], system="sys", type="creative", temperature=0.7, top_p=0.95,
            repetition_penalty=1.1, max_tokens=9, seed=2**64 - 1, stop=["a", "b"], context="ctx",
            deadline_ms=5000, ignore_eos=True,
        )  # fmt: skip
        client.ask("say y", stop="only")
    full, plain = tcp.requests
    assert (full.messages, full.system, full.context) == ([b"hi", b"hello", b"say x"], b"sys", b"ctx")
    assert (full.temperature, full.top_p, full.repetition_penalty) == (0.7, 0.95, 1.1)
    assert (full.type, full.max_tokens, full.seed, full.stop) == (2, 9, 2**64 - 1, [b"a", b"b"])
    assert (full.deadline_ms, full.ignore_eos, full.logprobs) == (5000, True, False)
    assert (plain.temperature, plain.top_p, plain.seed, plain.stop) == (None, None, None, [b"only"])


def test_token_ids_travel_as_tokens(tcp):
    # 32-bit ids whose little-endian bytes read "say zz  " for the fake server
    ids = [int.from_bytes(b"say ", "little"), int.from_bytes(b"zz  ", "little")]
    with Client(tcp.address, timeout=10) as client:
        assert client.ask([ids], system=[7]).text == "zz "
    assert (tcp.requests[0].encoding, tcp.requests[0].system) == (1, b"\x07\0\0\0")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"type": "poetry"}, "chat, summarize, creative"),
        ({"tempreature": 1}, "tempreature"),
        ({"system": [1]}, "all text or all token ids"),
        ({"system": "\ud800"}, "surrogate"),
        ({"context": 3}, "context|turn"),
        ({"stop": 5}, "stop is 5: it must be a text, or a list of texts"),
        ({"stop": [5]}, r"stop is \[5\]: it must be"),
        ({"type": 1.5}, "type is 1.5: it must be one of chat"),
    ],
)
def test_what_cannot_be_put_on_the_wire_is_refused_before_it(tcp, options, names):
    with Client(tcp.address, timeout=10) as client:
        with pytest.raises(BadRequest, match=names):
            client.ask("say x", **options)
        assert client.ask("say still alive").text == "still alive "
    assert len(tcp.requests) == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ({"role": "user"}, "messages is a chat object: .*from_chat"),
        ({"role": "user", "content": "hi"}, "messages is a chat object: .*from_chat"),
        ({"text": "hi"}, "text models only"),
        (5, "messages is 5: it must be a question .* or a list of the turns"),
        (None, "messages is None: it must be a question"),
        ({"a", "b"}, "it must be a question"),
        ((word for word in ("a",)), "it must be a question"),
        ([1, 2, 3], r"messages\[0\] is 1, neither text nor a list of token ids"),
        ([{"role": "user"}], r"messages\[0\] is a chat object"),
        (["hi", None, "ho"], "all text or all token ids"),
    ],
)
def test_what_is_no_conversation_is_refused_with_what_to_hand_in(messages, words):
    with pytest.raises(ZlClientError, match=words) as caught:
        request_fields(messages, {})
    assert isinstance(caught.value, BadRequest | UnsupportedContent)


def test_a_server_that_speaks_http_is_called_by_its_name():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def answer() -> None:
            for _ in range(2):
                conn, _ = listener.accept()
                with conn:
                    conn.recv(1)
                    conn.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                    conn.shutdown(socket.SHUT_WR)
                    while conn.recv(4096):
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        words = "does not speak zl's protocol: this is HTTP: .*metrics .9433 .*zl's own is 7433"
        with Client(address, timeout=10) as client, pytest.raises(StreamBroken, match=words):
            client.ask("hi")
        done = subprocess.run(
            [sys.executable, "-m", "zl", "nc", address], input=frame(b"x"), capture_output=True, timeout=60, check=False
        )
        assert re.search(words, done.stderr.decode()), done.stderr
        thread.join(10)


def test_streams_on_one_connection_interleave_and_keep_apart(server):
    with Client(server.address, timeout=10) as client:
        streams = [client.stream(f"say {i} {i} {i}") for i in range(20)]
        firsts = [next(stream).text for stream in reversed(streams)]
        assert firsts == [f"{i} " for i in reversed(range(20))]
        assert ["".join(c.text for c in stream) for stream in streams] == [f"{i} {i} " for i in range(20)]


def test_threads_share_one_client(tcp):
    answers: dict[int, str] = {}
    with Client(tcp.address, timeout=10) as client:
        def work(n: int) -> None:
            for _ in range(5):
                answers[n] = answers.get(n, "") + client.ask(f"say {n} {n}").text
                assert client.ping() < 10

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {n: f"{n} {n} " * 5 for n in range(8)}


def test_hello_and_ping(server):
    with Client(server.address, timeout=10) as client:
        assert 0 <= client.ping() < 10
        info = client.hello()
        assert (info.model, info.vocab_size, info.build_id) == ("fake", 10, "b1")


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
def test_leaving_a_stream_early_cancels_it_and_keeps_the_connection(tcp, leave):
    with Client(tcp.address, timeout=10) as client:
        stream = client.stream("endless")
        if leave == "with":
            with stream:
                next(stream)
        else:
            for _ in stream:
                break
            if leave == "close":
                stream.close()
                stream.close()
                assert list(stream) == []
            else:
                del stream
                gc.collect()
        assert tcp.was_cancelled.wait(10)
        assert client.ask("say on").text == "on "
    assert tcp.cancelled == [1]


def test_cancel_ends_the_iterator_with_the_servers_last_frame(tcp):
    with Client(tcp.address, timeout=10) as client:
        stream = client.stream("endless")
        next(stream)
        stream.cancel()
        assert sum(1 for _ in stream) >= 0
        assert stream.result is not None
        assert stream.result.finish_reason == Finish.CANCELLED


def test_closing_the_client_breaks_its_streams(tcp):
    client = Client(tcp.address, timeout=10)
    stream = client.stream("hang")
    next(stream)
    client.close()
    client.close()
    assert tcp.closed.wait(10)
    with pytest.raises(StreamBroken, match="closed") as caught:
        list(stream)
    assert caught.value.tokens_received >= 1
    with pytest.raises(ConnectionFailed):
        client.ask("say x")


def test_close_wakes_a_thread_that_waits(tcp):
    client = Client(tcp.address, timeout=60)
    stream = client.stream("hang")
    next(stream)
    next(stream)
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            next(stream)
        except ZlClientError as error:
            seen.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(seen[0], StreamBroken)


@pytest.mark.parametrize(("code", "kind"), ERRORS)
@pytest.mark.parametrize("when", ["fail", "fail-late"])
def test_error_codes_become_types_and_spare_the_connection(tcp, code, kind, when):
    with Client(tcp.address, timeout=10) as client:
        with pytest.raises(kind, match=f"told to fail: {code}") as caught:
            client.ask(f"{when} {code}")
        assert caught.value.code == Code[code]
        assert caught.value.retry_after == 1.5
        assert caught.value.tokens_received == (2 if when == "fail-late" else 0)
        assert client.ask("say on").text == "on "


def test_a_connection_that_ends_mid_answer_is_a_broken_stream(server):
    with Client(server.address, timeout=10) as client:
        other = client.stream("hang")
        stream = client.stream("break")
        said = []
        with pytest.raises(StreamBroken, match="closed the connection") as caught:
            said.extend(chunk.text for chunk in stream)
        assert caught.value.tokens_received == 2
        with pytest.raises(StreamBroken):
            list(other)
        with pytest.raises(ConnectionFailed):
            client.ask("say x")
        with pytest.raises(ConnectionFailed):
            client.ping()


def test_a_server_that_talks_nonsense_is_named(tcp):
    with Client(tcp.address, timeout=10) as client, pytest.raises(StreamBroken, match="does not speak zl"):
        client.ask("garbage")


def test_an_error_for_the_connection_ends_all_calls_with_its_reason():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def refuse() -> None:
            from zl.errors import PeerError
            from zl.net.codec import encode_error

            peer, _ = listener.accept()
            with peer:
                peer.recv(65_536)
                peer.sendall(encode_error(PeerError(Code.BAD_FRAME, "that was no frame"), 0))

        thread = threading.Thread(target=refuse)
        thread.start()
        with Client(f"tcp:127.0.0.1:{listener.getsockname()[1]}", timeout=10) as client:
            with pytest.raises(BadRequest, match="that was no frame"):
                client.ask("hi")
            with pytest.raises(ConnectionFailed, match="that was no frame"):
                client.ask("hi")
        thread.join()


def test_waits_have_ends_and_say_which(tcp):
    with Client(tcp.address, timeout=Timeouts(5, 0.05, 0.1)) as client:
        with pytest.raises(TimedOut, match=r"first token within 0\.05 s") as caught:
            client.ask("silent")
        assert (caught.value.phase, caught.value.tokens_received) == ("first token", 0)
        with pytest.raises(TimedOut) as caught:
            client.ask("hang")
        assert (caught.value.phase, caught.value.tokens_received) == ("next token", 2)
        assert isinstance(caught.value, TimeoutError)
        assert tcp.was_cancelled.wait(10)
    with FakeServer(answers_pings=False) as deaf, Client(deaf.address, timeout=0.1) as client, pytest.raises(TimedOut):
        client.ping()


def test_an_answer_that_nobody_reads_is_bounded(tcp):
    with Client(tcp.address, timeout=10, max_buffered=50) as client:
        unread = client.stream("flood 5000")
        assert client.ask("say read").text == "read "
        with pytest.raises(StreamBroken, match="wait unread"):
            list(unread)
        assert client.ask("say on").text == "on "


def test_text_cut_anywhere_stays_whole(tcp):
    with Client(tcp.address, timeout=10) as client:
        assert client.ask("split").text == "é€😀"


def test_auth_token_is_said_first():
    with FakeServer(auth_token=b"secret") as server:
        with Client(server.address, timeout=10, auth_token="secret") as client:
            assert client.ask("say in").text == "in "
        for wrong in ("", "wrong"):
            with pytest.raises(Unauthenticated), Client(server.address, timeout=10, auth_token=wrong) as client:
                client.ask("say in")


def test_the_environments_token_is_said_where_none_is_given(monkeypatch):
    with FakeServer(auth_token=b"secret") as server:
        monkeypatch.setenv("ZL_AUTH_TOKEN", "secret")
        with Client(server.address, timeout=10) as client:
            assert client.ask("say in").text == "in "

        async def ask() -> str:
            async with AsyncClient(server.address, timeout=10) as client:
                return (await client.ask("say out")).text

        assert asyncio.run(ask()) == "out "
        with pytest.raises(Unauthenticated), Client(server.address, timeout=10, auth_token="") as client:
            client.ask("say in")
        monkeypatch.setenv("ZL_AUTH_TOKEN", "another")
        with pytest.raises(Unauthenticated):
            Client(server.address, timeout=10)


def test_no_server_is_one_clear_error(tmp_path, monkeypatch):
    with pytest.raises(ConnectionFailed, match=r"cannot connect to unix:.*zl serve"):
        Client(f"unix:{tmp_path}/none")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        with pytest.raises(ConnectionFailed, match="refused"):
            Client(f"tcp:127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(ConfigError, match="tcp:HOST:PORT or unix:PATH"):
        Client("localhost")
    monkeypatch.setenv("ZL_CONNECT", f"unix:{tmp_path}/from-environment")
    with pytest.raises(ConnectionFailed, match="from-environment"):
        Client()


def test_default_address_is_the_unix_socket_if_it_exists(tmp_path, monkeypatch):
    monkeypatch.delenv("ZL_CONNECT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with FakeServer(tmp_path / "zl.sock"), Client(timeout=10) as client:
        assert client.ask("say default").text == "default "


def test_async_streams_pipeline_and_finish(server):
    async def main():
        async with AsyncClient(server.address, timeout=10) as client:
            texts = await asyncio.gather(*(client.ask(f"say {i} {i}") for i in range(20)))
            assert [answer.text for answer in texts] == [f"{i} {i} " for i in range(20)]
            assert 0 <= await client.ping() < 10
            assert (await client.hello()).model == "fake"
            stream = client.stream("say a b", logprobs=True, seed=3)
            assert [chunk.logprobs async for chunk in stream] == [(-0.5,), (-1.0,)]
            assert (stream.result.finish_reason, stream.result.seed) == (Finish.STOP, 3)

    run(main())


def test_async_cancelling_the_task_cancels_the_request(tcp):
    async def main():
        client = await AsyncClient(tcp.address, timeout=10)
        started = asyncio.Event()

        async def read():
            async for _ in client.stream("endless"):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(tcp.was_cancelled.wait, 10)
        async with client.stream("endless") as stream:
            async for _ in stream:
                break
        cancelled = client.stream("endless")
        await anext(cancelled)
        cancelled.cancel()
        async for _ in cancelled:
            pass
        assert cancelled.result.finish_reason == Finish.CANCELLED
        assert (await client.ask("say on")).text == "on "
        await client.close()
        await client.close()
        assert tcp.cancelled == [1, 2, 3]

    run(main())


def test_async_failures_have_the_same_types(tcp):
    async def main():
        async with AsyncClient(tcp.address, timeout=Timeouts(5, 0.1, 0.1)) as client:
            with pytest.raises(Overloaded):
                await client.ask("fail OVERLOADED")
            with pytest.raises(TimedOut, match="first token"):
                await client.ask("silent")
            with pytest.raises(TimedOut, match="next token"):
                await client.ask("hang")
            with pytest.raises(BadRequest):
                await client.ask("say x", seed=-1)
            with pytest.raises(StreamBroken):
                await client.ask("break")
            with pytest.raises(ConnectionFailed):
                await client.ask("say x")
            with pytest.raises(ConnectionFailed):
                await client.ping()
        with pytest.raises(ConnectionFailed, match="not connected"):
            AsyncClient(tcp.address).stream("say x")
        with pytest.raises(ConnectionFailed, match="cannot connect"):
            await AsyncClient("unix:/nonexistent/zl")

    run(main())


def test_async_auth_token():
    async def main(address):
        async with AsyncClient(address, timeout=10, auth_token="secret") as client:
            assert (await client.ask("say in")).text == "in "
        with pytest.raises(Unauthenticated):
            await AsyncClient(address, timeout=10, auth_token="wrong")

    with FakeServer(auth_token=b"secret") as server:
        run(main(server.address))
