"""loadtest.dev.bench: that every benchmark runs, and what is made of its figures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.progress import Progress

from loadtest.dev.bench import report
from loadtest.dev.bench.__main__ import BENCHMARKS, run_one
from loadtest.dev.bench.measures import Budget, Line, distribution
from loadtest.dev.bench.report import Machine, Report, Section
from loadtest.dev.bench.setting import Setting

IN_PROCESS = ("decision", "redis")
WITH_PROCESSES = tuple(name for name in BENCHMARKS if name not in IN_PROCESS)

MACHINE = Machine(cpu="a CPU", num_cores=2, system="Linux", python="CPython 3.11", load_average=0.5)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Give a setting for quick runs."""
    return Setting(work_dir=tmp_path, progress=Progress(disable=True), quick=True)


def report_of(*sections: Section) -> Report:
    """Build a report."""
    return Report(
        date="2026-01-01T00:00Z",
        commit="abc",
        quick=False,
        command="python -m loadtest.dev.bench",
        machine=MACHINE,
        sections=list(sections),
    )


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.timeout(180)
def test_parts_are_measured(name: str, setting: Setting) -> None:
    """Every line has figures of its samples, and says what they are."""
    section = run_one(name, setting)

    assert section.error is None
    assert section.about
    assert section.lines
    for line in section.lines:
        assert line.num_samples > 0
        assert report.measured(line)


@pytest.mark.parametrize("name", WITH_PROCESSES)
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("forked_children")
def test_a_running_router_is_measured(name: str, setting: Setting) -> None:
    """Processes of their own; where predictions are checked, all of them come true."""
    section = run_one(name, setting)

    assert section.error is None
    assert section.lines
    notes = [line.note for line in section.lines if "predictions exact" in line.note]
    for note in notes:
        right, total = note.partition(" predictions")[0].rpartition("; ")[2].split(" of ")
        assert right == total != "0"


def test_a_benchmark_that_fails_is_a_result(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run on; the report says why."""

    def fail(setting: Setting) -> list[Line]:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("loadtest.dev.bench.bench_decision.run", fail)
    section = run_one("decision", setting)

    assert (section.error, section.lines) == ("RuntimeError: no such thing", [])
    assert "**Failed: RuntimeError: no such thing**" in report.markdown(report_of(section))


def test_a_report_is_a_table_and_json(tmp_path: Path) -> None:
    """Both say the same, and the JSON its schema."""
    line = distribution("thing", "ms", [1.0, 2.0], Budget("p50", 5.0), note="a note")
    made = report_of(Section(name="x", about="How.", seconds=1.0, lines=[line]))
    report.write(made, tmp_path / "docs" / "b.md")

    table = (tmp_path / "docs" / "b.md").read_text()
    assert "| thing | p50 ≤ 5 ms | p50 2, p99 2, max 2 ms (n=2) | met |" in table
    assert "| `x` | How. |" in table
    assert "2 cores, a CPU" in table
    read = msgspec.json.decode((tmp_path / "docs" / "b.json").read_bytes(), type=Report)
    assert (read, read.schema) == (made, report.SCHEMA)
