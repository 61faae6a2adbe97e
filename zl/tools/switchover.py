"""Move traffic from one instance to another without a failed request: gate, move, watch, drain, roll back.

Order: the new one is started and must answer; traffic is moved; it must stay well for a while; only then are the others
told to drain, and it is watched until they are gone. Until then nothing has been taken away, so rolling back is to
leave the others as they are. Clients of a draining server are told DRAINING and come back over a new connection, which
reaches the new one.

State: of one procedure, when it began. Refuses torch, numpy and asyncio.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial

from zl.errors import ZlError
from zl.tools import probing
from zl.tools.fleet import Fleet, Instance
from zl.tools.haproxy import Runtime
from zl.tools.interruption import Interrupted, Interruption

POLL_S = 0.25
FAILURES = 2
"""Probes in a row that must fail before an instance that was well counts as ill."""


class SwitchError(ZlError):
    """The procedure failed, or a signal ended it; the text says why and what serves now."""

    def __init__(self, text: str, status: int = ZlError.exit_status):
        super().__init__(text)
        self.exit_status = status


class Procedure:
    """One run of `zl switch`.

    say           is told each step, one line; it must raise nothing: telling is not to stop the doing
    interruption  raises Interrupted where a signal is to end the procedure
    """

    def __init__(
        self, fleet: Fleet, say: Callable[[str], None], auth_token: str = "", interruption: Interruption | None = None
    ):
        self._interruption = interruption or Interruption()
        self._fleet = fleet
        self._auth_token = auth_token
        self._begun = time.monotonic()
        self._tell = say
        self._proxies = [Runtime(address) for address in fleet.sockets]

    def switch(self, name: str) -> None:
        """Have the instance of that name serve, and no other.

        Raises  ConfigError: no such instance; SwitchError: the old ones go on, or serve again, or did not stop; what
                serves then is in its text
        """
        new = self._fleet.named(name)
        old = [each for each in self._fleet.instances if each is not new and probing.answers(each)]
        started = not probing.answers(new)
        try:
            self._bring_up(new, started)
            self._move_to(new)
            self._stay_well(new)
        except BaseException as error:  # a signal too: nothing has been taken from the old ones yet
            self._interruption.hold()
            self._undo(new, old, started)
            if not isinstance(error, ZlError | Interrupted):
                raise
            serving = ", ".join(each.name for each in old) or "nothing"
            status = error.status if isinstance(error, Interrupted) else SwitchError.exit_status
            raise SwitchError(f"rolled back, {serving} serves: {error}", status) from error
        left = list(old)
        try:
            while left:
                self._retire(left[0], new)
                del left[0]
            self._enable(new)
        except Interrupted as error:
            raise self._broken_off(error, new, left) from error
        self._say(f"{new.name} serves" + (f"; {', '.join(each.name for each in old)} stopped" if old else ""))

    def roll(self) -> None:
        """Restart every instance that serves, one after the other, while the others serve.

        Raises  SwitchError: fewer than two serve, or one did not come back; those that had not been touched serve
        """
        serving = [each for each in self._fleet.instances if probing.answers(each)]
        if len(serving) < 2:
            names = ", ".join(each.name for each in serving) or "none"
            raise SwitchError(f"a rolling restart needs two instances that serve, not {names}; use zl switch NAME")
        for n, each in enumerate(serving):
            rest = [other for other in serving if other is not each]
            ended = False
            try:
                self._take_down(each, rest)
                ended = True
                self._take_up(each)
            except Interrupted as error:
                raise self._roll_broken_off(error, serving, n, ended) from error
        self._say(f"restarted {', '.join(each.name for each in serving)}")

    # -- steps -------------------------------------------------------------------------------------------------------

    def _take_down(self, each: Instance, rest: Sequence[Instance]) -> None:
        if not any(probing.answers(other) for other in rest):
            raise SwitchError(f"{each.name} was not restarted: no other instance answers")
        self._set_state(each, "drain")
        try:
            self._stop(each, rest)
        except SwitchError as error:
            if probing.answers(each):
                self._set_state(each, "ready")
            raise SwitchError(f"{each.name} was not restarted, {self._who_serves()}: {error}") from error

    def _take_up(self, each: Instance) -> None:
        try:
            self._bring_up(each, True)
        except ZlError as error:
            raise SwitchError(f"{each.name} did not come back, the others serve: {error}") from error
        self._set_state(each, "ready")
        self._await_proxies(each)
        self._stay_well(each)

    def _bring_up(self, new: Instance, started: bool) -> None:
        if started:
            self._say(f"starting {new.name}: {' '.join(new.start_command)}")
            _run(new.start_command, self._fleet.start_s)
        deadline = time.monotonic() + self._fleet.start_s
        while True:
            try:
                probing.probe(new)
                break
            except probing.NotReadyError as error:
                if time.monotonic() > deadline:
                    raise SwitchError(f"not ready within {self._fleet.start_s:g} s: {error}") from error
            time.sleep(POLL_S)
        what = probing.canary(new, self._auth_token) if self._fleet.canary else "answers pings"
        self._say(f"{new.name} is well: {what}")

    def _move_to(self, new: Instance) -> None:
        fleet = self._fleet
        self._command(new)
        self._set_state(new, "ready")
        self._await_proxies(new)
        for other in fleet.instances:
            if other is not new:
                self._set_state(other, "drain")
        self._say(f"traffic goes to {new.name}" if fleet.traffic != "shared" else f"{new.name} accepts connections too")

    def _stay_well(self, new: Instance) -> None:
        deadline = time.monotonic() + self._fleet.steady_s
        watch = _Watch([new])
        while time.monotonic() < deadline:
            if ill := watch.look():
                raise SwitchError(ill)
            time.sleep(POLL_S)

    def _retire(self, old: Instance, new: Instance) -> None:
        """Drain and stop the old; should the new one fall ill meanwhile, bring the old back."""
        try:
            ill = self._stop(old, [new])
        except SwitchError as error:
            raise SwitchError(self._not_stopped(old, new, error)) from error
        if not ill:
            self._set_state(old, "maint")
            return
        self._say(f"{new.name} fell ill while {old.name} drained ({ill}); bringing {old.name} back")
        self._bring_up(old, True)
        self._move_to(old)
        raise SwitchError(f"rolled back, {old.name} serves again after a restart: {ill}")

    def _stop(self, old: Instance, watched: Sequence[Instance]) -> str:
        """Stop an instance, which returns when its last answer has ended; say what the watched ones suffered."""
        self._say(f"draining {old.name}: {' '.join(old.stop_command)}")
        begun = time.monotonic()
        watch = _Watch(watched)
        ill = ""
        try:
            process = subprocess.Popen(old.stop_command, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise SwitchError(f"{' '.join(old.stop_command)} cannot be run: {error.strerror}") from None
        try:
            while process.poll() is None:
                if time.monotonic() - begun > self._fleet.drain_s:
                    process.kill()
                    process.wait()
                    raise SwitchError(f"{old.name} did not stop within {self._fleet.drain_s:g} s; it may still run")
                ill = ill or watch.look()
                time.sleep(POLL_S / 5)
        except Interrupted:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)  # Ctrl-C has reached it too; else it goes on, and stops the old one without us
            raise
        command = " ".join(old.stop_command)
        if process.returncode:
            raise SwitchError(f"{command} ended with status {process.returncode}")
        if not ill and probing.answers(old):  # such as a command that sends its signal to the wrong process
            raise SwitchError(f"{command} has returned, but {old.name} still serves at {old.address}")
        self._say(f"{old.name} has ended, {time.monotonic() - begun:.1f} s after it was told to")
        return ill

    def _undo(self, new: Instance, old: Sequence[Instance], started: bool) -> None:
        self._say(f"rolling back: {', '.join(each.name for each in old) or 'nothing'} stays")
        steps: list[Callable[[], None]] = [partial(self._set_state, each, "ready") for each in old]
        if old:
            steps += [partial(self._command, old[0]), partial(self._set_state, new, "maint")]
        if started:
            steps.append(partial(_run, new.stop_command, self._fleet.drain_s))
        for step in steps:  # each for itself: what can be taken back is
            n_held = self._interruption.n_held
            failed = _failure(step)
            if failed and self._interruption.n_held > n_held:
                failed = _failure(step)  # an impatient Ctrl-C has ended its command; we have not heard it
            if failed:
                self._say(f"rolling back, a step failed: {failed}")

    def _broken_off(self, error: Interrupted, new: Instance, left: Sequence[Instance]) -> SwitchError:
        """Make the exception for a signal after traffic has gone to the new one; `left` were still to be retired."""
        self._interruption.hold()
        well = probing.answers(new)
        states = [f"{new.name} serves" if well else f"{new.name} does not answer"]
        for each in left:
            states.append(f"{each.name} still answers" if probing.answers(each)
                          else f"{each.name} takes no requests, and may still be at its last answers")  # fmt: skip
        remedy = f"zl switch {new.name} once more does what is left" if well or not left else (
            f"zl switch {left[0].name} has {left[0].name} serve again")  # fmt: skip
        return SwitchError(f"{error}: {', '.join(states)}; {remedy}", error.status)

    def _roll_broken_off(
        self, error: Interrupted, serving: Sequence[Instance], n: int, ended: bool
    ) -> SwitchError:  # fmt: skip
        """Make the exception for a signal while the n-th of those that serve was restarted; `ended`: it was down."""
        self._interruption.hold()
        each, rest = serving[n], [other.name for other in serving[n + 1 :]]
        up = [other.name for other in serving if probing.answers(other)]
        proxied = self._fleet.traffic == "haproxy"
        todo: list[str] = []
        if each.name not in up:
            ready = f", and set {each.server} ready in HAProxy" if proxied else ""
            todo.append(f"start {each.name} when it has ended, with {' '.join(each.start_command)}{ready}")
        elif failed := _failure(partial(self._set_state, each, "ready")):
            todo.append(f"set {each.server} ready in HAProxy ({failed})")
        if each.name in up and not ended:
            rest.insert(0, each.name)  # it may have been told to stop, and be about to
        if rest:
            todo.append(f"restart {', '.join(rest)}")
        said = f"{', '.join(up) or 'nothing'} {'serve' if len(up) > 1 else 'serves'}"
        text = f"{error} while {each.name} was being restarted: {said}; left to do: {'; '.join(todo) or 'nothing'}"
        return SwitchError(text, error.status)

    def _command(self, instance: Instance) -> None:
        if self._fleet.traffic == "command":
            _run([part.replace("{name}", instance.name) for part in self._fleet.move], self._fleet.start_s)

    def _set_state(self, instance: Instance, state: str) -> None:
        if self._fleet.traffic == "haproxy":
            for proxy in self._proxies:
                proxy.set_state(self._fleet.backend, instance.server, state)

    def _await_proxies(self, instance: Instance) -> None:
        """Wait until every HAProxy's own checks have found the instance well."""
        if self._fleet.traffic != "haproxy":
            return
        deadline = time.monotonic() + self._fleet.start_s
        for proxy in self._proxies:
            while not proxy.state(self._fleet.backend, instance.server).takes_traffic:
                if time.monotonic() > deadline:
                    raise SwitchError(f"HAProxy at {proxy.address} does not find {instance.server} up")
                time.sleep(POLL_S / 5)

    def _not_stopped(self, old: Instance, new: Instance, error: SwitchError) -> str:
        """Say what serves after the old one did not stop as it should, and what to do about it."""
        shared = self._fleet.traffic == "shared"
        serves = self._who_serves() if shared else f"traffic goes to {new.name}, {old.name} gets no new one"
        back = f", or go back: zl switch {old.name}, which stops {new.name}" if probing.answers(old) else ""
        return f"{serves}: {error}; end {old.name} by hand{back}"

    def _who_serves(self) -> str:
        names = [each.name for each in self._fleet.instances if probing.answers(each)]
        how = {0: "nothing serves", 1: "{} serves", 2: "{} both serve now"}.get(len(names), "{} all serve now")
        return how.format(" and ".join(names))

    def _enable(self, new: Instance) -> None:
        if not self._fleet.enable:
            return
        for each in self._fleet.instances:
            if each.unit:
                verb = "enable" if each is new else "disable"
                try:
                    _run(("systemctl", "--quiet", verb, f"{each.unit}.service"), self._fleet.start_s)
                except ZlError as error:
                    self._say(f"the next boot may start another instance: {error}")

    def _say(self, text: str) -> None:
        self._tell(f"{time.monotonic() - self._begun:7.1f} s  {text}")


class _Watch:
    """Look at instances that were well; ill is what fails several probes in a row."""

    def __init__(self, instances: Sequence[Instance]):
        self._failures = dict.fromkeys(instances, 0)
        self._next = 0.0

    def look(self) -> str:
        """Probe them if it is time; say what is wrong, or nothing."""
        if time.monotonic() < self._next:
            return ""
        for instance, n in self._failures.items():
            try:
                probing.probe(instance)
                self._failures[instance] = 0
            except probing.NotReadyError as error:
                self._failures[instance] = n + 1
                if n + 1 >= FAILURES:
                    return str(error)
        self._next = time.monotonic() + POLL_S
        return ""


def _failure(step: Callable[[], None]) -> str:
    """Take a step; say how it failed, or nothing."""
    try:
        step()
    except ZlError as error:
        return str(error)
    return ""


def _run(command: Sequence[str], seconds: float) -> None:
    try:
        subprocess.run(list(command), stdin=subprocess.DEVNULL, check=True, timeout=seconds)
    except subprocess.CalledProcessError as error:
        raise SwitchError(f"{' '.join(command)} ended with status {error.returncode}") from None
    except subprocess.TimeoutExpired:
        raise SwitchError(f"{' '.join(command)} did not return within {seconds:g} s") from None
    except OSError as error:
        raise SwitchError(f"{' '.join(command)} cannot be run: {error.strerror}") from None
