"""zl/errors.py: what can never be written ends with 2, so that no supervisor tries again; what may pass, with 1."""

from __future__ import annotations

import errno
import os

import pytest

from zl.errors import ConfigError, DeviceError, TransferError, unwritable


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST])
def test_a_right_that_is_lacking_is_a_wrong_setting(number):
    found = unwritable("cannot write below /x", error(number))
    assert isinstance(found, ConfigError)
    assert found.exit_status == 2
    remedy = "set XDG_CACHE_HOME to a folder that this user can write"
    assert str(found) == f"cannot write below /x: {os.strerror(number)}; {remedy}"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_may_have_room_again(number):
    found = unwritable("cannot write below /x", error(number), "name with --out")
    assert isinstance(found, TransferError)
    assert found.exit_status == 1
    assert str(found).endswith("; free some room there, or name with --out a folder that has it")


def test_what_is_neither_may_pass_and_its_owner_says_as_what():
    found = unwritable("cannot write below /x", error(errno.EIO), passing=DeviceError)
    assert isinstance(found, DeviceError)
    assert found.exit_status == 1
    assert "room" not in str(found)
