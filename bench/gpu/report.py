"""What a GPU check found: lines, JSON and a table. In the dry mode every line says DRY. State: the findings so far."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One proof (`ok` tells) or one timing (`ok` None).

    figures  numbers by name; seconds, bytes and counts
    """

    model: str
    name: str
    ok: bool | None
    text: str
    figures: dict[str, Any] = field(default_factory=dict)

    def line(self, dry: bool) -> str:
        """Say it in one line."""
        mark = "time" if self.ok is None else "ok  " if self.ok else "FAIL"
        return f"{'DRY ' if dry else ''}{mark} {self.model:14} {self.name:34} {self.text}"


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
            f"| {mark}{'time' if f.ok is None else 'ok' if f.ok else '**FAIL**'} | {f.model} | {f.name} | {f.text} |"
            for f in self.findings
        ]
        table.write_text("\n".join(head + rows) + "\n")
        return [data, table]

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        print(finding.line(self.dry), flush=True)
