"""zl/sampling/profiles.py: settings resolve, columns are written, limits hold."""

import dataclasses
import math

import numpy as np
import pytest

from zl.errors import Code, RequestError
from zl.gpu.pinned import RowColumns
from zl.sampling import profiles
from zl.shapes import Shapes


@pytest.mark.parametrize(
    ("number", "name", "values"),
    [(0, "CHAT", (0.7, 0.95, 1.1)), (1, "SUMMARIZE", (0.3, 0.5, 1.0)), (2, "CREATIVE", (0.9, 0.99, 1.2))],
)
def test_absent_fields_take_the_profiles_values(number, name, values):
    s = profiles.resolve(number)
    assert (s.profile.name, s.temperature, s.top_p, s.penalty, s.generic) == (name, *values, False)


def test_own_values_make_a_request_generic_only_where_they_differ():
    assert profiles.resolve(0, 0.0, None, None).generic
    assert profiles.resolve(0, None, 1.0, None).generic
    assert profiles.resolve(0, None, None, 1.0).generic
    same = profiles.resolve(0, 700_000 / 1e6, 950_000 / 1e6, 1_100_000 / 1e6)
    assert not same.generic
    own = profiles.resolve(2, 0.25, None, None)
    assert (own.temperature, own.top_p, own.penalty) == (0.25, 0.99, 1.2)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((3,), "type"), ((-1,), "type"), ((0, -0.1), "temperature"), ((0, math.nan), "temperature"),
        ((0, math.inf), "temperature"), ((0, None, 1.000001), "top_p"), ((0, None, -1e-6), "top_p"),
        ((0, None, None, 0.0), "repetition_penalty"), ((0, None, None, math.nan), "repetition_penalty"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_field(arguments, field):
    with pytest.raises(RequestError) as caught:
        profiles.resolve(*arguments)
    assert caught.value.code == Code.BAD_REQUEST
    assert caught.value.field == field
    assert field in caught.value.message


def test_write_fills_one_row_and_no_other():
    columns = RowColumns(Shapes(max_rows=3, max_model_len=64))
    s = profiles.resolve(2, None, 0.5)
    profiles.write(columns, 1, s, seed=2**64 - 3, ignore_eos=True, logprobs=True)
    assert columns.temperature.tolist() == [0, np.float32(0.9), 0]
    assert columns.top_p.tolist() == [0, 0.5, 0]
    assert columns.penalty.tolist() == [0, np.float32(1.2), 0]
    assert columns.seed.tolist() == [0, 2**64 - 3, 0]
    assert columns.row_flags.tolist() == [0, 3, 0]
    profiles.write(columns, 1, s, seed=-1)
    assert (columns.row_flags[1], columns.seed[1]) == (0, 2**64 - 1)


def test_hash_follows_every_number():
    assert profiles.profile_hash() == profiles.HASH
    assert len(profiles.HASH) == 64
    for field, value in (("temperature", 0.71), ("top_p", 0.9), ("penalty", 1.0), ("name", "TALK")):
        changed = dict(profiles.PROFILES) | {0: dataclasses.replace(profiles.CHAT, **{field: value})}
        assert profiles.profile_hash(changed) != profiles.HASH


def test_profiles_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        profiles.CHAT.top_p = 1.0
    with pytest.raises(TypeError):
        profiles.PROFILES[3] = profiles.CHAT
