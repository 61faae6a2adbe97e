"""Each threshold with each choice, on real servers of a tiny model: what comes back over the wire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.conftest import serving
from tests.tiny_model import write_tiny
from zl.client import Client
from zl.client.errors import LimitExceeded
from zl.policy import ACTIONS, DEFAULTS, actions_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

LIMITS = {"max_model_len": 448, "max_tokens": 16, "default_tokens": 8, "system_tokens": 40, "context_tokens": 48}
SHORT = {"seed": 5, "ignore_eos": True, "max_tokens": 8, "logprobs": True}


@pytest.fixture(scope="module", params=ACTIONS)
def served(request, tmp_path_factory) -> Iterator[tuple[str, Client]]:
    """A server that does the same about every threshold, as far as that can be chosen."""
    folder = tmp_path_factory.mktemp(request.param)
    actions = {limit: request.param if request.param in actions_of(limit) else "clamp" for limit in DEFAULTS}
    sizes = LIMITS | {"max_rows": 4, "kv_memory": "32MiB", "threads": 1}
    values = sizes | {f"on_{limit}": action for limit, action in actions.items()}
    flags = [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]
    model = write_tiny(folder / "tiny")
    for server in serving(folder, "--model", str(model), "--artifact", "off", "--device", "cpu", *flags):
        with Client(server.unix, timeout=60) as client:
            yield request.param, client


def bits(answer):
    return answer.token_ids, answer.logprobs


def refused(client: Client, field: str, *arguments, **options) -> None:
    with pytest.raises(LimitExceeded) as caught:
        client.ask(*arguments, **options)
    assert field in str(caught.value)


def test_max_tokens(served):
    action, client = served
    asked = {**SHORT, "max_tokens": 24}
    assert len(client.ask("a", **{**SHORT, "max_tokens": 16}).token_ids) == 16
    if action == "reject":
        refused(client, "max_tokens", "a", **asked)
    else:
        assert len(client.ask("a", **asked).token_ids) == (24 if action == "allow" else 16)
    assert client.hello().max_tokens == (447 if action == "allow" else 16)


def test_temperature(served):
    action, client = served
    clamped = client.ask("a", temperature=0.8, **SHORT)
    if action == "reject":
        refused(client, "temperature", "a", temperature=100.0, **SHORT)
        return
    answer = client.ask("a", temperature=100.0, **SHORT)  # less would not move a model this sure of itself
    assert (bits(answer) == bits(clamped)) == (action == "clamp")


def test_messages(served):
    action, client = served
    turns = [f"turn {n}" for n in range(17)]
    if action == "reject":
        refused(client, "17 turns, the limit is 16", turns, **SHORT)
        return
    answer, last = client.ask(turns, **SHORT), client.ask(turns[2:], **SHORT)
    assert not last.usage.truncated
    assert answer.usage.truncated == (action == "clamp")
    assert (answer.usage.prompt_tokens == last.usage.prompt_tokens) == (action == "clamp")
    assert client.hello().max_messages == (64 if action == "allow" else 16)


@pytest.mark.parametrize(("field", "budget"), [("system", 40), ("context", 48)])
def test_texts_over_their_budgets(served, field, budget):
    action, client = served
    text = "x" * 60  # a token a byte
    full = client.ask("a", **{field: text[:budget]}, **SHORT)
    assert not full.usage.truncated
    if action == "reject":
        refused(client, field, "a", **{field: text}, **SHORT)
        return
    answer = client.ask("a", **{field: text}, **SHORT)
    assert answer.usage.truncated == (action == "clamp")
    more = 60 - budget if action == "allow" else 0
    assert answer.usage.prompt_tokens == full.usage.prompt_tokens + more


def test_prompts_over_what_the_model_holds(served):
    action, client = served
    if action == "reject":
        refused(client, "messages", "y" * 600, **SHORT)
    else:
        assert client.ask("y" * 600, **SHORT).usage.truncated
