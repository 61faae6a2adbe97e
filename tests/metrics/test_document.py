"""docs/metrics.md says what the catalog says."""

from __future__ import annotations

from pathlib import Path

import pytest

from zl.measures import PARTS
from zl.metrics.catalog import FAMILIES
from zl.metrics.document import table, written

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")


def test_the_page_is_what_the_catalog_writes():
    assert written(PAGE) == PAGE, "run python -m zl.metrics.document docs/metrics.md"


def test_every_family_has_its_line():
    lines = table().splitlines()
    assert len(lines) == len(FAMILIES) + 2
    assert all(line.count(" | ") == 2 for line in lines[2:])


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_explained(part):
    assert f"\n| `{part}` | " in PAGE


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="no"):
        written("# What zl measures\n")
