"""The demo as a command: small simulations, and once the processes that `--keep` starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from loadtest.compare.report import Report, make_report
from loadtest.compare.setting import Setting
from loadtest.demo import demo, headline
from loadtest.extras import MissingExtra
from loadtest.runner.stack import child_environment
from tests.loadtest.compare.samples import made_runs, made_setting

TINY = ("--short", "--sessions", "3", "--turns", "2")


def run(*args: str) -> Result:
    return CliRunner().invoke(demo, [*TINY, *args])


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ("kv_awear", "did you mean 'kv_aware'"),
        ("kv_aware,kv_aware", "name each policy once"),
        (",", "name each policy once"),
    ],
)
def test_wrong_policies_are_refused(policies: str, said: str, tmp_path: Path) -> None:
    """Status 2 with what to do instead; nothing is written."""
    answer = run("--policies", policies, "--out", str(tmp_path / "out"))

    assert answer.exit_code == 2
    assert said in " ".join(answer.output.split())
    assert not (tmp_path / "out").exists()


def test_the_demo_ends_with_verdict_table_picture_and_next_commands(tmp_path: Path) -> None:
    """A second demo writes over the first, and gives the same figures."""
    first = run("--out", str(tmp_path))
    report = (tmp_path / "report.json").read_text()
    second = run("--out", str(tmp_path))

    assert first.exit_code == second.exit_code == 0, second.output
    assert "kv_aware computes" in first.output
    assert "A session takes " in first.output
    assert " if no cache ever evicted" in " ".join(first.output.split())
    assert "Time is virtual" in first.output
    assert "warmroute serve --replica" in first.output
    assert max(map(len, first.output.splitlines())) <= 160
    assert json.loads(report)["is_complete"] is True
    assert (tmp_path / "report.json").read_text() == report
    assert (tmp_path / "demo.svg").read_text().startswith("<?xml")
    assert len(list((tmp_path / "runs").iterdir())) == 16


def test_every_seed_has_its_own_folder(tmp_path: Path) -> None:
    """`--repeat 2` plays the seeds 5 and 6."""
    answer = run("--seed", "5", "--repeat", "2", "--policies", "kv_aware,random", "--out",
                 str(tmp_path))  # fmt: skip

    assert answer.exit_code == 0, answer.output
    seeds = [json.loads((tmp_path / f"seed-{n}/report.json").read_text()) for n in (5, 6)]
    assert [report["setting"]["seed"] for report in seeds] == [5, 6]
    assert seeds[0]["setting"]["baseline"] == "random"


def test_without_matplotlib_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output says how to get the picture."""

    def absent(_: object) -> bytes:
        raise MissingExtra("matplotlib is not installed. pip install it")

    monkeypatch.setattr("loadtest.pictures.origins", absent)

    answer = run("--policies", "random", "--out", str(tmp_path))

    assert "There is no picture: matplotlib is not installed" in answer.output
    assert "report.json" in answer.output


def made_report(computed: dict[str, int]) -> Report:
    """Make a report whose policies computed so many tokens a turn."""
    setting: Setting = made_setting(tuple(computed))
    runs = [
        replace(one, turns=tuple(
            replace(turn, num_cached_tokens=1000 - computed[one.info.label])
            for turn in one.turns
        ))
        for one in made_runs(setting, dict.fromkeys(computed, 0.1))
    ]  # fmt: skip
    return make_report(setting, runs)


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
    assert headline(made_report(computed)) == said


@pytest.mark.timeout(180)
def test_a_kept_demo_serves_until_a_signal_ends_it(tmp_path: Path) -> None:
    """The router answers under the last policy, and no process stays."""
    command = [sys.executable, "-c", "from loadtest.demo import demo; demo()"]
    args = (*TINY, "--policies", "random,kv_aware", "--keep", "--open", "-o", str(tmp_path))
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    with subprocess.Popen(
        [*command, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(os.environ) | {"BROWSER": f"{browser} %s"},
    ) as process:
        said = ""
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if "Ctrl-C" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        url = said.partition("base URL")[2].split()[0]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = httpx.post(f"{url}/chat/completions", json=body, trust_env=False, timeout=60.0)
        link = said.partition("live page")[2].split()[0]
        variables = dict(pair.split("=", 1) for pair in re.findall(r"WARMROUTE_\S+=\S+", said))
        top = subprocess.run(
            [sys.executable, "-m", "router.cli", "status"],
            env=child_environment(os.environ) | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        status = process.wait(60)

    token = Path(variables["WARMROUTE_ADMIN_TOKEN_FILE"]).read_text().strip()
    assert link == f"{variables['WARMROUTE_ADMIN_URL']}/#token={token}"
    assert opened.read_text().strip() == link
    assert "3 replicas" in top.stdout or "3 of 3 replicas up" in top.stdout, top.stderr
    assert answer.status_code == 200
    assert answer.headers["x-warmroute-policy"] == "kv_aware"
    assert status == 130
    assert "stopped by SIGTERM; every process has ended." in rest
    assert len(children) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
