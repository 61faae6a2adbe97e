"""The reference table of docs/metrics.md, written from the catalog: `python -m zl.metrics.document docs/metrics.md`.

State: none. Imports the catalog only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zl.metrics.catalog import FAMILIES, Family

BEGIN, END = "<!-- from here on written by zl.metrics.document -->", "<!-- up to here -->"


def table() -> str:
    """Render every family: name and labels, kind, what it says."""
    lines = ["| family | kind | what it says |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{_shown(f)}` | {f.kind} | {_text(f)} |" for f in FAMILIES])


def written(page: str) -> str:
    """Give a page with the table between its two marks; ValueError: it has no marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} followed by {END!r}")
    return f"{head}{begin}\n{table()}\n{end}{tail}"


def _shown(family: Family) -> str:
    return family.name + (f"{{{', '.join(family.labels)}}}" if family.labels else "")


def _text(family: Family) -> str:
    condition = f" *Only where {family.where}.*" if family.where else ""
    values = "; ".join(
        f"`{label}`: {', '.join(known)}" for label, known in zip(family.labels, family.values, strict=False) if known
    )
    return family.help.replace("|", "\\|") + (f" ({values})" if values else "") + condition


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(written(page.read_text("utf-8")), "utf-8")
