"""Warming up: requests of our own, answered before anybody is let in.

The canary proves the whole path; the configured system prompts are computed into constant pages that stay for good.
State: none beyond the requests under way; the event-loop thread. Refuses torch and gpu.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from zl.errors import ConfigError, DeviceError, RequestError
from zl.net import codec
from zl.service import Service
from zl.shapes import PAGE, Shapes
from zl.text.prompt import PromptBuilder

log = logging.getLogger("zl")

_MESSAGE = b"Hello"


class Own:
    """A connection that ends here: it keeps the frames of our own requests."""

    name = "own"
    peer = ""

    def __init__(self, n_requests: int) -> None:
        self.frames: list[bytes] = []
        self.done = asyncio.Event()
        self._open = n_requests

    def queue(self, data: bytes) -> None:
        """Keep a frame."""
        self.frames.append(data)

    def finished(self, request_id: int) -> None:  # noqa: ARG002
        """Note the end of one request."""
        self._open -= 1
        if not self._open:
            self.done.set()

    def flush(self) -> None:
        """Nothing to write to."""


async def ask(service: Service, requests: Sequence[codec.Request], stop: asyncio.Event) -> list[codec.Response]:
    """Answer requests together; return their frames, fewer where `stop` was set before the end.

    Returns when their rows are free again. Raises RequestError: one was not admitted
    """
    conn = Own(len(requests))
    for request in requests:
        service.submit(conn, request)
    waits = [asyncio.ensure_future(event.wait()) for event in (conn.done, stop)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    while service.dispatcher.rows.in_use and not stop.is_set():
        await asyncio.sleep(0.001)
    return [codec.decode_response(frame[4:]) for frame in conn.frames]


async def prove(service: Service, stop: asyncio.Event) -> None:
    """Let the engine answer a first request. Raises DeviceError: it did not."""
    n_tokens = min(4, service.policy.max_tokens)
    request = codec.Request(request_id=1, messages=[_MESSAGE], max_tokens=n_tokens, seed=0, ignore_eos=True)
    frames = await ask(service, [request], stop)
    if not frames or frames[-1].error is not None or not frames[-1].is_finished:
        why = frames[-1].error if frames and frames[-1].error is not None else "no answer"
        raise DeviceError(f"the model did not answer a first request: {why}")


async def keep_prompts(
    service: Service, prompts: PromptBuilder, texts: Sequence[str], shapes: Shapes, stop: asyncio.Event
) -> int:
    """Compute system prompts into constant pages and keep these for good; return how many tokens that are.

    Raises  ConfigError: the template has no place for one, or they leave no room for requests
    """
    budget, _ = service.dispatcher.prompt_budget(1)
    kept = 0
    for number, text in enumerate(texts):
        system, where = text.encode(), f"system_prompts[{number}]"
        request = codec.Request(request_id=1, system=system, messages=[_MESSAGE], max_tokens=1, seed=0)
        try:
            prompt = prompts.build(system, [_MESSAGE], max_prompt_tokens=budget)
            await ask(service, [request], stop)
        except RequestError as refusal:
            raise ConfigError(f"{where}: {refusal.message}") from refusal
        if stop.is_set():
            break
        if prompt.truncated:
            log.warning("%s is over system_tokens (%d) and was cut, as in a request", where, shapes.system_tokens)
        n_tokens = service.dispatcher.pin(np.array(prompt.ids, np.int32), prompt.prefix_len)
        if not n_tokens:
            short = prompt.prefix_len < PAGE
            why = f"it has less than a page of {PAGE} tokens" if short else "there are too many of them"
            log.warning("%s is not kept: %s", where, why)
        kept += n_tokens
        if service.dispatcher.pages_left() < shapes.pages_per_row:
            raise ConfigError(
                f"{where}: {kept // PAGE} of {shapes.n_pages} KV pages are kept so far and leave no room for a request "
                f"of max_model_len {shapes.max_model_len}: raise --kv-memory or name fewer"
            )
    return kept
