"""The verdict as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console
from rich.table import Table

from loadtest.dev.chaos.ledger import FAILED
from loadtest.dev.chaos.verdict import Check, Evidence, around, could_be_saved

_SHOWN: Final = 8
_MARKS: Final = {True: "✓", False: "✗", None: "-"}
_OUTCOMES: Final = (
    "right", "refused", "error", "error event", "aborted", "left",
    "router gone", "wrong", "unclear",
)  # fmt: skip


def show(console: Console, checks: Sequence[Check], evidence: Evidence, command: str) -> None:
    """Print what was done, what must hold, and the first failures of each kind."""
    console.print(_summary(evidence))
    table = Table(box=None, padding=(0, 1), show_header=False)
    for check in checks:
        style = "red" if check.holds is False else ""
        table.add_row(_MARKS[check.holds], check.name, check.figures, style=style)
    console.print(table)
    for check in checks:
        for failure in check.failures[:_SHOWN]:
            console.print(f"✗ {failure}", style="red", markup=False, soft_wrap=True)
        if len(check.failures) > _SHOWN:
            console.print(f"  … and {len(check.failures) - _SHOWN} more")
    if any(check.holds is False for check in checks):
        console.print(f"the same faults again: {command}", markup=False)


def write(
    folder: Path, checks: Sequence[Check], evidence: Evidence, command: str, machine: str
) -> None:
    """Write `verdict.json`."""
    tree = {"command": command, "machine": machine, **_tree(checks, evidence)}
    folder.joinpath("verdict.json").write_bytes(orjson.dumps(tree, option=orjson.OPT_INDENT_2))


def _summary(evidence: Evidence) -> str:
    counts = ", ".join(
        f"{evidence.ledger.count(name):,} {name}"
        for name in _OUTCOMES
        if evidence.ledger.count(name)
    )
    length_s = evidence.end_s - evidence.start_s
    return (
        f"{'interrupted after ' if evidence.is_partial else ''}{length_s:.0f} s, "
        f"{len(evidence.ledger.seen):,} requests ({counts}), {len(evidence.time_line)} faults"
    )


def _tree(checks: Sequence[Check], evidence: Evidence) -> dict[str, Any]:
    start_s = evidence.start_s
    failed = [one for one in evidence.ledger.seen if one.outcome in FAILED]
    return {
        "holds": all(check.holds is not False for check in checks),
        "is_partial": evidence.is_partial,
        "checks": [
            {"name": c.name, "holds": c.holds, "figures": c.figures, "failures": list(c.failures)}
            for c in checks
        ],
        "requests": {name: evidence.ledger.count(name) for name in _OUTCOMES},
        "faults": [
            {
                "kind": done.fault.kind.name,
                "target": done.fault.target,
                "start_s": round(done.start_s - start_s, 2),
                "end_s": None if done.end_s is None else round(done.end_s - start_s, 2),
                "error": done.error,
            }
            for done in evidence.time_line
        ],
        "failed": [
            {
                "saveable": could_be_saved(one, evidence.time_line, evidence.resent),
                "what": around(one, evidence),
            }
            for one in failed
        ],
    }
