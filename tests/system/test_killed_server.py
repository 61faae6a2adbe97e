"""One of three servers behind HAProxy is killed under load: who loses what, and how it is said."""

from __future__ import annotations

import shutil

import pytest

from bench import rolling
from zl.client import StreamBroken

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed"),
]


def test_only_streams_that_had_begun_on_the_killed_server_end(tmp_path, tiny_artifacts):
    for place in "abc":  # the killed server's streams may all have been on their last bytes
        (tmp_path / place).mkdir()
        report = rolling.run("kill", tmp_path / place, tiny_artifacts, 18, 1, 500)
        verdict, said = report.verdict, "\n".join(report.lines())
        assert report.passed, said
        assert not verdict.failed, said  # what had no token was answered by the others
        assert not verdict.wrong, said  # and no answer was put together from two servers
        if verdict.broken:
            break
    assert verdict.broken, said
    for each in verdict.broken:
        assert isinstance(each.error, StreamBroken)
        assert each.error.tokens_received == len(each.tokens) > 0
        assert f"after {len(each.tokens)} tokens" in str(each.error)
    assert min(verdict.by.values()) > 0, said
