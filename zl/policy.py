"""Policy: what becomes of a request that passes one of the founding thresholds: allow it, clamp it, or reject it.

One home for all of them: who finds a threshold exceeded asks here what to do, and is counted by asking.

State: the choices, frozen at start, and one counter for each. Refuses torch, numpy, asyncio and net.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from zl.errors import Code, RequestError
from zl.shapes import MANY_MESSAGES, MAX_MESSAGES, Shapes

if TYPE_CHECKING:
    from zl.net.messages import Content, Request

ALLOW, CLAMP, REJECT = ACTIONS = ("allow", "clamp", "reject")

DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "max_tokens": CLAMP,
        "temperature": ALLOW,
        "messages": REJECT,
        "system_tokens": CLAMP,
        "context_tokens": CLAMP,
        "prompt_tokens": CLAMP,
    }
)
"""What is done by default, by threshold. `prompt_tokens` is what the model holds, so it cannot be allowed."""

TEMPERATURES = (0.1, 0.8)
"""The founding range. It holds a request's own value; a profile's may lie outside."""


@dataclass(slots=True)
class PolicyCounters:
    """Plain counters, read at scrape. `exceeded`: requests past a threshold, by (threshold, action)."""

    exceeded: dict[tuple[str, str], int] = field(default_factory=dict)


class Ruling(NamedTuple):
    """What a request is served with.

    max_tokens   0: the server's default
    cut          turns were dropped
    """

    messages: Sequence[Content]
    temperature: float | None
    max_tokens: int
    cut: bool


class Policy:
    """Rule on the thresholds of one server.

    actions       by threshold one of ACTIONS; those that are not named as in DEFAULTS
    temperatures  (low, high), both allowed
    Raises        ValueError: an unknown threshold or action
    """

    def __init__(
        self,
        shapes: Shapes,
        actions: Mapping[str, str] = DEFAULTS,
        temperatures: tuple[float, float] = TEMPERATURES,
    ):
        self.actions: Mapping[str, str] = MappingProxyType({**DEFAULTS, **actions})
        for limit, action in self.actions.items():
            if limit not in DEFAULTS or action not in actions_of(limit):
                raise ValueError(f"policy: {action!r} is no action for {limit!r}")
        self._low, self._high = temperatures
        longest = shapes.max_model_len - 1
        self._limit_tokens = min(shapes.max_tokens, longest)
        self.max_tokens = longest if self.actions["max_tokens"] == ALLOW else self._limit_tokens
        """Most tokens of an answer."""
        self.max_messages = MANY_MESSAGES if self.actions["messages"] == ALLOW else MAX_MESSAGES
        """Most turns of a conversation."""
        self._counting = threading.Lock()  # long prompts are built on a thread of their own
        self.counters = PolicyCounters(dict.fromkeys(self.actions.items(), 0))

    def start_counting(self) -> None:
        """Begin anew, in place: what the server asked itself before READY is nobody's request."""
        for item in self.counters.exceeded:
            self.counters.exceeded[item] = 0

    def over(self, limit: str) -> str:
        """Count a request that passes a threshold; return what to do about it."""
        action = self.actions[limit]
        with self._counting:
            self.counters.exceeded[limit, action] += 1
        return action

    def rule(self, request: Request) -> Ruling:
        """Hold a request to the thresholds that need no tokenizer.

        Raises  RequestError: LIMIT_EXCEEDED, naming the field
        """
        messages: Sequence[Content] = request.messages
        temperature, max_tokens = request.temperature, request.max_tokens
        cut = False
        if len(messages) > MAX_MESSAGES:
            messages = self._messages(messages)
            cut = len(messages) < len(request.messages)
        if temperature is not None and not self._low <= temperature <= self._high:
            temperature = self._temperature(temperature)
        if max_tokens > self._limit_tokens:
            max_tokens = self._max_tokens(max_tokens)
        return Ruling(messages, temperature, max_tokens, cut)

    def _messages(self, messages: Sequence[Content]) -> Sequence[Content]:
        n_turns = len(messages)
        action = self.over("messages")
        if action != CLAMP and n_turns > self.max_messages:
            _refuse("messages", f"{n_turns} turns, the limit is {self.max_messages}")
        if action == CLAMP:  # an even number of the oldest, so that a user's turn comes first
            return messages[(n_turns - MAX_MESSAGES + 1) // 2 * 2 :]
        return messages

    def _temperature(self, value: float) -> float:
        action = self.over("temperature")
        if action == REJECT:
            _refuse("temperature", f"{value:g} is outside {self._low:g} to {self._high:g}, which this server allows")
        return min(self._high, max(self._low, value)) if action == CLAMP else value

    def _max_tokens(self, value: int) -> int:
        if self.over("max_tokens") == REJECT:
            _refuse("max_tokens", f"{value} tokens, the limit is {self._limit_tokens}; ask for fewer")
        return min(value, self.max_tokens)


def actions_of(limit: str) -> tuple[str, ...]:
    """List the actions that a threshold can have."""
    return (CLAMP, REJECT) if limit == "prompt_tokens" else ACTIONS


def _refuse(name: str, text: str) -> None:
    raise RequestError(Code.LIMIT_EXCEEDED, f"{name}: {text}", field=name)
