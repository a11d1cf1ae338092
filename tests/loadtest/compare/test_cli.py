"""`warmroute compare` as a command: what it refuses, and a simulated comparison from end to end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from loadtest.compare.cli import compare
from loadtest.runner.stack import child_environment
from tests.forks import PYTHONPATH, python_command

SMALL = ["--generate", "agents", "--sessions", "8", "--turns", "2"]
SIMULATED = [*SMALL, "--simulate", "--policies", "kv_aware,round_robin", "--rounds", "2"]


def run(*args: str) -> Result:
    return CliRunner().invoke(compare, args)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (SMALL, "needs two variants"),
        ([*SMALL, "--policies", "kv_aware"], "only 'kv_aware'"),
        ([*SMALL, "--policies", "kv_aware,least_load"], "did you mean 'least_loaded'"),
        ([*SMALL, "--policies", "kv_aware,random", "--baseline", "rand"], "did you mean 'random'"),
        ([*SMALL, "--policies", "kv_aware,kv_aware"], "two variants are called"),
        ([*SMALL, "--policies", "random", "--target", "a=http://127.0.0.1:1"],
         "exclude each other"),
        ([*SMALL, "--target", "a=127.0.0.1:1", "--target", "b=127.0.0.1:2"], "base URL"),
        ([*SMALL, "--target", "a=http://127.0.0.1:1", "--target", "b=http://127.0.0.1:1"],
         "nothing answers at http://127.0.0.1:1"),
        ([*SMALL, "--policies", "kv_aware,random", "--replica", "http://127.0.0.1:1"],
         "nothing answers at http://127.0.0.1:1"),
        ([*SIMULATED, "--replica", "http://127.0.0.1:1"], "contradict each other"),
        ([*SIMULATED, "--speed", "2"], "--speed means nothing for simulated runs, only for: "),
        ([*SMALL, "--policies", "kv_aware,random", "--load", "2"], "--load means nothing"),
        ([*SMALL, "--policies", "kv_aware,random", "--loop", "closed", "--request-rate", "2"],
         "needs the open loop"),
        ([*SMALL, "--policies", "kv_aware,unlimited", "--replica", "http://127.0.0.1:1"],
         "unlimited means nothing for engines runs, only for: emulated, simulated"),
        ([*SIMULATED, "--cpu-blocks", "9", "--pool-speed", "5"], "--cpu-blocks: not with"),
        (["--policies", "kv_aware,random", "--simulate"], "either --trace FILE or --generate"),
        (["--from", "nowhere"], "has no compare.json"),
        (["--from", "nowhere", "--policies", "kv_aware"], "--policies does not go with it"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(args: list[str], said: str) -> None:
    """Status 2, and what to do instead; nothing is started."""
    answer = run(*args)

    assert answer.exit_code == 2, answer.output
    assert said in " ".join(answer.output.split())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A whole comparison, to copy."""
    out = tmp_path_factory.mktemp("compared") / "out"
    return out, run(*SIMULATED, "--out", str(out), "--slo-ttft", "5")


def test_a_simulated_comparison_from_end_to_end(
    compared: tuple[Path, Result], tmp_path: Path
) -> None:
    """Runs, report.json and report.html are kept, and made again from the runs."""
    kept, first = compared
    out = shutil.copytree(kept, tmp_path / "out")

    assert first.exit_code == 0, first.output
    assert len(list((out / "runs").iterdir())) == 4
    report = (out / "report.json").read_text()
    assert json.loads(report)["is_complete"] is True
    assert "<figure>" in (out / "report.html").read_text()
    (out / "report.json").unlink()

    again = run("--from", str(out))

    assert again.exit_code == 0, again.output
    assert (out / "report.json").read_text() == report
    other = run("--from", str(out), "--baseline", "round_robin")
    assert "round_robin *" in other.output
    used = run(*SIMULATED, "--out", str(out))
    assert used.exit_code == 2
    assert "holds a comparison already" in used.output


def test_part_of_a_comparison_is_reported_as_such(
    compared: tuple[Path, Result], tmp_path: Path
) -> None:
    """Status 1, and said on top."""
    out = shutil.copytree(compared[0], tmp_path / "out")
    sorted((out / "runs").iterdir())[-1].unlink()

    answer = run("--from", str(out))

    assert answer.exit_code == 1
    assert "NOT COMPLETE: 1 run never began" in answer.output


@pytest.mark.timeout(180)
def test_interrupt_reports_what_there_is(tmp_path: Path) -> None:
    """Ctrl-C after the first run: status 1, said on top, a report of the runs there are."""
    command = [*python_command(), "-c", "from loadtest.compare.cli import compare; compare()"]
    many = [*SMALL, "--simulate", "--policies", "kv_aware,round_robin", "--rounds", "500"]
    with subprocess.Popen(
        [*command, *many, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(os.environ | {"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "3/1000" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        status = process.wait(60)

    assert status == 1, rest
    assert "NOT COMPLETE: stopped by SIGINT" in rest
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_complete"] is False
    assert report["comparisons"]


def test_help_helps() -> None:
    """Every mode has an example."""
    said = run("--help").output

    for word in ("--simulate", "--replica URL", "--target ours=URL", "--from DIR"):
        assert word in said
