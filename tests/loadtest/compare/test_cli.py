"""`warmroute compare` as a command: from simulated and replayed runs to a report."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from loadtest.compare.cli import compare, numbered
from loadtest.compare.report import REPORT_SCHEMA, Report
from loadtest.runner import write_run
from loadtest.simulator.cli import simulate
from tests.loadtest.compare.samples import made_runs

SIMULATED = ("--generate", "agents", "--sessions", "8", "--turns", "2", "--replicas", "2",
             "--policies", "kv_aware,round_robin", "--rounds", "2")  # fmt: skip


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(compare, [str(arg) for arg in args])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two rounds of two variants, as run files."""
    for number, made in enumerate(made_runs()):
        write_run(tmp_path / f"{number}.jsonl", made)
    return tmp_path


def test_simulated_runs_are_compared(tmp_path: Path) -> None:
    """`simulate --rounds -o` writes what `compare` reads; the report is kept, and reads back."""
    made = CliRunner().invoke(simulate, [*SIMULATED, "-o", str(tmp_path / "runs")])
    assert made.exit_code == 0, made.output

    answer = run(tmp_path / "runs", "--slo-ttft", "5", "-o", tmp_path / "out")

    assert answer.exit_code == 0, answer.output
    assert "kv_aware *" in answer.output
    assert "<table>" in (tmp_path / "out" / "report.html").read_text()
    text = (tmp_path / "out" / "report.json").read_text()
    report = msgspec.json.decode(text, type=Report)
    assert json.loads(text)["schema"] == REPORT_SCHEMA
    assert (report.is_complete, report.setting.num_rounds) == (True, 2)
    other = run(tmp_path / "runs", "--baseline", "round_robin")
    assert "round_robin *" in other.output


def test_part_of_a_comparison_is_reported_as_such(runs: Path) -> None:
    """Status 1, and said on top."""
    (runs / "3.jsonl").unlink()

    answer = run(runs)

    assert answer.exit_code == 1
    assert answer.output.startswith("NOT COMPLETE: least_loaded: 1 of 2 runs")


def test_runs_of_one_label_are_rounds_in_order_of_time() -> None:
    """Whatever round their files name."""
    first, other, second, _ = made_runs()
    late = replace(first, info=replace(first.info, started_at=9.0))
    early = replace(second, info=replace(second.info, started_at=5.0, round=1))

    found = numbered([late, other, early])

    assert [(one.info.label, one.info.round, one.info.started_at) for one in found] == [
        ("least_loaded", 1, 0.0),
        ("kv_aware", 1, 5.0),
        ("kv_aware", 2, 9.0),
    ]


def test_what_cannot_be_compared_is_refused(runs: Path) -> None:
    """Status 2 with a sentence: no files, other files, one variant, two workloads."""
    first = made_runs()[0]
    write_run(runs / "other", replace(first, info=replace(first.info, workload="another")))
    (runs / "text").write_text("hello\n")
    (runs / "empty").mkdir()

    for args, said in (
        ([], "Missing argument 'RUN...'"),
        ([runs / "nowhere"], "does not exist"),
        ([runs / "empty"], "no run file (*.jsonl)"),
        ([runs / "text"], "no run file of `warmroute replay`"),
        ([runs / "0.jsonl", runs / "2.jsonl"], "every run is called 'kv_aware'"),
        ([runs, "--baseline", "least"], "--baseline 'least' is none of kv_aware, least_loaded"),
        ([runs / "0.jsonl", runs / "other"], "has the workload 'another'"),
    ):
        answer = run(*args)
        assert answer.exit_code == 2, answer.output
        assert said in " ".join(answer.output.split())
