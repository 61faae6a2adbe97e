"""What a reload takes, what it leaves for a restart, and that a wrong configuration changes nothing."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from zl.config import SETTINGS, Settings
from zl.errors import ConfigError
from zl.ops.reload import LIVE, Reloader, needs_restart


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        return [f"{r.levelname} {r.getMessage()} {getattr(r, 'fields', {})}" for r in caplog.records]

    return lines


def reloader(old: Settings, new: Settings | Exception):
    applied: list[Settings] = []

    def read() -> Settings:
        if isinstance(new, Exception):
            raise new
        return new

    return Reloader(old, read, applied.append), applied


def test_live_settings_are_applied_and_others_wait(said):
    old = Settings()
    new = replace(old, max_queue=3, log_level="debug", max_rows=4, model="other", auth_token="hush")
    made, applied = reloader(old, new)
    assert made.reload()
    assert applied == [replace(old, max_queue=3, log_level="debug", auth_token="hush")]
    assert made.settings == applied[0]
    lines = said()
    assert lines[0] == "INFO reloaded {'changed': 'auth_token,log_level,max_queue'}"
    assert lines[1:] == [
        "WARNING model has changed and needs a restart "
        "{'setting': 'model', 'running': 'smollm2-135m-instruct', 'configured': 'other'}",
        "WARNING max_rows has changed and needs a restart {'setting': 'max_rows', 'running': 256, 'configured': 4}",
    ]
    assert "hush" not in str(lines)
    assert made.reload()  # the next one says again what still waits
    assert len(said()) == 6


def test_a_configuration_that_cannot_be_read_or_used_changes_nothing(said):
    old = Settings()
    made, applied = reloader(old, ConfigError("zl.toml:3: max_queue = -1: must be more"))
    assert not made.reload()
    assert not applied

    def refuse(settings: Settings) -> None:
        raise ConfigError("TLS: no such file")

    made = Reloader(old, lambda: replace(old, max_queue=3), refuse)
    assert not made.reload()
    assert made.settings == old
    assert [line for line in said() if "old configuration stays" in line] == [
        "ERROR reload refused, the old configuration stays: zl.toml:3: max_queue = -1: must be more {}",
        "ERROR reload refused, the old configuration stays: TLS: no such file {}",
    ]


def test_a_fault_of_ours_ends_a_reload_and_nothing_else(said):
    def fail(settings: Settings) -> None:
        raise OSError(28, "No space left on device")

    old = Settings()
    made = Reloader(old, lambda: replace(old, max_queue=3), fail)
    assert not made.reload()
    assert made.settings == old
    assert said() == ["ERROR reload failed, the old configuration stays {}"]


def test_tls_can_change_its_files_but_not_begin_or_end(said):
    plain, one = Settings(), Settings(tls_cert="a", tls_key="b")
    made, applied = reloader(plain, one)
    assert made.reload()
    assert applied == [plain]
    assert "tls_cert has changed and needs a restart" in said()[-1]
    made, applied = reloader(one, replace(one, tls_cert="c", tls_key="d"))
    assert made.reload()
    assert applied == [Settings(tls_cert="c", tls_key="d")]


def test_long_texts_and_secrets_stay_out_of_the_log(said):
    old = Settings()
    made, _ = reloader(old, replace(old, system_prompts=("secret " * 60,)))
    made.reload()
    assert "secret" not in str(said())
    assert "system_prompts" in said()[-1]


def test_files_that_are_opened_anew_are_named_though_nothing_has_changed(said):
    old = Settings(log_file="/var/log/zl.log", audit_log="/var/log/zl.audit")
    made, _ = reloader(old, replace(old, access_log="/var/log/zl.access"))
    assert made.reload()
    assert said()[0] == "INFO reloaded {'changed': 'nothing', 'reopened': 'log_file,audit_log'}"  # access_log waits


def test_every_live_setting_is_a_setting():
    names = {each.name for each in SETTINGS}
    assert names >= LIVE
    assert needs_restart(Settings(), Settings()) == []
