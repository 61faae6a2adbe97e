"""Several zl servers on this machine, alone, behind one listening socket or behind a real HAProxy, for bench.rolling.

Models are tiny and random, each with weights of its own: an answer shows which server gave it, and whether it is whole.
State: the processes that it started. Needs `haproxy` for HAProxy, and torch to make the models.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.procs import free_port
from zl.client import Client
from zl.client.messages import Timeouts

ROOT = Path(__file__).parent.parent
HAPROXY_CFG = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
PATIENCE_S = 120.0
MODEL_LEN = 2_048

# Smaller embeddings than write_tiny's: with its own, a model repeats the token that it has just seen.
_MODEL = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from tests.tiny_model import write_tiny
folder = write_tiny(Path(sys.argv[1]), seed=int(sys.argv[2]))
config = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": int(sys.argv[3])}))
tensors = load_file(folder / "model.safetensors")
tensors["model.embed_tokens.weight"] *= 0.3
save_file(tensors, folder / "model.safetensors")
"""


def make_artifacts(folder: Path, n: int) -> list[Path]:
    """Make `n` tiny models that answer differently, and an artifact of each: servers then start in two seconds."""
    made = []
    for i in range(n):
        # In processes of their own: torch would stay in ours, and its threads with it.
        model, out = folder / f"model{i}", folder / f"tiny{i}"
        _python("-c", _MODEL, str(model), str(i), str(MODEL_LEN))
        _python("-m", "zl", "build", str(model), "--out", str(out))
        made.append(out)
    return made


def _python(*arguments: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=280)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:4])} failed:\n{done.stderr[-2_000:]}")



def until(condition: object, what: str, seconds: float = PATIENCE_S) -> None:
    """Wait until a function returns something true. RuntimeError: it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


class Instance:
    """One server that is started and stopped by shell commands, as `zl switch` runs them.

    own       its own address
    hold      control socket of the holder of shared sockets, or ""
    """

    def __init__(self, name: str, folder: Path, model: Path, own: str, hold: str = "", flags: Sequence[str] = ()):
        self.name, self.own = name, own
        self.log, self._pid_file = folder / f"{name}.log", folder / f"{name}.pid"
        serve = [sys.executable, "-m", "zl", "serve", "--model", str(model), "--metrics", "off", *flags]
        if hold:
            command = [sys.executable, "-m", "zl", "hold", "--control", hold, "--own", own, "--", *serve]
        else:
            command = [*serve, "--listen", own]
        env = f"PYTHONPATH={shlex.quote(str(ROOT))} OMP_NUM_THREADS=1"
        self.start_command = (
            "sh", "-c", f"{env} setsid {shlex.join(command)} >>{shlex.quote(str(self.log))} 2>&1 </dev/null & "
            f"echo $! >{shlex.quote(str(self._pid_file))}",
        )  # fmt: skip
        # A process that nobody waits for stays as a zombie in containers without an init: that is an end too.
        pid = f"$(cat {shlex.quote(str(self._pid_file))})"
        self.stop_command = (
            "sh", "-c", f"kill {pid} || exit 0; "
            f"while [ -d /proc/{pid} ] && ! grep -q '^State:.Z' /proc/{pid}/status; do sleep 0.05; done",
        )  # fmt: skip

    def start(self) -> None:
        """Start it and wait until it answers a ping."""
        subprocess.run(self.start_command, check=True)
        until(self.answers, f"{self.name} answers")

    def answers(self) -> bool:
        """Say whether it answers a ping."""
        try:
            with Client(self.own, timeout=2) as client:
                client.ping()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it with SIGKILL."""
        os.kill(self._pid(), signal.SIGKILL)

    def stop(self) -> None:
        """End it if it runs."""
        if self._pid_file.exists():
            subprocess.run(self.stop_command, check=True, stderr=subprocess.DEVNULL, timeout=PATIENCE_S)

    def _pid(self) -> int:
        return int(self._pid_file.read_text())

    def reference(self, requests: Sequence[dict[str, object]]) -> list[tuple[int, ...]]:
        """Answer the requests, alone: what it must say to them at any time."""
        with Client(self.own, timeout=Timeouts(5, 60, 60)) as client:
            return [client.ask(**request).token_ids for request in requests]  # type: ignore[arg-type]


class Holder:
    """`zl hold`: the shared socket."""

    def __init__(self, folder: Path):
        self.control = f"unix:{folder / 'hold.sock'}"
        command = [sys.executable, "-m", "zl", "hold", "--listen", "tcp:127.0.0.1:0", "--control", self.control]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.address = line.split()[2]

    def stop(self) -> None:
        """Give the sockets up."""
        self._process.terminate()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class HAProxy:
    """The real program, with the shipped configuration; only addresses, user and log differ."""

    def __init__(self, folder: Path, servers: dict[str, str]):
        if shutil.which("haproxy") is None:
            raise RuntimeError("haproxy is not installed: apt-get install haproxy")
        # HAProxy adds to a socket's path while it starts, and 97 bytes are all it takes: `folder` may be too long.
        self._short = tempfile.TemporaryDirectory(prefix="zl-")
        self.port, self.runtime = free_port(), f"unix:{self._short.name}/haproxy.sock"
        self.address = f"tcp:127.0.0.1:{self.port}"
        config = folder / "haproxy.cfg"
        config.write_text("\n".join(self._lines(servers)) + "\n")
        self.log = folder / "haproxy.log"
        with self.log.open("w") as out:
            self._process = subprocess.Popen(["haproxy", "-db", "-f", str(config)], stdout=out, stderr=out)

        def up() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"haproxy ended: {self.log.read_text()}")
            # It opens one after the other, and the runtime socket gets its name last: this asks for both.
            with socket.socket() as sock, socket.socket(socket.AF_UNIX) as runtime:
                path = self.runtime.removeprefix("unix:")
                return not sock.connect_ex(("127.0.0.1", self.port)) and not runtime.connect_ex(path)

        until(up, "haproxy accepts", 20)

    def _lines(self, servers: dict[str, str]) -> Iterator[str]:
        path = self.runtime.removeprefix("unix:")
        changed = {"stats socket": 0, "bind": 0, "server": 0}
        for line in HAPROXY_CFG.read_text().splitlines():
            words = line.split()
            if words[:1] in (["user"], ["group"]) or words[:2] == ["log", "/dev/log"]:
                continue
            if words[:2] == ["stats", "socket"]:
                line = line.replace(words[2], path)
                changed["stats socket"] += 1
            elif words[:1] == ["bind"]:
                line = line.replace(words[1], f"127.0.0.1:{self.port}")
                changed["bind"] += 1
            elif words[:1] == ["server"]:
                changed["server"] += 1
                continue
            yield line
        assert changed == {"stats socket": 1, "bind": 1, "server": 2}, changed  # it is the file we think it is
        for name, address in servers.items():
            yield f"    server {name} {address.removeprefix('tcp:')}"

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(20)
        self._short.cleanup()


def write_switch_file(path: Path, instances: Sequence[Instance], runtime: str = "", **switch: object) -> Path:
    """Write the file that `zl switch` reads."""
    values = {"traffic": "haproxy" if runtime else "shared", "steady_s": 0.5, **switch}
    lines = ["[switch]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    if runtime:
        lines += ["[haproxy]", f"sockets = [{json.dumps(runtime)}]"]
    for each in instances:
        lines += [f"[instances.{each.name}]", f"address = {json.dumps(each.own)}"]
        lines += [f"start = {json.dumps(each.start_command)}", f"stop = {json.dumps(each.stop_command)}"]
    path.write_text("\n".join(lines) + "\n")
    return path
