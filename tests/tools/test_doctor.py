"""zl/tools/doctor_*.py: what is found, and that each line says what to do."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.tiny_model import write_tiny
from zl.address import TcpAddress, UnixAddress
from zl.cli import doctor
from zl.compiled import NO_COMPILER
from zl.config import Settings
from zl.gpu.native.build import no_compiler
from zl.tools import doctor_gpu, doctor_machine, doctor_ports, doctor_units
from zl.tools.findings import FAIL, OK, WARN


def write(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_gpu_without_its_packages_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda _: "")
    found = doctor._gpu(doctor_gpu.Gpu(1, "", "13.0", "a GPU"), replace(Settings(), device="cuda"))
    assert found.level == FAIL
    assert found.text.endswith("not usable: missing cuda-python, triton; in a clone of zl, pip install '.[cuda]'")


def test_int8_keys_and_values_are_said_or_refused():
    none, some = doctor_gpu.Gpu(0, "no driver"), ["amx", "avx2"]
    eight = replace(Settings(), kv="int8", device="cpu")
    fine = doctor._choice(eight, some, none, "g++")
    assert fine.level == OK
    assert "amx" in fine.text
    assert "int8 keys and values" in fine.text
    for settings, compiler in (
        (replace(eight, cpu_level="torch"), "g++"), (eight, None), (replace(eight, device="cuda"), "g++")
    ):  # fmt: skip
        found = doctor._choice(settings, some, none, compiler)
        assert found.level == FAIL
        assert "leave kv out" in found.text
    assert doctor._choice(replace(eight, kv="auto"), some, none, None).level == WARN
    asked = doctor._choice(replace(Settings(), device="cpu", cpu_level="avx2"), some, none, None)
    assert (asked.level, asked.text) == (FAIL, f"cpu_level is avx2, but {no_compiler()}")
    assert doctor._compiler(None).text.startswith(NO_COMPILER)


# --- machine ----------------------------------------------------------------------------------------------------------


def test_every_line_about_the_machine_stands_once_and_a_warning_has_a_remedy():
    findings = list(doctor_machine.examine(Settings()))
    topics = [found.topic for found in findings]
    assert topics == ["cores", "memory", "huge pages", "memlock", "open files", "numa", "governor", "cache"]
    for found in findings:
        assert "\n" not in found.text
        if found.level == WARN:
            assert any(sign in found.text for sign in (";", ":")), found


def test_limits_that_are_low_say_where_to_raise_them(monkeypatch):
    limits = {resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20), resource.RLIMIT_NOFILE: (1024, 524_288)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    locked = doctor_machine.memlock(Settings())
    assert locked.level == WARN
    assert "limit 8 MiB, the arena has 64 MiB" in locked.text
    assert "LimitMEMLOCK=infinity" in locked.text
    assert doctor_machine.memlock(Settings(berths=16)).level == OK
    files = doctor_machine.open_files()
    assert (files.level, files.text) == (OK, "limit 1024, which zl serve raises to 524288")
    limits[resource.RLIMIT_NOFILE] = (256, 1024)
    files = doctor_machine.open_files()
    assert files.level == WARN
    assert "limit 256, which zl serve raises to 1024: about 960 connections" in files.text
    assert "ulimit -Hn 65536" in files.text
    limits[resource.RLIMIT_NOFILE] = (65_536, 65_536)
    limits[resource.RLIMIT_MEMLOCK] = (resource.RLIM_INFINITY,) * 2
    assert doctor_machine.open_files().level == doctor_machine.memlock(Settings()).level == OK


def test_several_memory_nodes_ask_for_binding(tmp_path):
    write(tmp_path / "node0" / "cpulist", "0-1,4\n")
    assert doctor_machine.numa(str(tmp_path), {0, 4}).text == "one memory node"
    write(tmp_path / "node1" / "cpulist", "2-3\n")
    assert doctor_machine.numa(str(tmp_path), {0, 4}).level == OK
    spread = doctor_machine.numa(str(tmp_path), {1, 2})
    assert spread.level == WARN
    assert "node0, node1" in spread.text
    assert "NUMAPolicy=bind" in spread.text


def test_the_governor_of_the_usable_cores_counts(tmp_path):
    for cpu, name in enumerate(["performance", "performance", "powersave"]):
        write(tmp_path / f"cpu{cpu}" / "cpufreq" / "scaling_governor", name)
    assert doctor_machine.governor(str(tmp_path), {0, 1}).level == OK
    slow = doctor_machine.governor(str(tmp_path), {1, 2})
    assert slow.level == WARN
    assert "cpupower frequency-set -g performance" in slow.text
    assert "virtual machines" in doctor_machine.governor(str(tmp_path / "none"), {0}).text


def test_memory_and_huge_pages(tmp_path):
    write(tmp_path / "meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    write(tmp_path / "max", "1073741824")
    assert doctor_machine.memory(str(tmp_path / "meminfo"), str(tmp_path / "none")).level == OK
    low = doctor_machine.memory(str(tmp_path / "meminfo"), str(tmp_path / "max"))
    assert low.level == WARN
    assert "may use 1.0 GiB" in low.text
    write(tmp_path / "thp", "always madvise [never]")
    assert "echo madvise" in doctor_machine.huge_pages(str(tmp_path / "thp")).text
    assert doctor_machine.huge_pages(str(tmp_path / "transparent_hugepage" / "enabled")).level == WARN
    unseen = doctor_machine.huge_pages(str(tmp_path / "mm" / "transparent_hugepage" / "enabled"))
    assert unseen.level == OK
    assert "not visible here" in unseen.text


def test_a_cache_that_cannot_be_written_stops_only_who_has_nothing_compiled(tmp_path):
    fine = doctor_machine.cache(Settings(), tmp_path / "new" / "zl")
    assert fine.level == (OK if shutil.disk_usage(tmp_path).free >= doctor_machine.LITTLE_ROOM else WARN)
    assert fine.text.startswith(f"{tmp_path}/new/zl")
    assert not (tmp_path / "new").exists()
    root = tmp_path / "zl"
    write(root / "builds", "a file in the way, for root may write anywhere")
    found = doctor_machine.cache(Settings(), root)
    assert found.level == FAIL
    assert found.text == f"{root}/builds cannot be written: set XDG_CACHE_HOME to a folder that can"
    assert doctor_machine.cache(Settings(cpu_level="torch"), root).level == WARN
    write(root / "native" / "abc" / "zl_native_avx2.so", "")
    assert doctor_machine.cache(Settings(), root).level == WARN


def test_a_disk_that_is_nearly_full_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    found = doctor_machine.cache(Settings(), tmp_path)
    assert (found.level, "100 MiB free" in found.text) == (WARN, True)


# --- model ------------------------------------------------------------------------------------------------------------


def test_a_model_is_opened_as_a_server_would(tmp_path):
    def look(path):
        return doctor._model(replace(Settings(), model=str(path)))

    fine = look(write_tiny(tmp_path / "tiny"))
    assert fine.level == OK
    assert fine.text.startswith(f"{tmp_path}/tiny, ")
    assert fine.text.endswith(" MB: tiny, at most 512 tokens")
    write(tmp_path / "notes.gguf", "shopping list")
    found = look(tmp_path / "notes.gguf")
    assert (found.level, "not a GGUF file" in found.text) == (FAIL, True)
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    found = look(tmp_path / "tiny")
    assert (found.level, found.text) == (
        FAIL, f"{tmp_path}/tiny/tokenizer.json is missing; save one with transformers' save_pretrained"
    )  # fmt: skip
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "mamba"}')
    assert "'mamba' is not supported" in look(tmp_path / "tiny").text


# --- addresses --------------------------------------------------------------------------------------------------------


def test_a_taken_port_names_who_has_it():
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        port = int(other.stdout.readline())
        found = doctor_ports.address(TcpAddress("127.0.0.1", port))
        assert found.level == FAIL
        assert f"(process {other.pid})" in found.text
        assert "stop it, or choose another port" in found.text
        other.stdin.write(b"\n")
    assert doctor_ports.address(TcpAddress("127.0.0.1", port)).level == OK


def test_a_port_that_zl_itself_serves_is_no_failure(tmp_path, monkeypatch):
    write(tmp_path / "7" / "cmdline", "/opt/zl/bin/python\0/opt/zl/bin/zl\0serve\0--config\0/etc/zl/zl.toml\0")
    write(tmp_path / "8" / "cmdline", "python3\0-m\0zl\0serve\0")
    write(tmp_path / "9" / "cmdline", "vim\0zl\0server.py\0")
    assert [doctor_ports.serves(pid, str(tmp_path)) for pid in (7, 8, 9, 10)] == [True, True, False, False]
    monkeypatch.setattr(doctor_ports, "holders", lambda inodes: [(7, "zl")])
    monkeypatch.setattr(doctor_ports, "serves", lambda pid: pid == 7)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = doctor_ports.address(TcpAddress("127.0.0.1", port))
    assert (found.level, found.text) == (
        WARN, f"tcp:127.0.0.1:{port}: a zl is serving there (process 7); for a second one choose another port"
    )  # fmt: skip


def test_an_open_door_is_warned_of():
    open_door = Settings(listen=("tcp:127.0.0.1:0", "tcp:0.0.0.0:0"), metrics="off")
    found = [each for each in doctor_ports.examine(open_door) if each.topic == "access"]
    assert [(each.level, "anybody who reaches tcp:0.0.0.0:0 may use" in each.text) for each in found] == [(WARN, True)]
    locked = replace(open_door, auth_token="secret")
    assert all(each.topic == "listen" for each in doctor_ports.examine(locked))


def test_a_taken_unix_socket_names_who_has_it_and_a_stale_one_does_not(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        found = doctor_ports.address(UnixAddress(path))
        assert found.level == FAIL
        assert f"(process {os.getpid()})" in found.text
    stale = doctor_ports.address(UnixAddress(path))
    assert (stale.level, "left over" in stale.text) == (OK, True)
    os.unlink(path)
    assert doctor_ports.address(UnixAddress(path)).text.endswith("is free")


def test_an_address_that_systemd_holds_is_as_it_should_be(tmp_path, monkeypatch):
    write(tmp_path / "1" / "comm", "systemd\n")
    (tmp_path / "1" / "fd").mkdir()
    (tmp_path / "1" / "fd" / "7").symlink_to("socket:[4242]")
    (tmp_path / "self").mkdir()
    assert doctor_ports.holders({"4242"}, str(tmp_path)) == [(1, "systemd")]
    assert doctor_ports.holders({"42"}, str(tmp_path)) == []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(doctor_ports, "holders", lambda inodes: [(1, "systemd")])
        found = doctor_ports.address(TcpAddress("127.0.0.1", taken.getsockname()[1]))
    assert (found.level, "held by systemd" in found.text) == (OK, True)


# --- units ------------------------------------------------------------------------------------------------------------


def test_units_installed_missing_or_pointing_nowhere(tmp_path):
    none = str(tmp_path / "none")
    (found,) = doctor_units.examine([none], none)
    assert (found.level, "not installed" in found.text) == (OK, True)
    folder = tmp_path / "units"
    write(folder / "zl.service", f"[Service]\nExecStart={sys.executable} serve\n")
    (found,) = doctor_units.examine([none, str(folder)], none)
    assert found.level == WARN
    assert "missing zl.socket, zl@.service, zl@.socket" in found.text
    for unit in doctor_units.UNITS[1:]:
        write(folder / unit, "[Socket]\n")
    (found,) = doctor_units.examine([none, str(folder)], none)
    assert found.level == OK
    write(folder / "zl@.service", "[Service]\nExecStart=/opt/nowhere/zl serve\n")
    _, found = doctor_units.examine([none, str(folder)], none)
    assert (found.level, "/opt/nowhere/zl, which is not there" in found.text) == (WARN, True)


# --- GPU --------------------------------------------------------------------------------------------------------------

DRIVER = r"""
#include <stddef.h>
#include <string.h>
static int registered, retained;
int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int *v) { *v = 13010; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *name, int n, int d) { (void)d; strncpy(name, "Test GPU", n); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { (void)d; *n = 80ull << 30; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = &retained; retained++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; retained--; return 0; }
int cuCtxSetCurrent(void *c) { return c != &retained; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
  if (REFUSED) return 801;
  if ((size_t)p % 4096 || flags != 3) return 1;
  memset(p, 1, n);
  registered++;
  return 0;
}
int cuMemHostUnregister(void *p) { (void)p; registered--; return 0; }
int left(void) { return registered + retained; }
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory) -> dict[bool, str]:
    """Drivers that answer as the CUDA driver API documents it: one that registers memory, and one that refuses."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("driver")
    made = {}
    for refused in (False, True):
        made[refused] = str(folder / f"libcuda{refused:d}.so")
        subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", f"-DREFUSED={refused:d}", "-o", made[refused], "-"],
                       input=DRIVER, text=True, check=True)  # fmt: skip
    return made


def test_host_memory_is_registered_for_the_gpu_and_let_go(drivers):
    import ctypes

    gpu = doctor_gpu.find_gpu(drivers[False])
    assert (gpu.count, gpu.name, gpu.driver, gpu.memory_bytes) == (2, "Test GPU", "CUDA 13.1", 80 << 30)
    found = doctor_gpu.host_registration(gpu, drivers[False])
    assert (found.level, found.text) == (OK, "16 MiB page-locked and mapped for the GPU, and let go again")
    assert ctypes.CDLL(drivers[False]).left() == 0


def test_a_refused_registration_names_the_limit(drivers):
    found = doctor_gpu.host_registration(doctor_gpu.find_gpu(drivers[True]), drivers[True])
    assert found.level == WARN
    assert "driver status 801" in found.text
    assert "LimitMEMLOCK=infinity" in found.text


def test_without_a_driver_nothing_is_needed(tmp_path):
    gpu = doctor_gpu.find_gpu(str(tmp_path / "none.so"))
    assert not gpu.count
    assert doctor_gpu.host_registration(gpu).level == OK
    write(tmp_path / "version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\nGCC version:\n")
    assert doctor_gpu.driver(str(tmp_path / "version")).text == "NVIDIA UNIX x86_64 Kernel Module 570.86.15"
    assert doctor_gpu.driver(str(tmp_path / "none")).level == OK
