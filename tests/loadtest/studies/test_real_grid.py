from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.dev.studies.cells import cells
from loadtest.dev.studies.draw import draw
from loadtest.dev.studies.grid_run import (
    GridFile,
    num_moved,
    run_of,
    setup_of,
    simulated,
    under,
)
from loadtest.dev.studies.grid_table import comparison, ratios, report
from loadtest.dev.studies.real_grid import arms_of, main
from loadtest.engines.vllm import Engine
from loadtest.results import Predicted, TurnResult
from policies.cost import KvAware
from router.scheduling.waiting import QueueRules
from tests.loadtest.studies.samples import CELL, run


def turn(number: int, replica: str | None, *, predicted: int = 0, cached: int = 0) -> TurnResult:
    return TurnResult(
        session_id="s0",
        number=number,
        start_s=float(number),
        total_s=0.5,
        ttft_s=0.25,
        num_prompt_tokens=100,
        num_cached_tokens=cached,
        replica=replica,
        predicted=Predicted(gpu=predicted),
    )


def test_moves_are_counted_turn_by_turn() -> None:
    """A turn elsewhere than the one before in its session; a session's first never."""
    turns = [turn(2, "r1"), turn(0, "r1"), turn(1, "r2"), turn(3, "r1"), turn(4, None)]

    assert num_moved(turns) == 2


def test_a_prediction_is_exact_or_not() -> None:
    """Predicted and reported cached tokens are compared where the router predicted."""
    found = run_of(draw(CELL, seed=1), "x", [turn(0, "r1"), turn(1, "r1", predicted=64, cached=32)])

    assert (found.num_predicted, found.num_exact) == (2, 1)
    assert found.num_computed_tokens == 168


def test_whole_sessions_stand_in_the_tables() -> None:
    """The longest wait; a session's mean and longest time, and the mean over the baseline's."""
    drawn = draw(CELL, seed=1)
    slow = [turn(number, "r1") for number in range(5)]
    quick = [turn(number, "r1") for number in range(3)]
    runs = [run_of(drawn, "session_hash", slow), run_of(drawn, "kv_aware", quick)]

    row = next(line for line in report(runs).splitlines() if "`kv_aware`" in line).split(" | ")

    assert row[6:10] == ["0.25", "2.50", "0.56", "2.50"]


def test_turns_and_tier_are_in_the_name_of_a_cell() -> None:
    """More turns are smaller ones: the contexts at the ends are about as long."""
    few, many = cells([1.7], ["short"], [False], ["small"], num_turns=10, tiers=[0.0, 4.0])
    longer = replace(few, num_turns=30)

    assert many.name == f"{few.name}, CPU tier of 4 caches"
    assert longer.name == f"{few.name}, 30 turns"
    ends = [
        max(each.num_input_tokens for each in draw(cell, seed=3).workload.turns)
        for cell in (few, longer)
    ]
    assert 0.7 < ends[1] / ends[0] < 1.8


def test_ratios_are_taken_seed_by_seed() -> None:
    """An arm without the baseline's seed is left out; the table has the spread."""
    runs = [run("session_hash", 1, 200), run("session_hash", 2, 100), run("kv_aware", 1, 100),
            run("kv_aware", 2, 150), run("kv_aware", 3, 999)]  # fmt: skip

    assert ratios(runs, "session_hash", lambda r: r.num_computed_tokens, "kv_aware") == [0.5, 1.5]
    assert "| 1.00 (0.50 to 1.50) |" in report(runs)


def test_real_and_simulated_stand_side_by_side() -> None:
    """Means of the seeds that both have, and the simulated over the real."""
    table = comparison([run("a", 1, 200), run("a", 2, 900)], [run("a", 1, 210, 0.5)])

    assert "| `a` | 200 | 210 | 1.05 | 1.00 | 0.50 | 0.50 |" in table
    assert "within 10% in 1 of 1 rows, 5% off" in table


def test_a_simulated_run_computes_no_less_than_the_ideal() -> None:
    """With room for all and one replica's worth of sessions, the hash computes the minimum."""
    drawn = draw(CELL, seed=3)

    found = simulated(drawn, "session_hash")

    assert found.num_turns == len(drawn.workload.turns)
    assert found.num_prompt_tokens == drawn.workload.num_input_tokens
    assert drawn.num_ideal_tokens <= found.num_computed_tokens < 1.2 * drawn.num_ideal_tokens


def test_the_command_simulates_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells, arms and seeds are chosen on the command line; every run is in the file."""
    path = tmp_path / "grid.json"

    code = main(
        ["--simulate", "--working-set", "0.3", "--think", "short", "--pool", "no", "--shared",
         "small", "--arms", "session_hash", "kv_aware:alpha=0", "--seeds", "1", "101",
         "--json", str(path)]
    )  # fmt: skip

    assert code == 0
    found = msgspec.json.decode(path.read_bytes(), type=GridFile)
    assert [(r.arm, r.seed, r.is_report) for r in found.runs] == [
        ("session_hash", 1, False), ("kv_aware:alpha=0", 1, False),
        ("session_hash", 101, True), ("kv_aware:alpha=0", 101, True),
    ]  # fmt: skip
    assert "`kv_aware:alpha=0`" in capsys.readouterr().out


def test_arms_are_policies_and_commands(tmp_path: Path) -> None:
    """Another router's command says where it listens and where the engines are."""
    command = "vllm-router --port {port} --worker-urls {url1} {url2}"

    arms = arms_of(["kv_aware:alpha=0"], [f"hash={command}"])

    ours, other = arms
    engines = [Engine(name, tmp_path, python=tmp_path / "python") for name in ("r1", "r2")]
    assert (ours.label, ours.is_ours) == ("kv_aware:alpha=0", True)
    assert other.command is not None
    assert other.command(7, 8, engines) == [
        *("vllm-router", "--port", "7"),
        *("--worker-urls", engines[0].url, engines[1].url),
    ]


def test_an_arm_has_its_queue() -> None:
    """As routers of its policy have it, unless its label says otherwise."""
    setup = setup_of(draw(CELL, seed=1))

    assert under("kv_aware:alpha=0", setup) == (
        KvAware(alpha=0.0),
        replace(setup, queue=QueueRules()),
    )
    assert under("kv_aware:queue.mode=off", setup) == (KvAware(), setup)
    assert under("session_hash", setup)[1] == setup
    assert under("kv_aware:queue.fill=2", setup)[1].queue == QueueRules(fill=2.0)
    with pytest.raises(ValueError, match=r"did you mean queue\.fill"):
        under("kv_aware:queue.filled=2", setup)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--arms", "kv_awar"], "kv_awar"),
        (["--arms", "kv_aware", "kv_aware"], "named twice"),
        (["--working-set", "0"], "must be above 0"),
        (["--router", "x=nothing to replace"], "not LABEL=COMMAND"),
        (["--router", "x={port} {url1}"], "cannot be simulated"),
        (["--read", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names what is wrong."""
    with pytest.raises(SystemExit):
        main(["--simulate", *flags])

    assert said in capsys.readouterr().err
