"""A real server's answers: transformers' greedy tokens, the same alone and in company, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.system.conftest import CONSTANT_PROMPT
from zl.client import AsyncClient, Client
from zl.client.messages import join
from zl.gpu.weights import open_model
from zl.text.tokenizer import text_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

PROMPTS = [json.loads(line) for line in (Path(__file__).parent.parent / "data" / "chat.jsonl").read_text().splitlines()]
N_NEW = 64


def ask(client, prompt, **more):
    return client.ask(
        prompt["messages"], system=prompt["system"], type=prompt["type"], **({"seed": prompt["seed"]} | more)
    )


@pytest.fixture(scope="module")
def chat_prompts(gguf_path):
    """Each prompt's ids by transformers' own tokenizer and template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    made = []
    for prompt in PROMPTS:
        turns = [{"role": "system", "content": prompt["system"]}] if prompt["system"] else []
        roles = ["user", "assistant"] * 8
        turns += [{"role": role, "content": text} for role, text in zip(roles, prompt["messages"], strict=False)]
        made.append(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    return made


def greedy_flaws(oracle, prompt_ids: list[int], answer: list[int], ended: bool) -> list[int]:
    """Places where transformers' argmax, given the tokens before, is another token: none for a greedy answer."""
    eos = 2
    wanted = [*answer, eos] if ended else answer
    ids = torch.tensor([[*prompt_ids, *wanted]])
    with torch.inference_mode():
        logits = oracle(ids[:, :-1]).logits[0, len(prompt_ids) - 1 :]
    return torch.nonzero(logits.argmax(-1) != torch.tensor(wanted)).flatten().tolist()


def greedy_answers(address: str) -> list:
    """The greedy answer to every prompt, all of them streaming at once on one connection."""
    with Client(address, timeout=300) as client:
        streams = [
            client.stream(p["messages"], system=p["system"], temperature=0.0, repetition_penalty=1.0, max_tokens=N_NEW)
            for p in PROMPTS
        ]
        return [join(list(stream), stream.result) for stream in streams]


@pytest.fixture(scope="module")
def float32_answers(server):
    return greedy_answers(server.unix)


def test_greedy_tokens_equal_transformers_on_every_prompt(float32_answers, oracle, chat_prompts):
    for prompt, ids, answer in zip(PROMPTS, chat_prompts, float32_answers, strict=True):
        assert answer.usage.prompt_tokens == len(ids)
        ended = answer.finish_reason.name == "STOP"
        assert greedy_flaws(oracle, ids, list(answer.token_ids), ended) == [], prompt["id"]


async def _ask_all(address: str, prompts, *, one_connection: bool, **more):
    clients = [AsyncClient(address, timeout=300) for _ in range(1 if one_connection else len(prompts))]
    for client in clients:
        await client.connect()

    async def one(i, prompt):
        client = clients[0 if one_connection else i]
        return await client.ask(prompt["messages"], system=prompt["system"], type=prompt["type"], **more)

    try:
        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    finally:
        await asyncio.gather(*(client.close() for client in clients))


def test_128_streams_get_the_same_tokens_as_alone(server):
    options = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": True}
    short = [prompt for prompt in PROMPTS if not prompt["system"]]  # the long ones ride in test_determinism.py
    with Client(server.unix, timeout=120) as client:
        alone = [client.ask(p["messages"], type=p["type"], **options) for p in short]
    crowd = [short[i % len(short)] for i in range(128)]
    for one_connection in (True, False):
        answers = asyncio.run(_ask_all(server.unix, crowd, one_connection=one_connection, **options))
        for i, answer in enumerate(answers):
            expected = alone[i % len(short)]
            assert answer.token_ids == expected.token_ids, i
            assert answer.logprobs == expected.logprobs, i
            assert answer.text == expected.text
    assert server.settle() == (0, 0, 0)


CLIENT = """
import sys
import time
from zl.client import Client
with Client(sys.argv[1]) as client:
    streams = [client.stream("Count from one to a thousand.", max_tokens=1500, ignore_eos=True) for _ in range(4)]
    for stream in streams:
        next(stream)
    print("streaming", flush=True)
    for stream in streams:
        list(stream)
"""


def test_killed_clients_leave_nothing_in_use(server):
    clients = [
        subprocess.Popen([sys.executable, "-c", CLIENT, address], stdout=subprocess.PIPE)
        for address in [server.unix, server.tcp] * 2
    ]
    try:
        for client in clients:
            assert client.stdout.readline() == b"streaming\n"
        assert server.in_use()[0] == 16
        for client in clients[:2]:
            os.kill(client.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while server.in_use()[0] != 8 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.in_use()[0] == 8
    finally:
        for client in clients:
            client.kill()
            client.wait()
            client.stdout.close()
    assert server.settle() == (0, 0, 0)


def test_token_ids_get_the_texts_answers_from_leased_berths_and_from_copies(default_server, gguf_path):
    tokenizer = text_model(open_model(gguf_path)).tokenizer
    systems = ["", CONSTANT_PROMPT, "Be brief."]  # the second fills constant pages
    asked = [(systems[i % 3], f"Tell me about number {i}, please. " * (1 + 20 * (i % 7 == 0))) for i in range(200)]

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    def answers(client, encode):
        streams = [
            client.stream([encode(text)], system=encode(system), max_tokens=4, seed=i)
            for i, (system, text) in enumerate(asked)
        ]
        lent = default_server.figures()['zl_berths{state="lent"}']
        return [join(list(stream), stream.result).token_ids for stream in streams], lent

    with Client(default_server.unix, timeout=300) as client:
        by_text, held = answers(client, lambda text: text)
        assert held == 0
        by_ids, held = answers(client, ids)
    assert by_ids == by_text
    assert 0 < held <= 128
    assert default_server.settle() == (0, 0, 0)


def test_cancel_ends_with_cancelled_and_frees_the_row(server):
    with Client(server.unix, timeout=60) as client:
        stream = client.stream("Count from one to a thousand.", max_tokens=1500, ignore_eos=True)
        for _ in range(3):
            next(stream)
        stream.close()
        assert server.settle(5.0) == (0, 0, 0)
        assert ask(client, PROMPTS[10], max_tokens=4).token_ids


def test_stop_string_is_not_emitted(server):
    with Client(server.unix, timeout=60) as client:
        whole = client.ask("Name the planets of the solar system.", temperature=0.0, max_tokens=40).text
        stop = whole[12:18]
        cut = client.ask("Name the planets of the solar system.", temperature=0.0, max_tokens=40, stop=[stop])
        assert cut.text == whole[: whole.index(stop)]
        assert cut.finish_reason.name == "STOP"


def test_same_seed_same_answer_and_another_seed_another(default_server):
    with Client(default_server.unix, timeout=60) as client:
        options = {"type": "CREATIVE", "max_tokens": 32, "ignore_eos": True, "logprobs": True}
        first = client.ask("Write a poem about rain.", seed=11, **options)
        again = client.ask("Write a poem about rain.", seed=11, **options)
        other = client.ask("Write a poem about rain.", seed=12, **options)
    assert (first.token_ids, first.logprobs, first.text) == (again.token_ids, again.logprobs, again.text)
    assert other.token_ids != first.token_ids


def test_server_drawn_seed_repeats_the_answer(default_server):
    with Client(default_server.unix, timeout=60) as client:
        first = client.ask("Write a poem about snow.", type="CREATIVE", max_tokens=24)
        again = client.ask("Write a poem about snow.", type="CREATIVE", max_tokens=24, seed=first.seed)
    assert first.token_ids == again.token_ids


def test_deadline_ends_with_a_typed_error(server):
    from zl.client import DeadlineExceeded

    with Client(server.unix, timeout=60) as client:
        with pytest.raises(DeadlineExceeded):
            client.ask("Count from one to a thousand.", max_tokens=2000, ignore_eos=True, deadline_ms=300)
        assert server.settle(5.0) == (0, 0, 0)


def test_share_of_equal_greedy_tokens_in_the_default_dtype(default_server, float32_answers, tell):
    """bfloat16 is another arithmetic: its greedy tokens part from float32's where two logits are close."""
    answers = greedy_answers(default_server.unix)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(answers, float32_answers, strict=True))
    tell(f"bfloat16: {equal} of {len(PROMPTS)} prompts have the {N_NEW} greedy tokens of float32")
    assert equal >= len(PROMPTS) // 2
