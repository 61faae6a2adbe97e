"""zl/tools/switchover.py: what is started, moved, stopped and taken back, with small servers and real commands."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.fake_server import FakeServer
from zl.cli import main
from zl.errors import ConfigError
from zl.net.codec import Finish, Usage, encode_last, encode_tokens
from zl.tools.fleet import Fleet, Instance
from zl.tools.switchover import Procedure, SwitchError


class Server(FakeServer):
    """Answers every request with one token; falls ill when its file appears."""

    def __init__(self, unix: Path, ill: Path, token: bool = True):
        super().__init__(unix)
        self._ill, self._token = ill, token

    async def _converse(self, reader, writer, running):
        if not self._ill.exists():  # a new connection to an ill server is closed, as WIRE.md says
            await super()._converse(reader, writer, running)

    async def _answer(self, request, writer):
        if self._token:
            writer.write(encode_tokens(request.request_id, [7], b"x", None, 1))
        writer.write(encode_last(request.request_id, [], b"", None, Finish.LENGTH, Usage()))


class Site:
    """Two instances whose commands write down that they were run."""

    def __init__(self, tmp_path: Path):
        self.folder = tmp_path
        self.said: list[str] = []
        self.fleet = Fleet((self.instance("blue"), self.instance("green")), start_s=1.0, steady_s=0.1, drain_s=10.0)

    def instance(self, name: str, stop: str = "") -> Instance:
        def note(what: str) -> str:
            return f"echo {what} {name} >>{self.folder / 'run'}"

        return Instance(
            name, f"unix:{self.folder / name}", start=("sh", "-c", note("start")),
            stop=("sh", "-c", f"{note('stop')}; {stop or f'touch {self.folder / name}.ill'}"),
        )  # fmt: skip

    def server(self, name: str, token: bool = True) -> Server:
        return Server(self.folder / name, self.folder / f"{name}.ill", token)

    def procedure(self, **changes) -> Procedure:
        return Procedure(replace(self.fleet, **changes), self.said.append)

    @property
    def run(self) -> list[str]:
        path = self.folder / "run"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_the_old_one_is_stopped_once_the_new_one_is_well(site):
    with site.server("blue"), site.server("green") as green:
        site.procedure().switch("green")
        assert site.run == ["stop blue"]  # green was there: it is not started twice
        assert len(green.requests) == 1  # the canary
        assert "green is well: model fake" in "\n".join(site.said)
        site.procedure().switch("green")  # serves already, alone
        assert site.run == ["stop blue"]


def test_one_that_does_not_come_up_changes_nothing(site):
    with site.server("blue"):
        with pytest.raises(SwitchError, match="rolled back, blue serves: not ready within 1 s: green does not answer"):
            site.procedure().switch("green")
        assert site.run == ["start green", "stop green"]


def test_one_that_answers_pings_but_no_request_changes_nothing(site):
    with site.server("blue"), site.server("green", token=False):
        with pytest.raises(SwitchError, match="answered a request for one token with 0"):
            site.procedure().switch("green")
        assert site.run == []  # it ran before: it is left as it was found


def test_one_that_falls_ill_while_it_is_watched_changes_nothing(site):
    with site.server("blue"), site.server("green"):
        threading.Timer(0.5, (site.folder / "green.ill").touch).start()
        with pytest.raises(SwitchError, match="rolled back, blue serves: green does not answer a ping"):
            site.procedure(steady_s=5.0).switch("green")
        assert site.run == []


def test_one_that_falls_ill_while_the_old_one_drains_is_left_for_the_old_one(site):
    # Blue's stop makes green ill, as an upgrade that cannot bear the whole load would be.
    stop = f"touch {site.folder / 'green.ill'}; sleep 1.5"
    with site.server("blue"), site.server("green"):
        with pytest.raises(SwitchError, match="rolled back, blue serves again"):
            site.procedure(instances=(site.instance("blue", stop), site.instance("green"))).switch("green")
        assert site.run == ["stop blue", "start blue"]


def test_a_start_command_that_fails_says_so(site):
    broken = replace(site.instance("green"), start=("sh", "-c", "exit 3"))
    missing = replace(site.instance("green"), start=("/nonexistent/zl",))
    with site.server("blue"):
        with pytest.raises(SwitchError, match="ended with status 3"):
            site.procedure(instances=(site.instance("blue"), broken)).switch("green")
        with pytest.raises(SwitchError, match="cannot be run: No such file"):
            site.procedure(instances=(site.instance("blue"), missing)).switch("green")


def test_an_old_one_that_does_not_end_is_reported(site):
    stuck = site.instance("blue", "exec sleep 20")
    with site.server("blue"), site.server("green"):
        begun = time.monotonic()
        with pytest.raises(SwitchError, match=r"blue did not stop within 0\.5 s; .*end blue by hand"):
            site.procedure(instances=(stuck, site.instance("green")), drain_s=0.5).switch("green")
        assert time.monotonic() - begun < 10


def test_an_old_one_that_serves_on_though_its_stop_command_returned_is_reported(site):
    procedure = site.procedure(instances=(site.instance("blue", "true"), site.instance("green")))
    says = "^blue and green both serve now: .* has returned, but blue still serves at unix:"
    with site.server("blue"), site.server("green"), pytest.raises(SwitchError, match=says):
        procedure.switch("green")
    assert not any("blue has ended" in line for line in site.said)


def test_a_stop_command_that_fails_leaves_both_and_says_what_to_do(site):
    instances = (site.instance("blue", "exit 1"), site.instance("green"))
    with site.server("blue"), site.server("green"):
        with pytest.raises(SwitchError, match=r"^blue and green both serve now: .* ended with status 1; ") as caught:
            site.procedure(instances=instances).switch("green")
        assert str(caught.value).endswith("; end blue by hand, or go back: zl switch blue, which stops green")
        says = "^traffic goes to green, blue gets no new one: .* status 1; end blue by hand, or go back"
        with pytest.raises(SwitchError, match=says):
            site.procedure(instances=instances, traffic="command", move=("true",)).switch("green")
        with pytest.raises(SwitchError, match=r"^blue was not restarted, blue and green both serve now: .* status 1$"):
            site.procedure(instances=instances).roll()


def test_readiness_counts_where_there_is_a_url(site):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if (site.folder / "ready").exists() else 503)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        green = replace(site.instance("green", "true"), ready=f"http://127.0.0.1:{web.server_port}/readyz")
        with site.server("blue"), site.server("green"):
            with pytest.raises(SwitchError, match="says 503"):
                site.procedure(instances=(site.instance("blue"), green)).switch("green")
            assert site.run == ["start green", "stop green"]  # it pings, but is not ready: as if it were not there
            (site.folder / "ready").touch()
            site.procedure(instances=(site.instance("blue"), green)).switch("green")
            assert site.run[2:] == ["stop blue"]
        web.shutdown()


def test_traffic_moves_by_a_command_and_back(site):
    move = ("sh", "-c", f"echo move {{name}} >>{site.folder / 'run'}")
    with site.server("blue"), site.server("green"):
        site.procedure(traffic="command", move=move).switch("green")
        assert site.run == ["move green", "stop blue"]
        (site.folder / "blue.ill").unlink()
        threading.Timer(0.5, (site.folder / "blue.ill").touch).start()
        with pytest.raises(SwitchError, match="rolled back, green serves"):
            site.procedure(traffic="command", move=move, steady_s=5.0).switch("blue")
        assert site.run[2:] == ["move blue", "move green"]


def test_a_rolling_restart_needs_two_and_takes_one_at_a_time(site):
    with site.server("blue"):
        with pytest.raises(SwitchError, match="two instances that serve, not blue"):
            site.procedure().roll()
        assert site.run == []
        back = tuple(
            replace(each, start=(*each.start[:2], f"{each.start[2]}; rm {site.folder / each.name}.ill"))
            for each in site.fleet.instances
        )
        with site.server("green"):
            site.procedure(instances=back).roll()
        assert site.run == ["stop blue", "start blue", "stop green", "start green"]


def test_a_rolling_restart_ends_at_the_first_that_does_not_come_back(site):
    with site.server("blue"), site.server("green"):
        with pytest.raises(SwitchError, match="blue did not come back, the others serve"):
            site.procedure().roll()
        assert site.run == ["stop blue", "start blue"]


def write(site: Site) -> str:
    lines = ["[switch]", "steady_s = 0.1"]
    for each in site.fleet.instances:
        ill = str(site.folder / f"{each.name}.ill")
        lines += [f"[instances.{each.name}]", f"address = '{each.address}'"]
        lines += [f"start = {['rm', '-f', ill]}", f"stop = {['touch', ill]}"]
    path = site.folder / "switch.toml"
    path.write_text("\n".join(lines))
    return str(path)


def test_the_command_says_what_serves_switches_and_locks(site, capsys):
    config = write(site)
    assert main(["switch", "--config", config]) == 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(site.server("blue"))
        assert main(["switch", "--config", config]) == 0
        assert "blue\tserves at unix:" in capsys.readouterr().out
        stack.enter_context(site.server("green"))
        with subprocess.Popen(["flock", config, "sh", "-c", "echo locked; read line"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as lock:  # fmt: skip
            assert lock.stdout.readline() == b"locked\n"
            assert main(["switch", "green", "--config", config]) == 1
            assert "another zl switch" in capsys.readouterr().err
            lock.stdin.close()
            lock.wait(10)
        assert main(["switch", "green", "--config", config]) == 0
        assert "green serves; blue stopped" in capsys.readouterr().out
    assert main(["switch", "--roll", "blue", "--config", config]) == 2


def test_an_unknown_instance_is_wrong_use(site):
    with pytest.raises(ConfigError, match="no instance 'red'"):
        site.procedure().switch("red")


def test_what_can_be_taken_back_is_when_a_step_of_it_fails(site):
    move = ("sh", "-c", "exit 4")
    with site.server("blue"):
        broken = replace(site.instance("green"), stop=("sh", "-c", f"echo stop green >>{site.folder / 'run'}; exit 5"))
        with site.server("green"), pytest.raises(SwitchError, match=r"rolled back, blue serves: .* status 4"):
            site.procedure(instances=(site.instance("blue"), broken), traffic="command", move=move).switch("green")
        assert "a step failed" in site.said[-1]


def switch(site: Site, *arguments: str, until: Callable[[str], bool], number: signal.Signals = signal.SIGINT):
    """Run the command as a process; send it a signal when `until` says so of what it has printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "zl", "switch", "--config", str(site.folder / "switch.toml"), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    out = ""
    while not until(out):
        assert time.monotonic() < deadline
        if select.select([process.stdout], [], [], 0.02)[0]:
            out += os.read(process.stdout.fileno(), 4096).decode()
    process.send_signal(number)
    rest, err = process.communicate(timeout=30)
    return process.returncode, out + rest, err


def write_slow(site: Site, stop: str = "") -> None:
    lines = ["[switch]", "steady_s = 3", "start_s = 2"]
    for each in (site.instance("blue", stop), site.instance("green", stop)):
        lines += [f"[instances.{each.name}]", f"address = '{each.address}'"]
        lines += [f"start = {json.dumps(each.start)}", f"stop = {json.dumps(each.stop)}"]
    (site.folder / "switch.toml").write_text("\n".join(lines))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_move_rolls_back(site, number):
    write_slow(site)
    with site.server("blue"), site.server("green"):
        status, out, err = switch(site, "green", until=lambda out: "accepts connections too" in out, number=number)
    assert (status, err) == (128 + number, f"zl: rolled back, blue serves: interrupted by {number.name}\n")
    assert "rolling back: blue stays" in out
    assert site.run == []


def test_a_second_signal_does_not_end_the_rollback(site):
    write_slow(site, stop="sleep 1")
    with site.server("blue"), subprocess.Popen(
        [sys.executable, "-m", "zl", "switch", "--config", str(site.folder / "switch.toml"), "green"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        while "start green" not in site.run:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        while "stop green" not in site.run:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the stop command dies of it
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "zl: rolled back, blue serves: interrupted by SIGINT\n")
    assert "a step failed" not in out
    assert site.run == ["start green", "stop green", "stop green"]


def test_a_signal_while_the_old_one_drains_says_what_serves_and_what_is_left(site):
    write_slow(site, stop="exec sleep 3 >/dev/null 2>&1")
    (site.folder / "switch.toml").write_text((site.folder / "switch.toml").read_text().replace("= 3", "= 0.1"))
    with site.server("blue"), site.server("green"):
        status, _, err = switch(site, "green", until=lambda _: "stop blue" in site.run)
    assert status == 130
    assert err == ("zl: interrupted by SIGINT: green serves, blue still answers; "
                   "zl switch green once more does what is left\n")  # fmt: skip


def test_a_signal_during_a_rolling_restart_says_what_serves_and_what_is_left(site):
    write_slow(site, stop=f"touch {site.folder}/blue.ill; exec sleep 3 >/dev/null 2>&1")
    with site.server("blue"), site.server("green"):
        status, _, err = switch(site, "--roll", until=lambda _: (site.folder / "blue.ill").exists())
        time.sleep(0.1)
    assert status == 130
    assert err.startswith("zl: interrupted by SIGINT while blue was being restarted: green serves; left to do: start "
                          "blue when it has ended, with sh -c echo start blue")  # fmt: skip
    assert err.endswith("; restart green\n")


def test_a_reader_who_leaves_does_not_keep_a_switch_from_rolling_back(site):
    write_slow(site)
    with site.server("blue"), subprocess.Popen(
        [sys.executable, "-m", "zl", "switch", "--config", str(site.folder / "switch.toml"), "green"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read().splitlines()
        assert process.wait(30) == 1
    assert site.run == ["start green", "stop green"]
    assert err[0] == "zl: standard output cannot be written: Broken pipe: the rest is told here"
    assert err[1].endswith("rolling back: blue stays")
    assert err[2].startswith("zl: rolled back, blue serves: not ready within 2 s")


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", ">&- 2>&-"])
def test_a_switch_needs_no_standard_output(site, redirect):
    write(site)
    command = f"exec {sys.executable} -m zl switch --config {site.folder / 'switch.toml'} green {redirect}"
    with site.server("blue"), site.server("green"):
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert (site.folder / "blue.ill").exists()
    assert "Traceback" not in done.stderr
