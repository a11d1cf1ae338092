"""The demo as a whole, as small as it gets: real processes, few policies, a few turns.

No forks of the tests' server: their modules took the real clock with them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner

from loadtest.demo.cli import demo, parse_policies
from loadtest.runner.stack import child_environment

TINY = ["--short", "--sessions", "3", "--turns", "2"]
PROGRAM = "from loadtest.demo.cli import demo; demo()"


def _all_end(pids: list[int], *, within_s: float) -> bool:
    """Wait for processes to be gone; one started as the signal came is ended by its leash."""
    until_s = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.02)
    return True


def _children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def _start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *TINY, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(os.environ),
    )


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"the demo ended without saying {text!r}:\n{said}")


def test_policies_are_split_and_checked() -> None:
    """A wrong name is refused with the nearest and all known ones."""
    assert parse_policies("round_robin, kv_aware") == ("round_robin", "kv_aware")
    with pytest.raises(click.BadParameter, match="did you mean kv_aware"):
        parse_policies("kv_awear")
    with pytest.raises(click.BadParameter, match="unknown policy 'zzzz' \\(known"):
        parse_policies("zzzz")
    with pytest.raises(click.BadParameter, match="once"):
        parse_policies("kv_aware,kv_aware")
    with pytest.raises(click.BadParameter, match="once"):
        parse_policies(",")


def test_wrong_option_is_a_usage_error() -> None:
    """Nothing is started for a wrong command line."""
    answer = CliRunner().invoke(demo, ["--policies", "fastest"])

    assert answer.exit_code == 2
    assert "fastest" in answer.output


@pytest.mark.timeout(180)
def test_kept_demo_answers_and_ends_with_everything_it_started(tmp_path: Path) -> None:
    """All turns succeed, results are written, the kept router answers, one signal ends it all."""
    with _start("--policies", "kv_aware", "--keep", "--out", str(tmp_path)) as process:
        said = _read_until(process, "Ctrl-C")
        children = _children_of(process.pid)
        url = said.partition("base URL")[2].split()[0]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = httpx.post(f"{url}/chat/completions", json=body, trust_env=False, timeout=60.0)
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)

    assert answer.status_code == 200
    assert answer.headers["x-warmroute-policy"] == "kv_aware"
    assert status == 130
    assert "warmroute check --replica" in said
    assert "warmroute serve --replica" in said
    assert len(children) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["num_errors"] == 0
    assert results["runs"][0]["summary"]["num_turns"] == results["plans"][0]["num_turns"]
    assert (tmp_path / "demo.png").stat().st_size > 0


@pytest.mark.timeout(120)
def test_interrupt_while_starting_ends_everything(tmp_path: Path) -> None:
    """Ctrl-C before anything is ready: no process stays, status 130."""
    with _start("--out", str(tmp_path)) as process:
        _read_until(process, "starting replicas")
        children: list[int] = []
        while not children:
            children = _children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read()
        status = process.wait(60)

    assert status == 130
    assert "Stopped by SIGINT" in rest
    assert _all_end(children, within_s=60.0)


@pytest.mark.timeout(120)
def test_child_killed_at_work_is_reported_with_its_log(tmp_path: Path) -> None:
    """A run that dies ends the demo with status 1, and its message says which one."""
    with _start("--policies", "random", "--out", str(tmp_path)) as process:
        _read_until(process, "starting replicas")
        children: list[int] = []
        while not children:
            children = _children_of(process.pid)
        os.kill(children[0], signal.SIGKILL)
        assert process.stdout is not None
        rest = process.stdout.read()
        status = process.wait(60)

    assert status == 1
    assert "the run of random ended with signal SIGKILL" in rest
    assert "random-1.log" in rest


@pytest.mark.timeout(180)
def test_a_run_repeats_to_the_last_digit(tmp_path: Path) -> None:
    """The machine has no part in it: every time and token is the same again."""
    played: list[list[dict[str, Any]]] = []
    for number in range(2):
        out = tmp_path / str(number)
        with _start("--policies", "session_sticky,kv_aware", "--out", str(out)) as process:
            assert process.wait(120) == 0
        files = (out / "turns-session_sticky-1.jsonl", out / "turns-kv_aware-1.jsonl")
        turns = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        for turn in turns:
            del turn["request_id"]
        played.append(turns)

    assert played[0] == played[1]
    assert all(turn["ttft_s"] > 0 for turn in played[0])
