"""The demo as a command: one short simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.compare.cli import compare
from loadtest.demo import demo, headline
from tests.loadtest.compare.samples import changed, made_runs, report_of


def test_the_demo_ends_with_verdict_table_and_next_commands(tmp_path: Path) -> None:
    """It writes over an earlier demo, and `compare` reads its runs."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "old.jsonl").write_text("an earlier demo\n")

    answer = CliRunner().invoke(demo, ["--short", "-o", str(tmp_path)])

    assert answer.exit_code == 0, answer.output
    assert "kv_aware computes" in answer.output
    assert "A session takes " in answer.output
    assert " if no cache ever evicted" in " ".join(answer.output.split())
    assert "Time is virtual" in answer.output
    assert "warmroute serve --replica" in answer.output
    assert max(map(len, answer.output.splitlines())) <= 160
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_complete"] is True
    assert report["setting"]["baseline"] == "session_sticky"
    assert len(list((tmp_path / "runs").iterdir())) == 16
    assert CliRunner().invoke(compare, [str(tmp_path / "runs")]).exit_code == 0


@pytest.mark.parametrize(
    ("computed", "said"),
    [
        (
            {"round_robin": 800, "session_sticky": 300, "kv_aware": 200},
            "kv_aware computes 33 % fewer prompt tokens than session_sticky and 75 % fewer "
            "than round_robin",
        ),
        (
            {"round_robin": 200, "kv_aware": 300},
            "kv_aware computes 50 % more prompt tokens than round_robin",
        ),
        (
            {"round_robin": 300, "kv_aware": 300},
            "kv_aware computes no fewer and no more prompt tokens than round_robin",
        ),
        (
            {"session_sticky": 400, "random": 200},
            "random computes 50 % fewer prompt tokens than session_sticky",
        ),
    ],
)
def test_the_verdict_compares_computed_tokens(computed: dict[str, int], said: str) -> None:
    """A loss is called a loss, and equal policies are called equal."""
    runs = made_runs(dict.fromkeys(computed, 0.1))
    for position, one in enumerate(runs):
        num_cached = 1000 - computed[one.info.label]
        runs = changed(runs, position, num_cached_tokens=num_cached)

    assert headline(report_of(runs)) == said
