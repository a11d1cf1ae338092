"""`warmroute trace`.

The workload on a command line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from rich.console import Console

from loadtest.generated import Agents
from loadtest.traces import WorkloadError, read_workload
from loadtest.traces.cli import trace
from loadtest.traces.options import load_workload, workload_options
from loadtest.workload import Workload
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


def parse(*argv: str) -> tuple[Result, list[Workload]]:
    """Run a command that takes a workload."""
    taken: list[Workload] = []

    @click.command()
    @workload_options
    @click.option("--mine")
    def command(mine: str | None, **options: Any) -> None:
        taken.append(load_workload(**options))

    return CliRunner().invoke(command, argv), taken


def test_a_trace_is_read(tmp_path: Path) -> None:
    """Limited, spread, scaled, with bad lines left out."""
    lines = [mooncake(3000 * (n // 4), 600, [0, n]) for n in range(16)]
    path = write(tmp_path / "t.jsonl", [*lines[:3], b"{", *lines[3:]])
    argv = ["--trace", str(path), "--skip-bad", "--requests", "8", "--mine", "x"]

    result, (workload,) = parse(*argv, "--spread", "3", "--scale-time", "0.5", "--seed", "4")

    assert result.exit_code == 0, result.output
    assert (len(workload.turns), workload.num_skipped) == (8, 1)
    arrivals = [turn.arrival_s for turn in workload.turns]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 8
    assert arrivals[-1] <= 3.0


@pytest.mark.parametrize(
    ("argv", "num_turns", "block_size"),
    [
        (["agents", "--sessions", "3", "--turns", "4", "--requests", "7"], 7, 512),
        (["agents", "--sessions", "9", "--scale-tokens", "0.1", "--requests", "9"], 9, 512),
        (["siblings", "--sessions", "5", "--siblings", "3", "--block-size", "16"], 15, 16),
        (["siblings", "--sessions", "2", "--context-tokens", "99", "--rate", "inf"], 16, 512),
    ],
)
def test_a_workload_is_generated(argv: list[str], num_turns: int, block_size: int) -> None:
    """Each kind with the parameters that it has."""
    result, (workload,) = parse("--generate", *argv)

    assert result.exit_code == 0, result.output
    assert (len(workload.turns), workload.block_size) == (num_turns, block_size)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "give either --trace FILE or --generate agents|chats|mixed|siblings"),
        (["--trace", "x", "--generate", "agents"], "give either"),
        (["--generate", "agents", "--siblings", "2"], "agents has no --siblings"),
        (["--generate", "agents", "--skip-bad"], "--skip-bad only with --trace"),
        (["--generate", "agents", "--spread", "3"], "--spread only with --trace"),
        (["--trace", "x", "--sessions", "3"], "--sessions only with --generate"),
        (["--generate", "agents", "--rate", "nan"], "--rate is nan"),
        (["--generate", "zebra"], "'zebra' is not one of"),
        (["--generate", "agents", "--sessions", "0"], "0 is not in the range"),
        (
            ["--generate", "agents", "--scale-time", "inf"],
            "--scale-time is inf; allowed: a finite number",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(argv: list[str], problem: str) -> None:
    """With what is allowed, and status 2."""
    result, taken = parse(*argv)

    assert result.exit_code == 2
    assert problem in " ".join(result.output.replace("│", " ").split())
    assert not taken


def test_a_wrong_trace_is_an_error_of_its_own(tmp_path: Path) -> None:
    """The caller prints it as it likes; a progress bar leaves nothing behind."""
    path = write(tmp_path / "t.jsonl", [mooncake(0, 600, [1])])
    console = Console(record=True, width=80, force_terminal=True, file=(tmp_path / "o").open("w"))

    with pytest.raises(WorkloadError, match="line 1: hash_ids"):
        load_workload(trace=path, console=console)
    with pytest.raises(TypeError, match="colour"):
        load_workload(generate="agents", colour="red")
    console.file.close()
