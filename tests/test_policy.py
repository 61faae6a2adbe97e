"""zl/policy: each threshold with each action and its counter, and the settings that choose them."""

from __future__ import annotations

import pytest

from zl.config import load
from zl.errors import Code, ConfigError, RequestError
from zl.net.messages import Request
from zl.policy import ACTIONS, DEFAULTS, Policy, actions_of
from zl.shapes import Shapes

SHAPES = Shapes(max_model_len=1_000, max_tokens=100)


def rule(limit: str, action: str, **fields):
    """Rule on one request; return the ruling, or the code and field of the refusal, and what was counted."""
    policy = Policy(SHAPES, {limit: action})
    request = Request(request_id=1, **({"messages": [b"q"]} | fields))
    try:
        result = policy.rule(request)
    except RequestError as refusal:
        result = (refusal.code, refusal.field)
    return result, {key: n for key, n in policy.counters.exceeded.items() if n}


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_within_every_threshold_passes_uncounted(action):
    for limit in ("max_tokens", "temperature", "messages"):
        fields = {"max_tokens": 100, "temperature": 0.1, "messages": [b"q"] * 15}
        ruling, counted = rule(limit, action, **fields)
        assert (ruling.max_tokens, ruling.temperature, len(ruling.messages), ruling.cut) == (100, 0.1, 15, False)
        assert not counted
    assert rule("temperature", action, temperature=800_000 / 1_000_000)[0].temperature == 0.8
    assert rule("temperature", action)[0].temperature is None  # CREATIVE's own 0.9 is the operator's


@pytest.mark.parametrize(("action", "served"), [("allow", 101), ("clamp", 100), ("reject", None)])
def test_max_tokens(action, served):
    ruling, counted = rule("max_tokens", action, max_tokens=101)
    assert (ruling.max_tokens if served else ruling) == (served or (Code.LIMIT_EXCEEDED, "max_tokens"))
    assert counted == {("max_tokens", action): 1}
    if action == "allow":
        assert rule("max_tokens", action, max_tokens=2**32 - 1)[0].max_tokens == 999


@pytest.mark.parametrize("value", [0.0, 0.099999, 0.800001, 100.0])
@pytest.mark.parametrize("action", ACTIONS)
def test_temperature(action, value):
    ruling, counted = rule("temperature", action, temperature=value)
    if action == "reject":
        assert ruling == (Code.LIMIT_EXCEEDED, "temperature")
    else:
        assert ruling.temperature == (value if action == "allow" else 0.1 if value < 0.1 else 0.8)
    assert counted == {("temperature", action): 1}


@pytest.mark.parametrize("n_turns", [17, 18, 19, 63, 64, 65])
@pytest.mark.parametrize("action", ACTIONS)
def test_messages(action, n_turns):
    turns = [b"%d" % n for n in range(n_turns)]
    ruling, counted = rule("messages", action, messages=turns)
    if action == "reject" or (action == "allow" and n_turns > 64):
        assert ruling == (Code.LIMIT_EXCEEDED, "messages")
    elif action == "allow":
        assert (ruling.messages, ruling.cut) == (turns, False)
    else:
        assert ruling.messages == turns[-15 if n_turns % 2 else -16 :]  # a user's turn first, as before
        assert ruling.cut
    assert counted == {("messages", action): 1}


def test_the_first_refusal_ends_the_ruling_and_others_are_counted_before_it():
    policy = Policy(SHAPES, {"temperature": "allow", "max_tokens": "reject"})
    with pytest.raises(RequestError, match="101 tokens, the limit is 100"):
        policy.rule(Request(messages=[b"q"], temperature=0.0, max_tokens=101))
    assert [n for n in policy.counters.exceeded.values() if n] == [1, 1]


def test_what_the_server_says_about_itself_follows_the_policy():
    assert (Policy(SHAPES).max_tokens, Policy(SHAPES).max_messages) == (100, 16)
    generous = Policy(SHAPES, {"max_tokens": "allow", "messages": "allow"})
    assert (generous.max_tokens, generous.max_messages) == (999, 64)


def test_counters_are_there_before_anything_happens():
    assert Policy(SHAPES).counters.exceeded == dict.fromkeys(DEFAULTS.items(), 0)


def test_settings_give_the_founding_table():
    settings = load(environ={})
    assert settings.actions == DEFAULTS
    assert [limit for limit, action in DEFAULTS.items() if action != "clamp"] == ["temperature", "messages"]
    assert (settings.temperature_low, settings.temperature_high) == (0.1, 0.8)


@pytest.mark.parametrize("limit", DEFAULTS)
def test_every_choice_can_be_set(limit):
    for action in actions_of(limit):
        assert load({f"on_{limit}": action}, environ={}).actions == {**DEFAULTS, limit: action}
    with pytest.raises(ConfigError, match=rf"on_{limit} = 'cut' \(--on-{limit.replace('_', '-')}\): must be one of"):
        load({f"on_{limit}": "cut"}, environ={})


def test_choices_that_make_no_sense():
    with pytest.raises(ConfigError, match=r"temperature_low = 0\.9 .*at most temperature_high"):
        load({"temperature_low": 0.9}, environ={})
    with pytest.raises(ConfigError, match="on_prompt_tokens = 'allow'"):
        load({"on_prompt_tokens": "allow"}, environ={})
    for wrong in ({"max_token": "allow"}, {"max_tokens": "cut"}, {"prompt_tokens": "allow"}):
        with pytest.raises(ValueError, match="policy"):
            Policy(SHAPES, wrong)
