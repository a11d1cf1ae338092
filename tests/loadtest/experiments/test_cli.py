"""`warmroute report` and `warmroute redecide`, as they are called."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from loadtest.experiments import cli
from router.base.system import install_hint
from tests.loadtest.experiments.samples import CONTROL, TREATMENT, Scene, records, write

MADE = records(Scene(num_sessions=120))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "decisions.jsonl", MADE)


def call(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_a_report_on_a_terminal_and_as_json(file: Path, tmp_path: Path) -> None:
    """One call says the verdict in both."""
    data = tmp_path / "report.json"

    result = call(cli.report, file, "-o", data)

    report = json.loads(data.read_text())
    assert result.exit_code == 0, result.output
    assert "not decided yet" in result.stdout
    assert "computed tokens per request" in result.stdout
    assert report["schema"] == "warmroute.report/2"
    assert report["verdicts"][0]["kind"] == "undecided"


def test_options_are_shares(file: Path) -> None:
    """5% and 0.05 are understood; nonsense is refused by name."""
    fine = call(cli.report, file, "--margin", "5%", "--effect", "0.2", "--metric", "computed")
    wrong = [
        call(cli.report, file, "--margin", "five"),
        call(cli.report, file, "--alpha", "2"),
        call(cli.report, file, "--metric", "speed"),
    ]

    assert fine.exit_code == 0, fine.output
    assert [result.exit_code for result in wrong] == [2, 2, 2]
    for result, said in zip(wrong, ("five", "100 %", "'speed'"), strict=True):
        assert said in result.output


def test_a_broken_experiment_has_its_own_status(tmp_path: Path) -> None:
    """Scripts can distinguish "do not believe" from "done"."""
    arms = (CONTROL, replace(TREATMENT, missing_rate=0.2))
    file = write(tmp_path / "r.jsonl", records(Scene(arms=arms, num_sessions=200)))

    result = call(cli.report, file)

    assert result.exit_code == 1
    assert "broken: do not trust" in result.stdout


def test_bad_input_is_status_two(file: Path, tmp_path: Path) -> None:
    """What is wrong is said in one line, without a trace."""
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("hello\n" + file.read_text())

    for arguments, said in (
        ((tmp_path / "none.jsonl",), "no such file"),
        ((foreign,), f"{foreign}:1: not JSON"),
        ((file, "--experiment", "trail"), "did you mean 'trial'"),
        ((file, "-o", tmp_path), "is a directory"),
        ((file, "-o", tmp_path / "no" / "report.json"), "cannot write"),
    ):
        result = call(cli.report, *arguments)
        assert result.exit_code == 2
        assert said in result.output
    assert call(cli.report, foreign, "--skip-bad").exit_code == 0


def test_a_missing_extra_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the command is there, and names it before any record is read."""
    monkeypatch.setitem(sys.modules, "scipy", None)

    result = call(cli.report, file)

    assert result.exit_code == 2
    assert install_hint("experiments") in result.output


def test_an_interruption_writes_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends with a word and its own status."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loadtest.experiments.report.make_report", interrupt)
    data = tmp_path / "report.json"

    result = call(cli.report, file, "-o", data)

    assert result.exit_code == 130
    assert "Interrupted" in result.output
    assert not data.exists()


def test_redeciding(file: Path, tmp_path: Path) -> None:
    """Records agree with their policies; another one is asked along."""
    data = tmp_path / "again.json"

    policy = ("--policy", "prefix_hash:num_points=7:load_factor=1.5")
    result = call(cli.redecide, file, *policy, "-o", data)

    report = json.loads(data.read_text())
    assert result.exit_code == 0, result.output
    assert "every record was decided again as it was" in result.stdout
    assert report["num_same"] == len(MADE)
    assert report["what_if"]["policy"] == "prefix_hash:load_factor=1.5:num_points=7"


def test_redeciding_otherwise_is_status_one(tmp_path: Path) -> None:
    """A record of another policy than it says is named."""
    file = write(tmp_path / "r.jsonl", [replace(MADE[0], policy="unknown"), *MADE[1:]])

    result = call(cli.redecide, file)

    assert result.exit_code == 1
    assert f"{file}:1: request" in result.stdout.replace("\n", "")
