"""From a checked request to a job: queue room, policy, vocabulary, profile, and what builds its prompt.

State: none of a request's. The event loop's thread, but for long texts, which become prompts on another. Refuses
torch, asyncio and gpu.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zl.dispatch import Dispatcher
from zl.errors import Code, RequestError
from zl.ids import Ids
from zl.net import rules
from zl.net.messages import Content, Encoding, Request
from zl.policy import Policy
from zl.rows import Job
from zl.sampling import profiles
from zl.shapes import TOKEN_BYTES
from zl.text.detok import TextStream, TokenTable
from zl.text.outline import CONTEXT, placed
from zl.text.prompt import PromptBuilder
from zl.text.template import SYSTEM

log = logging.getLogger("zl")

NO_IDS = Ids.of(())


class Ready(NamedTuple):
    """A prompt's ids where they lie; the rest as in text.prompt.Prompt."""

    ids: Ids
    prefix_len: int
    truncated: bool


class Built(NamedTuple):
    """What building a prompt off the event loop came to."""

    outcome: Ready | RequestError
    spent_ns: int


class Admission:
    """Make jobs of one server's requests.

    arena  uint8 [n], the memory that leased berths lie in
    """

    def __init__(
        self,
        *,
        prompts: PromptBuilder,
        tokens: TokenTable,
        vocab_size: int,
        policy: Policy,
        dispatcher: Dispatcher,
        arena: np.ndarray | None = None,
    ):
        self._prompts = prompts
        self._tokens = tokens
        self._vocab_size = vocab_size
        self.policy = policy
        self._dispatcher = dispatcher
        self._arena = arena

    def job(self, conn: Any, request: Request, now: float) -> tuple[Job, Callable[[], Ready]]:
        """Make the job of a request, and what builds its prompt; RequestError: it is refused."""
        self._dispatcher.ensure_room(now)
        ruling = self.policy.rule(request)
        tokens = request.encoding == Encoding.TOKENS
        if tokens and not known(request, self._vocab_size):
            rules.check_tokens(request, self._vocab_size)  # finds the culprit, one id at a time
        budget, max_new = self._dispatcher.prompt_budget(ruling.max_tokens)
        job = Job(
            conn=conn,
            request_id=request.request_id,
            prompt=NO_IDS,
            prefix_len=0,
            max_new=max_new,
            sampling=profiles.resolve(request.type, ruling.temperature, request.top_p, request.repetition_penalty),
            seed=request.seed if request.seed is not None else int.from_bytes(os.urandom(8), "little"),
            stream=TextStream(self._tokens, request.stop),
            arrived=now,
            deadline=now + request.deadline_ms / 1_000 if request.deadline_ms else None,
            ignore_eos=request.ignore_eos,
            logprobs=request.logprobs,
            truncated=ruling.cut,
        )
        return job, partial(self._placed if tokens else self._encoded, request, ruling.messages, budget)

    def _encoded(self, request: Request, messages: Sequence[Content], budget: int) -> Ready:
        """Build the prompt of a TEXT request; any thread."""
        prompt = self._prompts.build(request.system, messages, request.context, budget)
        return Ready(Ids.of(prompt.ids), prompt.prefix_len, prompt.truncated)

    def _placed(self, request: Request, messages: Sequence[Content], budget: int) -> Ready:
        """Lay out the prompt of a TOKENS request, whose ids stay where they are."""
        contents = {SYSTEM: request.system, **dict(enumerate(messages, 1)), CONTEXT: request.context}
        system, *turns, context = [len(packed) // TOKEN_BYTES for packed in contents.values()]
        outline = self._prompts.outline(system, turns, context, budget)
        return Ready(placed(outline, contents, request.lease, self._arena), outline.prefix_len, outline.truncated)


def known(request: Request, vocab_size: int) -> bool:
    """Tell whether every packed id is of the vocabulary: one pass in C, for 4,000 ids would take 0.2 ms in Python."""
    for packed in (request.system, request.context, *request.messages):
        if len(packed) % TOKEN_BYTES:
            return False
        # As unsigned numbers the negative ids are the largest.
        if packed and int(np.frombuffer(packed, "<u4").max()) >= vocab_size:
            return False
    return True


def text_bytes(request: Request) -> int:
    """Count the bytes of text that a prompt is to be made of; token ids are none."""
    if request.encoding == Encoding.TOKENS:
        return 0
    return len(request.system) + len(request.context) + sum(map(len, request.messages))


def built(build: Callable[[], Ready]) -> Built:
    """Build a prompt on a thread that must not raise."""
    begun = time.perf_counter_ns()
    try:
        outcome: Ready | RequestError = build()
    except RequestError as refusal:
        outcome = refusal
    except Exception as failure:  # a fault of ours must end the request, not leave it hanging
        log.exception("building a prompt failed")
        outcome = RequestError(Code.INTERNAL, f"the prompt could not be built: {type(failure).__name__}")
    return Built(outcome, time.perf_counter_ns() - begun)
