"""A server whose standard streams are closed or full: it serves, and its clean stop is one."""

from __future__ import annotations

import sys

import pytest

from zl.client import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.mark.parametrize("redirect", ["2>&-", ">&-", ">/dev/full", "<&- >&- 2>&-"])
def test_a_server_needs_no_standard_streams(service, small, tmp_path, redirect):
    address, log = f"unix:{tmp_path / 's'}", tmp_path / "zl.log"
    command = f'exec {sys.executable} -m zl serve "$@" {redirect}'
    running = service(tmp_path / "run", instead=["bash", "-c", command, "zl", *small, "--listen", address,
                                                "--log-file", str(log)]).ready()  # fmt: skip
    for _ in range(3):
        with Client(address, timeout=20) as client:
            assert client.ask("Hi", max_tokens=2, ignore_eos=True).finish_reason.name == "LENGTH"
    assert running.close() == 0
    assert "Traceback" not in running.text()
    assert "ready" in log.read_text()
