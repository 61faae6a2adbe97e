"""What a GPU check found: lines, JSON and a table. In the dry mode every line says DRY. State: the findings so far."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One proof (`ok` tells), one timing (`ok` None), or what was left out and why (`skipped`).

    figures  numbers by name; seconds, bytes and counts
    """

    model: str
    name: str
    ok: bool | None
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: bool = False

    @property
    def mark(self) -> str:
        """Name the kind of finding."""
        return "skip" if self.skipped else "time" if self.ok is None else "ok" if self.ok else "FAIL"

    def line(self, dry: bool) -> str:
        """Say it in one line."""
        return f"{'DRY ' if dry else ''}{self.mark:4} {self.model:14} {self.name:34} {self.text}"


class Report:
    """Collect findings, print each as it comes."""

    def __init__(self, dry: bool, facts: dict[str, Any]):
        self.dry = dry
        self.facts = facts
        self.findings: list[Finding] = []

    def prove(self, model: str, name: str, ok: bool, text: str, **figures: Any) -> None:
        """Note whether something holds."""
        self._add(Finding(model, name, bool(ok), text, figures))

    def time(self, model: str, name: str, text: str, **figures: Any) -> None:
        """Note a measurement."""
        self._add(Finding(model, name, None, text, figures))

    def skip(self, model: str, name: str, why: str) -> None:
        """Note what was not done, so that nobody takes its absence for a success."""
        self._add(Finding(model, name, None, f"SKIPPED: {why}", {}, True))

    def figure(self, model: str, name: str, key: str) -> float | None:
        """Look up a number of an earlier finding; None where there is none."""
        found = [f.figures[key] for f in self.findings if (f.model, f.name) == (model, name) and key in f.figures]
        return float(found[-1]) if found else None

    @property
    def skipped(self) -> int:
        """Count what was left out."""
        return sum(f.skipped for f in self.findings)

    @property
    def failed(self) -> int:
        """Count the proofs that failed."""
        return sum(f.ok is False for f in self.findings)

    def say(self, text: str) -> None:
        """Print a line, marked in the dry mode."""
        print(f"{'DRY ' if self.dry else ''}{text}", flush=True)

    def write(self, folder: Path, stem: str) -> list[Path]:
        """Write `stem`.json and `stem`.md; every line of a dry table says DRY."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {"dry": self.dry, **self.facts, "findings": [dataclasses.asdict(f) for f in self.findings]}
        if self.dry:
            record = {"warning": "DRY: interpreted on a CPU, no GPU result"} | record
        data, table = folder / f"{stem}.json", folder / f"{stem}.md"
        data.write_text(json.dumps(record, indent=1) + "\n")
        mark = "DRY, no GPU result: " if self.dry else ""
        head = [f"# {mark}GPU check on {self.facts['device']}, {self.facts['date']}", ""]
        head += [f"| {mark}result | model | what | found |", "| --- | --- | --- | --- |"]
        rows = [
            f"| {mark}{'**FAIL**' if f.ok is False else f.mark} | {f.model} | {f.name} | {f.text} |"
            for f in self.findings
        ]
        table.write_text("\n".join(head + rows) + "\n")
        return [data, table]

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        print(finding.line(self.dry), flush=True)
