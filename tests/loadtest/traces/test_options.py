"""The workload on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from loadtest.traces import WorkloadError
from loadtest.traces.options import load_workload, workload_options
from loadtest.workload import Workload
from tests.loadtest.traces.samples import mooncake, write


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
