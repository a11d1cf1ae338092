from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from loadtest.simulator import cli, rounds


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.simulate, args, env={"COLUMNS": "200"})


SMALL = ("--generate", "siblings", "--sessions", "3", "--replicas", "2")


def test_a_table_and_its_figures() -> None:
    """A row for each policy, and the same in JSON."""
    args = (*SMALL, "--policies", "kv_aware,random", "--pool-speed", "5")

    result, printed = run(*args), run(*args, "--json")

    assert result.exit_code == printed.exit_code == 0, result.output
    assert "closed loop, load 0.9; 2 replicas (h100x4-70b)" in " ".join(result.output.split())
    figures = msgspec.json.decode(printed.stdout)
    assert [found["label"] for found in figures["results"]] == ["kv_aware", "random"]
    assert figures["setup"]["pool"]["speed"] == 5.0
    for found in figures["results"]:
        assert f"{found['label']} " in result.output
        assert f" {found['summary']['ttft_mean_s']:,.2f} " in result.output
        assert found["summary"]["num_errors"] == 0


def test_halves_have_a_table_and_figures_of_their_own() -> None:
    """How many prompts were computed apart, and how busy each half was."""
    args = ("--generate", "siblings", "--sessions", "3", "--prefill", "1", "--decode", "2")

    result = run(*args, "--policies", "kv_aware")

    assert result.exit_code == 0, result.output
    assert "1 prefill and 2 decode replicas (h100x4-70b)" in " ".join(result.output.split())
    [found] = msgspec.json.decode(run(*args, "--policies", "kv_aware", "--json").stdout)["results"]
    assert f" {100 * found['decode_busy_ratio']:.1f} " in result.output
    assert [use["role"] for use in found["replicas"]] == ["prefill", "decode", "decode"]


def test_every_policy_by_default() -> None:
    """Without --policies all are simulated."""
    result = run(*SMALL)

    assert result.exit_code == 0, result.output
    for name in ("random", "session_hash", "mooncake", "kv_aware"):
        assert f" {name} " in result.output


def test_a_cpu_tier_has_a_column_of_its_own() -> None:
    """In place of the pool's; the title says how large and how fast it is."""
    args = ("--blocks", "400", "--cpu-blocks", "9000", "--cpu-speed", "4")
    result = run(*SMALL, "--policies", "kv_aware", *args)

    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "CPU tier of 9,000 blocks 4x" in text
    assert "CPU %" in text
    assert "pool %" not in text


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--policies", "kv_awar"), "did you mean 'kv_aware'"),
        (("--pool-links", "2"), "only with --pool-speed"),
        (("--cpu-speed", "2"), "--cpu-speed only with --cpu-blocks"),
        (("--cpu-blocks", "9", "--pool-speed", "5"), "--cpu-blocks: not with --pool-speed"),
        (("--cpu-blocks", "0"), "--cpu-blocks"),
        (("--load", "nan"), "not a number"),
        (("--prefill", "2"), "--prefill and --decode need each other"),
        (("--transfer-speed", "9"), "only with --prefill"),
        (("--replicas", "0"), "only beside"),
        (("--prefill", "1", "--decode", "1", "--no-decode"), "--decode and --no-decode"),
        (("--prefill", "1", "--decode", "1", "--transfer-speed", "9", "--pool-speed", "5"), "with"),
        (("--load", "0"), "--load"),
        (("--max-num-seqs", "300", "--max-num-batched-tokens", "200"), "--max-num-seqs is above"),
        (("--engine", "abacus"), "h100x4-70b"),
        (("--trace", "nowhere.jsonl"), "--trace"),
    ],
)
def test_wrong_input_is_two(args: tuple[str, ...], error: str) -> None:
    """Exit status 2, and the message says what is wrong."""
    result = run(*SMALL, *args)

    assert result.exit_code == 2
    assert error in result.output


def test_a_bad_trace_is_named(tmp_path: Path) -> None:
    """File, line and field are in the message."""
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": [1]}\n')

    result = run("--trace", str(trace))

    assert result.exit_code == 2
    assert "bad.jsonl" in result.output
    assert "input_length" in result.output


def test_stopped_it_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves the policies that are done, and status 1."""
    simulate_one = rounds.simulate

    def stopped_at_random(*args: object, label: str, **more: object) -> object:
        if label == "random":
            raise KeyboardInterrupt
        return simulate_one(*args, label=label, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(rounds, "simulate", stopped_at_random)

    result = run(*SMALL, "--policies", "kv_aware,random,least_loaded")

    assert result.exit_code == 1
    assert "kv_aware " in result.output
    assert "stopped: 1 of 3 simulations are done" in result.output


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A directory that cannot be made is an error, after the table."""
    (tmp_path / "file").touch()
    result = run(*SMALL, "--policies", "random", "-o", str(tmp_path / "file" / "runs"))

    assert result.exit_code == 1
    assert "cannot write" in result.output
