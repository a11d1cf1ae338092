from __future__ import annotations

from itertools import product
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from msgspec.structs import replace

from loadtest.agents import Session
from loadtest.results import TurnResult
from loadtest.simulator import simulate
from loadtest.studies.cliff import main, points_of, report, twice_the_peak
from loadtest.studies.cliff_map import draw_cliff, draw_goodput
from loadtest.studies.cliff_run import (
    NUM_EACH,
    RAMP_S,
    CliffRun,
    Setting,
    real_sessions,
    run_of,
    run_real,
    sessions,
    setup_of,
)
from loadtest.studies.grid_run import DEFAULT, WITHOUT_QUEUE
from loadtest.studies.pair import Pair
from policies import create

RUN = CliffRun(
    num_replicas=8,
    num_sessions=10,
    arm="kv_aware",
    seed=1,
    counted_s=10.0,
    num_turns=200,
    num_good=100,
    num_uncached_tokens=20_000,
    ttft_mean_s=0.5,
    ttft_p90_s=1.0,
    ttft_p99_s=2.0,
    longest_wait_s=3.0,
    completion_mean_s=20.0,
    completion_max_s=30.0,
)


def turn(session: str, number: int, start_s: float, ttft_s: float = 0.5) -> TurnResult:
    return TurnResult(
        session_id=session,
        number=number,
        start_s=start_s,
        total_s=ttft_s + 0.5,
        ttft_s=ttft_s,
        num_prompt_tokens=100,
        num_cached_tokens=40,
    )


def test_so_many_sessions_are_alive_all_the_time() -> None:
    """A session begins when another one is over, until the last one has begun."""
    drawn = sessions(3, seed=1)

    turns = simulate(drawn, create("kv_aware"), setup_of(1, 3, seed=1)).run.turns

    starts = sorted(turn.start_s for turn in turns if turn.number == 0)
    ends: dict[str, float] = {}
    for each in turns:
        ends[each.session_id] = max(ends.get(each.session_id, 0.0), each.start_s + each.total_s)
    assert len(starts) == 3 * NUM_EACH
    assert starts[3:] == pytest.approx(sorted(ends.values())[: len(starts) - 3])


def test_turns_count_while_all_sessions_are_alive() -> None:
    """A turn counts by its first token: not before it settled, not after the last one started."""
    turns = [
        turn("a", 0, 1.0),
        turn("a", 1, 7.0),
        turn("a", 2, 8.0, ttft_s=2.5),
        turn("b", 0, 20.0),
        turn("a", 3, 19.0, ttft_s=4.0),
    ]

    found = run_of(turns, 1, 1, "kv_aware", 1)

    assert (found.counted_s, found.num_turns, found.num_good) == (14.0, 2, 1)
    assert found.num_uncached_tokens == 120
    assert found.longest_wait_s == 4.0
    assert found.completion_mean_s == pytest.approx((22.5 + 1.0) / 2)


def test_twice_the_peak_is_found_arm_by_arm() -> None:
    """The next point at or above twice the sessions of the most goodput; else none."""
    runs = [
        replace(RUN, num_sessions=10),
        replace(RUN, num_sessions=20, num_good=50),
        replace(RUN, num_sessions=10, arm="session_hash", num_good=10),
        replace(RUN, num_sessions=20, arm="session_hash", num_good=20),
        replace(RUN, num_sessions=20, arm="session_hash", num_good=40, seed=2),
    ]
    points = points_of(runs)

    pair = twice_the_peak(points, "kv_aware")

    assert pair is not None
    assert [point.goodput for point in pair] == [10.0, 5.0]
    assert twice_the_peak(points, "session_hash") is None
    assert "| `kv_aware` | 10.0 at 10 | 5.0 at 20 | 50% |" in report(runs)
    assert "| 20 | `session_hash` | 3.0 | 20.0 | 100 |" in report(runs)


async def test_a_run_on_real_engines_is_a_point() -> None:
    """First tokens are held against the limit; a turn that failed does not count, and is shown."""
    late = turn("a", 1, 7.0, ttft_s=3.0)
    failed = replace(turn("b", 1, 8.0), error="reset", ttft_s=None)
    engines = create_autospec(Pair, instance=True)
    engines.run.return_value = [turn("a", 0, 0.0), late, failed, turn("b", 0, 20.0)]

    found = await run_real(engines, 4, "kv_aware", 1)
    patient = await run_real(engines, 4, "kv_aware", 1, Setting(slo_ttft_s=5.0))

    sent, num_alive = engines.run.await_args.args[0], engines.run.await_args.kwargs["num_alive"]
    assert (len(sent), num_alive) == (4 * NUM_EACH, 4)
    assert (found.num_replicas, found.num_errors, found.is_real) == (2, 1, True)
    assert (found.num_turns, found.num_good, patient.num_good) == (1, 0, 1)
    assert "| 4 | `kv_aware` (2 failed) |" in report([found, replace(found, seed=2)])
    engines.run.return_value = [failed]
    with pytest.raises(RuntimeError, match="every turn failed: reset"):
        await run_real(engines, 4, "kv_aware", 1)


def test_real_sessions_are_the_simulated_ones() -> None:
    """They have as many turns and wait as long; those that follow others start at once."""
    drawn, real = sessions(2, seed=1), real_sessions(2, seed=1)

    simulated = [
        [each.wait_s for each in drawn.turns if each.session_id == f"s{index}"]
        for index in range(2 * NUM_EACH)
    ]
    sent = list(map(waits_of, real))
    assert [each[1:] for each in sent] == [pytest.approx(each[1:]) for each in simulated]
    assert [each[0] for each in sent] == [0.0, RAMP_S / 2, 0.0, 0.0, 0.0, 0.0]


def waits_of(session: Session) -> list[float]:
    waits = []
    while (next_turn := session.next_turn()) is not None:
        waits.append(next_turn.wait_s)
        session.advance(None)
    return waits


def test_command_simulates_and_reads_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny run's table can be made again from its file."""
    file = tmp_path / "runs.json"
    words = ["--replicas", "1", "--sessions", "2", "4", "--arms", "session_hash", "kv_aware"]

    assert main([*words, "--seeds", "1", "--json", str(file)]) == 0

    table = capsys.readouterr().out
    assert table.count("`kv_aware`") >= 2
    assert main(["--read", str(file)]) == 0
    assert capsys.readouterr().out == table


@pytest.mark.parametrize(
    "words",
    [["--replicas", "0"], ["--sessions", "0"], ["--arms", "nonsense"], ["--read", "/nowhere"],
     ["--real", "--replicas", "8"], ["--slo-ttft", "0"]],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    """A command line that asks for nothing possible ends with a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2


def test_every_panel_names_its_lines() -> None:
    """The picture has a panel for each figure, and plain names; same points, same bytes."""
    pytest.importorskip("matplotlib")
    runs = [
        replace(RUN, num_sessions=num, arm=arm)
        for num, arm in product((10, 20, 40), ("session_hash", WITHOUT_QUEUE, DEFAULT))
    ]

    drawn = draw_cliff(points_of(runs), slo_ttft_s=2.0)

    assert drawn == draw_cliff(points_of(runs), slo_ttft_s=2.0)
    assert drawn.count(b'id="axes_') == 3
    for name in (b"warmroute", b"warmroute without the queue", b"session hash"):
        assert drawn.count(b"<!-- " + name + b" -->") == 3


def test_the_goodput_picture_says_when_a_turn_is_good() -> None:
    """The picture of the README has one panel, plain names and the limit in its title."""
    pytest.importorskip("matplotlib")
    points = points_of([replace(RUN, num_sessions=num) for num in (10, 20, 40)])

    drawn = draw_goodput(points, slo_ttft_s=3.0)

    assert drawn.count(b'id="axes_') == 1
    assert b"<!-- warmroute -->" in drawn
    assert b"within 3 s" in drawn
