"""`warmroute trace`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from loadtest.generated import Agents
from loadtest.traces import read_workload
from loadtest.traces.cli import trace
from tests.loadtest.traces.samples import mooncake, write


def test_describe_prints_figures(tmp_path: Path) -> None:
    """As a table, or as JSON."""
    path = write(tmp_path / "t.jsonl", [mooncake(n, 1000, [1, n + 5]) for n in range(10)])

    table = CliRunner().invoke(trace, ["describe", "--trace", str(path)])
    figures = CliRunner().invoke(trace, ["describe", "--trace", str(path), "--json"])

    assert table.exit_code == figures.exit_code == 0
    assert "ideal hit, of tokens" in table.output
    assert json.loads(figures.stdout)["ideal_hit_ratio"] == pytest.approx(9 * 512 / 10_000)


def test_convert_writes_what_trace_reads(tmp_path: Path) -> None:
    """A generated workload comes back with its sessions, blocks and waits."""
    out = tmp_path / "agents.jsonl"
    argv = ["convert", "--generate", "agents", "--sessions", "4", "--turns", "3", "--seed", "2"]

    result = CliRunner().invoke(trace, [*argv, "--block-size", "16", "-o", str(out)])

    assert result.exit_code == 0, result.output
    workload = read_workload(out)
    assert f"{len(workload.turns):,} requests of agents, 4 sessions, seed 2" in result.output
    assert workload.block_size == 16
    made = Agents(num_sessions=4, num_turns=3, seed=2, block_size=16).workload()
    assert any(len(turn.after) == 3 for turn in made.turns)  # which waits for its sub-agents
    for mine, theirs in zip(made.turns, workload.turns, strict=True):
        assert mine.arrival_s == pytest.approx(theirs.arrival_s, abs=1e-6)
        assert mine.wait_s == pytest.approx(theirs.wait_s, abs=1e-6)
        assert replace(mine, arrival_s=0.0, wait_s=0.0) == replace(
            theirs, arrival_s=0.0, wait_s=0.0
        )


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """Status 2, one sentence: a bad line, options that do not go together, no place to write."""
    path = write(tmp_path / "t.jsonl", [mooncake(0, 1000, [1])])
    small = ["convert", "--generate", "siblings", "--requests", "3"]

    bad = CliRunner().invoke(trace, ["describe", "--trace", str(path)])
    nothing = CliRunner().invoke(trace, ["describe"])
    nowhere = CliRunner().invoke(trace, [*small, "-o", str(tmp_path / "no" / "where")])

    assert [result.exit_code for result in (bad, nothing, nowhere)] == [2, 2, 2]
    assert "t.jsonl: line 1: hash_ids: 1 ids" in bad.output
    assert "give either" in nothing.output
    assert "where: No such file" in nowhere.output
    skipped = write(tmp_path / "s.jsonl", [mooncake(0, 500, [1]), b"{"])
    argv = ["convert", "--trace", str(skipped), "--skip-bad", "-o", str(tmp_path / "o")]
    assert "1 bad lines left out" in CliRunner().invoke(trace, argv).output
