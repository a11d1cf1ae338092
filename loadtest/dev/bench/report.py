"""The results as a table for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from loadtest.dev.bench.measures import Budget, Line

SCHEMA: Final = 1
"""The version of the JSON; changes when a field changes its meaning."""


class Machine(Struct, frozen=True, kw_only=True):
    """Where it ran; `load_average` of the minute before the start."""

    cpu: str
    num_cores: int
    system: str
    python: str
    load_average: float


class Section(Struct, frozen=True, kw_only=True):
    """One benchmark's results. `about` is what it measures and how; `error`: it failed."""

    name: str
    about: str
    seconds: float
    lines: list[Line]
    error: str | None = None


class Report(Struct, frozen=True, kw_only=True):
    """One run."""

    schema: int = SCHEMA
    date: str  # ISO 8601, UTC
    commit: str | None
    quick: bool
    command: str
    machine: Machine
    sections: list[Section]


def this_machine() -> Machine:
    """Describe the machine."""
    return Machine(
        cpu=_cpu_name(),
        num_cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        load_average=round(os.getloadavg()[0], 2),
    )


def write(report: Report, path: Path) -> None:
    """Write the table to `path` and the JSON beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(report), encoding="utf-8")
    raw = msgspec.json.format(msgspec.json.encode(report), indent=2)
    path.with_suffix(".json").write_bytes(raw + b"\n")


def markdown(report: Report) -> str:
    """Write the report as a page; `tables` of it can be made again from the JSON."""
    parts = [
        "# Benchmarks",
        "",
        "**Question.** What does a router cost? Every budget, measured. Made by "
        f"`{report.command}` (`make bench`).",
        "Every figure is in [benchmarks.json](benchmarks.json).",
        "",
        "<!-- generated: benchmarks -->",
        "",
        tables(report),
        "",
        "<!-- end -->",
    ]
    return "\n".join(parts) + "\n"


def tables(report: Report) -> str:
    """Write the budgets and what was measured of each, then what the benchmarks are.

    Only the worst of the lines with the same budgets is shown. Lines without a budget are left out
    if the benchmark has others.
    """
    machine = report.machine
    parts = [
        f"{report.date}{f', commit {report.commit}' if report.commit else ''} · "
        f"{machine.num_cores} cores, {machine.cpu} · {machine.system} · {machine.python} · "
        f"load average before: {machine.load_average}",
        "",
    ]
    if report.quick:
        parts += ["**A quick run: it shows that everything runs; the figures mean nothing.**", ""]
    parts += [
        "Client, replicas and router share these cores, so what else runs there shows in p99 and "
        "max most of all: compare figures of one run only. Added time is the difference of pairs, "
        "direct and through the router, in alternating order.",
        "",
        "| what | budget | measured | verdict |",
        "|---|---|---|---|",
    ]
    parts += [row for section in report.sections for row in _rows(section)]
    parts += ["", "| benchmark (`python -m loadtest.dev.bench NAME`) | measures |", "|---|---|"]
    for section in report.sections:
        about = " ".join(section.about.partition("\n\n")[0].split())
        failed = f" **Failed: {section.error}**" if section.error is not None else ""
        parts.append(f"| `{section.name}` | {about}{failed} |")
    return "\n".join(parts)


def _rows(section: Section) -> list[str]:
    alike: dict[tuple[Budget, ...], list[Line]] = {}
    for line in section.lines:
        alike.setdefault(line.budgets, []).append(line)
    if len(alike) > 1:
        alike.pop((), None)
    rows = []
    for bounds, lines in alike.items():
        if not bounds:
            rows += [_row(line, line.what) for line in lines]
            continue
        worst = max(lines, key=Line.shortfall)
        group = f"{section.name}: {worst.what} (worst of {len(lines)})"
        rows.append(_row(worst, group if lines[1:] else worst.what))
    return rows


def _row(line: Line, what: str) -> str:
    budgets = ", ".join(budget(bound, line.unit) for bound in line.budgets)
    return f"| {what} | {budgets} | {measured(line)} | {line.verdict()} |"


def measured(line: Line) -> str:
    """Write a line's figures."""
    if line.value is not None:
        return f"{number(line.value)} {line.unit}"
    assert line.p50 is not None
    assert line.p99 is not None
    assert line.max is not None
    return (
        f"p50 {number(line.p50)}, p99 {number(line.p99)}, max {number(line.max)} {line.unit} "
        f"(n={line.num_samples:,})"
    )


def number(figure: float) -> str:
    """Write a number with three digits that count, thousands in full."""
    if abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.3g}"


def budget(bound: Budget, unit: str) -> str:
    """Write a budget."""
    sign = "≥" if bound.is_floor else "≤"
    statistic = "" if bound.statistic == "value" else f"{bound.statistic} "
    return f"{statistic}{sign} {number(bound.limit)} {unit}"


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
