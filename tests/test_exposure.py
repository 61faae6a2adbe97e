"""zl/exposure.py: which addresses others reach, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zl.config import Settings
from zl.exposure import is_loopback, warning


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("fe80::1%lo", False), ("::ffff:10.0.0.1", False)],
)  # fmt: skip
def test_loopback_is_this_machine_alone(host, own):
    assert is_loopback(host) is own


def test_only_open_doors_without_a_token_are_warned_of():
    local, every, lan = ("tcp:localhost:1", "127.0.0.1"), ("tcp:0.0.0.0:2", "0.0.0.0"), ("tcp:box:3", "10.0.0.1")
    settings = Settings()
    assert warning([local], settings) == ""
    assert warning([local, every, lan], settings) == (
        "anybody who reaches tcp:0.0.0.0:2 or tcp:box:3 may use this server: set auth_token_file and tls_cert, or "
        "listen on 127.0.0.1"
    )
    assert "set auth_token_file, or" in warning([every], replace(settings, tls_cert="c", tls_key="k"))
    assert warning([every], replace(settings, auth_token="secret")) == ""
