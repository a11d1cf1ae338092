"""A finding, and the report that findings make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from router.check.seen import PoolSeen, RedisSeen, ReplicaSeen

Level = Literal["ok", "note", "warning", "error"]
"""`ok`: as it should be. `note`: it could be better, or cannot be told. `warning`: the router
works, but with less than it could know. `error`: something will not work."""


class Finding(Struct, frozen=True):
    """One thing that was looked at.

    `subject` says whose it is, "replica r1", "redis", "pool", "router"; `about` what of it.
    """

    subject: str
    about: str
    level: Level
    text: str
    hint: str = ""  # what to do, with the flag to do it with; empty: nothing


class Report(Struct, frozen=True, kw_only=True):
    """All findings in the order of people's interest, and what they were concluded from."""

    findings: tuple[Finding, ...]
    replicas: tuple[ReplicaSeen, ...] = ()
    redis: RedisSeen | None = None  # None: none is configured
    pool: PoolSeen | None = None  # None: none is configured

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong; notes are not wrong."""
        return not any(f.level in ("warning", "error") for f in self.findings)

    def subjects(self) -> list[str]:
        """List whose findings there are, in order."""
        return list(dict.fromkeys(finding.subject for finding in self.findings))

    def of(self, subject: str) -> list[Finding]:
        """List one subject's findings."""
        return [finding for finding in self.findings if finding.subject == subject]

    def count(self, level: Level) -> int:
        """Count findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Say it to machines."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        return {"well": self.is_well, **told}


def gravest(findings: Sequence[Finding]) -> Level:
    """Tell the gravest level among findings."""
    levels: tuple[Level, ...] = ("error", "warning", "note")
    return next((level for level in levels if any(f.level == level for f in findings)), "ok")
