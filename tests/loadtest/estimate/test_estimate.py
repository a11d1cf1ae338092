"""`warmroute estimate`: what it counts, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadtest.estimate.cli import estimate, new_tokens
from loadtest.generated import Agents
from loadtest.traces import read_workload
from loadtest.traces.mooncake import write_trace
from tests.loadtest.traces.samples import mooncake, write


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Agents whose contexts exceed two caches of 150,000 tokens, as a trace."""
    path = tmp_path_factory.mktemp("traces") / "agents.jsonl"
    write_trace(Agents(num_sessions=16, num_turns=10, seed=3).workload(), path)
    return path


@pytest.fixture(scope="module")
def estimated(agents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """What is found of their traffic, and what is said of it."""
    return estimate_of(agents, tmp_path_factory.mktemp("estimates") / "found.json")


def estimate_of(trace: Path, out: Path, *options: str) -> tuple[Any, str]:
    argv = [str(trace), "--cache-tokens", "150000", "-o", str(out), *options]
    result = CliRunner().invoke(estimate, argv)
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text()), result.output


def test_new_tokens_are_those_that_no_earlier_prompt_had(tmp_path: Path) -> None:
    """A block behind an unknown block is new, whatever its name."""
    lines = [
        mooncake(0, 1000, [1, 2], session_id="a"),
        mooncake(9000, 1500, [1, 2, 3], session_id="a"),
        mooncake(9500, 1000, [9, 2], session_id="b"),
    ]

    workload = read_workload(write(tmp_path / "t.jsonl", lines))

    assert new_tokens(workload) == 1000 + (1500 - 1024) + 1000


def test_small_caches_show_a_saving(estimated: tuple[Any, str]) -> None:
    """Fewer tokens are recomputed than by the other routings, and the verdict says how many."""
    found, said = estimated

    savings = {each["routing"]: each for each in found["savings"]}
    ours, best = savings["warmroute"], savings["session hash"]
    num_saved = best["num_recomputed_tokens"] - ours["num_recomputed_tokens"]
    share = num_saved / best["num_recomputed_tokens"]
    assert share > 0.1
    assert best["num_computed_tokens"] < savings["round robin"]["num_computed_tokens"]
    for each in savings.values():
        num_computed = each["num_computed_tokens"]
        assert num_computed == each["num_recomputed_tokens"] + found["traffic"]["num_new_tokens"]
    assert f"{share:.0%} fewer prompt tokens than a session hash ({num_saved:,})" in said


def test_traffic_without_repetition_saves_nothing(tmp_path: Path) -> None:
    """Said in plain words, and not as a saving of 0 %."""
    lines = [mooncake(60_000 * n, 1000, [2 * n, 2 * n + 1]) for n in range(20)]

    result = CliRunner().invoke(estimate, [str(write(tmp_path / "t.jsonl", lines))])

    assert result.exit_code == 0, result.output
    assert "0% of them seen before" in result.output
    assert "saves nothing here" in result.output


def test_few_sessions_get_no_verdict(tmp_path: Path) -> None:
    """The table stands, and the sentence says how many would do."""
    lines = [mooncake(9_000 * n, 1000, [1, 2], session_id=f"s{n % 3}") for n in range(20)]

    result = CliRunner().invoke(estimate, [str(write(tmp_path / "t.jsonl", lines))])

    assert result.exit_code == 0, result.output
    assert "3 sessions are too few" in result.output
    assert "at least 20" in " ".join(result.output.split())
    assert "round robin" in result.output


def test_more_traffic_computes_more(
    agents: Path, estimated: tuple[Any, str], tmp_path: Path
) -> None:
    """`--speed` moves the starts of sessions together, so caches are shared by more of them."""
    slow, _ = estimated
    fast, _ = estimate_of(agents, tmp_path / "fast.json", "--speed", "8")

    slow_tokens, fast_tokens = [each["savings"][0]["num_computed_tokens"] for each in (slow, fast)]
    assert fast_tokens > slow_tokens


def test_a_request_larger_than_the_cache_is_refused(agents: Path) -> None:
    """With both numbers and the option."""
    result = CliRunner().invoke(estimate, [str(agents), "--cache-tokens", "10000"])

    assert result.exit_code == 2
    assert "--cache-tokens is 10,000, and a request has" in result.output


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    """In one sentence that names the formats."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"hello": 1}\n')

    result = CliRunner().invoke(estimate, [str(path)])

    assert result.exit_code == 2
    assert "num_prompt_tokens (decision records)" in result.output
