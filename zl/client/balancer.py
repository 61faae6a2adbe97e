"""Which endpoint takes the next request, and what a failure means for it and for the request: the rules, without I/O.

State: for each endpoint its requests in flight, and until when it is to be left alone. Time comes as an argument, in
seconds of any monotonic clock. Refuses sockets, threads and asyncio; the pools bring those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from zl.address import parse_target
from zl.client.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    Draining,
    Overloaded,
    RequestRefused,
    ServerError,
    StreamBroken,
    TimedOut,
    TlsFailed,
    ZlClientError,
)
from zl.client.messages import Options
from zl.errors import Code, ConfigError

FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 30.0
BUSY_S = 0.1
"""Pause of an endpoint that is overloaded and gave no hint."""
LEAVING_S = 1.0
"""How long an endpoint that drains or has failed inside comes last; when it is gone, its connection ends."""
PROBING_S = 0.02
"""How soon to look again while a probe is under way."""


class Endpoint:
    """One server. `probe_at` None: it is taken to be alive; otherwise when it is to be tried next.

    wrong  why waiting for it is no use: its certificate, say; empty where it may just be down
    """

    __slots__ = ("address", "failures", "free_at", "in_flight", "leaving_until", "probe_at", "probing", "wrong")

    def __init__(self, address: str):
        self.address = address
        self.in_flight = 0
        self.failures = 0
        self.free_at = 0.0
        self.leaving_until = 0.0
        self.probe_at: float | None = None
        self.probing = False
        self.wrong = ""

    def __repr__(self) -> str:
        state = "alive" if self.probe_at is None else self.wrong or f"ejected after {self.failures} failures"
        return f"<{self.address}: {state}, {self.in_flight} in flight>"


def _why(endpoint: Endpoint, error: TlsFailed) -> str:
    return str(error).removeprefix(f"cannot connect to {endpoint.address}: ")


class Balancer:
    """Picks the endpoint with the fewest requests in flight among those that are alive and not asked to be spared.

    Raises  ConfigError: no endpoints, the same one twice, or one that is no address
    """

    def __init__(self, addresses: str | Iterable[str]):
        texts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        names = [str(parse_target(text.strip())) for text in texts if text.strip()]
        if not names:
            raise ConfigError("there are no endpoints: write for example tcp:10.0.0.1:7433,tcp:10.0.0.2:7433")
        if len(set(names)) < len(names):
            raise ConfigError(f"an endpoint is there twice among {', '.join(names)}: name each once")
        self.endpoints = [Endpoint(name) for name in names]
        self._turn = 0

    def pick(self, now: float) -> Endpoint | None:
        """Take an endpoint for one request, which counts as in flight until `done`; None: none is usable now."""
        usable = [each for each in self.endpoints if each.probe_at is None and each.free_at <= now]
        if not usable:
            return None
        # One that drains comes last, but it comes: behind its address there may be another server, which takes new
        # connections. Equals take turns: with one request at a time the first would otherwise get them all.
        self._turn += 1
        n = len(self.endpoints)

        def rank(each: Endpoint) -> tuple[bool, int, int]:
            return each.leaving_until > now, each.in_flight, (self.endpoints.index(each) - self._turn) % n

        best = min(usable, key=rank)
        best.in_flight += 1
        return best

    def done(self, endpoint: Endpoint) -> None:
        """Take the end of a request, however it ended."""
        endpoint.in_flight -= 1

    def wait(self, now: float) -> float:
        """Say in how many seconds `pick` or `due` may have something new."""
        if any(each.probing for each in self.endpoints):
            return PROBING_S
        times = [each.free_at if each.probe_at is None else each.probe_at for each in self.endpoints]
        return max(0.0, min(times) - now)

    def busy(self, endpoint: Endpoint, now: float, seconds: float) -> None:
        """Spare an endpoint for a while: it is alive but asked for it."""
        endpoint.free_at = max(endpoint.free_at, now + seconds)

    def leaving(self, endpoint: Endpoint, now: float) -> None:
        """Prefer the others for a while: the server at the end of the connection drains."""
        endpoint.leaving_until = now + LEAVING_S

    def lost(self, endpoint: Endpoint, now: float) -> None:
        """Eject an endpoint whose connection failed; the first probe is due at once."""
        if endpoint.probe_at is None:  # the other requests on the same connection tell the same story
            endpoint.failures = 1
            endpoint.probe_at = now

    def distrust(self, endpoint: Endpoint, now: float, error: TlsFailed) -> None:
        """Eject an endpoint with which TLS does not come about; probes find out when somebody has put that right."""
        endpoint.wrong = _why(endpoint, error)
        if endpoint.probe_at is None:
            endpoint.failures = 1
            endpoint.probe_at = now + FIRST_DELAY_S

    @property
    def hopeless(self) -> bool:
        """Say whether there is nothing to wait for: no endpoint is usable, nor merely down, nor being asked."""
        return all(each.wrong and each.probe_at is not None and not each.probing for each in self.endpoints)

    def due(self, now: float) -> list[Endpoint]:
        """Give the ejected endpoints that are to be probed now; each until `alive` or `dead` is said of it."""
        found = [each for each in self.endpoints
                 if each.probe_at is not None and not each.probing and each.probe_at <= now]  # fmt: skip
        for each in found:
            each.probing = True
        return found

    def alive(self, endpoint: Endpoint) -> None:
        """Take an endpoint back: a probe was answered."""
        endpoint.probing, endpoint.probe_at, endpoint.failures, endpoint.wrong = False, None, 0, ""

    def dead(self, endpoint: Endpoint, now: float, error: ZlClientError | None = None) -> None:
        """Note that a probe failed; the next comes after a delay that doubles up to half a minute."""
        endpoint.probing = False
        endpoint.wrong = _why(endpoint, error) if isinstance(error, TlsFailed) else ""
        endpoint.probe_at = now + min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (endpoint.failures - 1))
        endpoint.failures += 1


class Retry:
    """How often and how long one request may still be tried. Only one that has produced no token is ever tried again.

    patience  seconds from the start after which a failure is final; the request's own deadline may be sooner
    over      nobody waits for the answer any more: whoever is about to try the request does not
    """

    def __init__(self, options: Options, now: float, patience: float, attempts: int):
        self._options = options
        self._begun = now
        self._left = attempts
        deadline_ms = options.get("deadline_ms") or 0
        self._deadline = now + deadline_ms / 1000 if deadline_ms else None
        self.give_up_at = now + patience if self._deadline is None else min(now + patience, self._deadline)
        self.last: ZlClientError | None = None
        self.over = False

    def options(self, now: float) -> Options:
        """Give the options of the next attempt: what is left of the deadline is the new one.

        Raises  DeadlineExceeded
        """
        if self._deadline is None:
            return self._options
        left_ms = int((self._deadline - now) * 1000)
        if left_ms <= 0:
            raise DeadlineExceeded(f"the deadline passed before any endpoint answered: {self.last}") from self.last
        return cast("Options", {**self._options, "deadline_ms": left_ms})

    def failed(
        self,
        balancer: Balancer,
        endpoint: Endpoint,
        error: ZlClientError,
        now: float,
        *,
        served: bool = False,
        stale: bool = False,
    ) -> None:
        """Note a failure for the endpoint; return where the request may be tried again, raise it where not.

        served  the connection had answered before. Where it drains now, a new one to the same address may well reach
                the server that takes over (a shared socket, a load balancer): nothing is waited for. A connection
                whose first word is DRAINING says that nobody has taken over yet.
        stale   a newer connection has replaced it: what happens to it says nothing about the endpoint
        """
        again = error.tokens_received == 0
        if isinstance(error, TlsFailed):
            balancer.distrust(endpoint, now, error)
            again = len(balancer.endpoints) > 1
        elif isinstance(error, ConnectionFailed | StreamBroken):
            if not stale:
                balancer.lost(endpoint, now)
        elif isinstance(error, Overloaded):
            balancer.busy(endpoint, now, error.retry_after or BUSY_S)
        elif isinstance(error, Draining) and (served or stale):
            balancer.leaving(endpoint, now)
        elif isinstance(error, Draining) or (isinstance(error, ServerError) and error.code == Code.INTERNAL):
            balancer.busy(endpoint, now, error.retry_after or LEAVING_S)
        else:
            if isinstance(error, TimedOut) and not stale:
                balancer.lost(endpoint, now)  # a ping will tell whether it is there
            again = False
        self._left -= 1
        self.last = error
        if not again or self._left <= 0 or now >= self.give_up_at:
            raise error

    def pause(self, balancer: Balancer, now: float) -> float:
        """Say how long to wait when there is no endpoint to pick.

        Raises  the last error, or ConnectionFailed: patience ends sooner
        """
        seconds = balancer.wait(now)
        if balancer.hopeless or now + seconds > self.give_up_at:
            states = ", ".join(map(repr, balancer.endpoints))
            if any(each.wrong for each in balancer.endpoints) and not isinstance(self.last, RequestRefused | TimedOut):
                kind = TlsFailed if balancer.hopeless else ConnectionFailed
                raise kind(f"no endpoint can be used: {states}") from self.last
            raise self.last or ConnectionFailed(f"no endpoint can be used: {states}; are the servers running?")
        return max(seconds, 0.001)
