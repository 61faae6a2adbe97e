"""Ask one instance, at its own address, whether it is there and fit to serve: ping, readiness, a token.

Owns no state. Refuses torch, numpy and asyncio.
"""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from zl.client.errors import ZlClientError
from zl.client.messages import Timeouts
from zl.client.sync import Client
from zl.errors import ZlError
from zl.tools.fetching import fetch
from zl.tools.fleet import Instance

PROBE_S = 2.0
CANARY_S = 30.0


class NotReadyError(ZlError):
    """An instance is not fit to serve; the text says in what way."""


def probe(instance: Instance) -> None:
    """Ping the instance on a new connection, and ask its readiness URL if it has one.

    A server that drains, or whose engine stands still, closes new connections that ping.

    Raises  NotReadyError
    """
    try:
        with Client(instance.address, timeout=PROBE_S, ca_file=instance.ca_file) as client:
            client.ping()
    except ZlClientError as error:
        raise NotReadyError(f"{instance.name} does not answer a ping: {error}") from error
    if not instance.ready:
        return
    url = urlsplit(instance.ready)
    try:
        answer = fetch(url.hostname or "", url.port or 80, (url.path or "/") + (url.query and "?" + url.query), PROBE_S)
    except TimeoutError as error:
        raise NotReadyError(f"{instance.name}: no answer from {instance.ready} within {PROBE_S:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise NotReadyError(f"{instance.name}: no answer from {instance.ready} ({error})") from error
    if not 200 <= answer.status < 300:
        raise NotReadyError(f"{instance.name} is not ready: {instance.ready} says {answer.status}")


def canary(instance: Instance, auth_token: str) -> str:
    """Have the instance generate a token; return its model and build.

    Raises  NotReadyError
    """
    try:
        limits = Timeouts(PROBE_S, CANARY_S, CANARY_S)
        with Client(instance.address, timeout=limits, auth_token=auth_token, ca_file=instance.ca_file) as client:
            info = client.hello(auth_token)
            answer = client.ask("ready?", max_tokens=1, temperature=0, ignore_eos=True)
    except ZlClientError as error:
        raise NotReadyError(f"{instance.name} does not answer a request: {error}") from error
    if len(answer.token_ids) != 1:
        raise NotReadyError(f"{instance.name} answered a request for one token with {len(answer.token_ids)}")
    return f"model {info.model}, version {info.version}, build {info.build_id[:12]}"


def answers(instance: Instance) -> bool:
    """Say whether the instance is there and takes requests."""
    try:
        probe(instance)
    except NotReadyError:
        return False
    return True
