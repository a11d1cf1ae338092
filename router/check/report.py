"""The report of all findings: for people, and for machines."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from router.check.finding import Finding, Level, gravest
from router.check.mooncake import PoolSeen
from router.check.redis import RedisSeen
from router.check.seen import ReplicaSeen
from router.index.candidate_stream import StreamReason

_MARKS: Final[dict[Level, tuple[str, str]]] = {
    "ok": ("✓", "green"),
    "note": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "error": ("✗", "red"),
}


class Report(Struct, frozen=True, kw_only=True):
    """All findings in the order in which they are shown, and what they were concluded from."""

    findings: tuple[Finding, ...]
    replicas: tuple[ReplicaSeen, ...] = ()
    redis: RedisSeen | None = None  # None: none is configured
    pools: tuple[PoolSeen, ...] = ()

    @property
    def is_well(self) -> bool:
        """Whether there is no warning and no error."""
        return not any(f.level in ("warning", "error") for f in self.findings)

    def subjects(self) -> list[str]:
        """List the subjects that have findings, in order."""
        return list(dict.fromkeys(finding.subject for finding in self.findings))

    def of(self, subject: str) -> list[Finding]:
        """List one subject's findings."""
        return [finding for finding in self.findings if finding.subject == subject]

    def complaints(self) -> list[Finding]:
        """List errors, then warnings."""
        levels: tuple[Level, ...] = ("error", "warning")
        return [each for level in levels for each in self.findings if each.level == level]

    def count(self, level: Level) -> int:
        """Count the findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the report for machines."""
        fields: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return {"well": self.is_well, **fields}


def described(seen: ReplicaSeen) -> str:
    """Describe a replica in a few words: its model and release."""
    models = ", ".join(model.id for model in seen.models)
    version = seen.facts.version if seen.facts is not None else None
    return f"{models}, vLLM {version}" if version else models


def state_of(seen: ReplicaSeen) -> str:
    """Name the state of a replica: its worst rank's, or why it has none."""
    if seen.error is not None:
        return "not reachable"
    if seen.facts is not None and seen.facts.sleep != "awake":
        return "paused" if seen.facts.sleep == "paused" else "asleep"
    if not seen.ranks:
        return "BLIND"
    ranks = [rank for rank in seen.ranks if rank.reason != StreamReason.NO_EVENTS]
    states = {rank.state for rank in ranks}
    worst = next((state for state in ("blind", "degraded", "exact") if state in states), None)
    return worst.upper() if worst is not None else str(StreamReason.NO_EVENTS)


def render(report: Report, console: Console) -> None:
    """Print a table for each subject, then the number of findings."""
    for subject in report.subjects():
        findings = report.of(subject)
        mark, colour = _MARKS[gravest(findings)]
        console.print(Text.assemble((mark, colour), " ", (subject, "bold")))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=1)
        table.add_column(no_wrap=True, min_width=12)
        table.add_column(overflow="fold")
        for finding in findings:
            mark, colour = _MARKS[finding.level]
            text = Text(finding.text)
            if finding.hint and finding.level != "ok":
                text.append(f"\n→ {finding.hint}", "dim")
            table.add_row(Text(mark, colour), Text(finding.about), text)
        console.print(Padding(table, (0, 0, 1, 2), expand=False))
    console.print(_verdict(report))


def _verdict(report: Report) -> Text:
    levels: tuple[Level, ...] = ("error", "warning", "note")
    counts = ", ".join(
        f"{num} {level}{'' if num == 1 else 's'}"
        for level in levels
        if (num := report.count(level))
    )
    if report.is_well:
        return Text(f"all is well{f' ({counts})' if counts else ''}", "green")
    return Text(counts, "red" if report.count("error") else "yellow")
