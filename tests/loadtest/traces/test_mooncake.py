"""Mooncake lines: sessions derived and named, whole prompts and deltas, and a round trip."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.timing import Timing, service_s
from loadtest.traces import read_workload, write_trace
from loadtest.workload import Turn, TurnKey, Workload
from tests.effort import examples
from tests.loadtest.traces.samples import mooncake, write


def test_turns_of_a_derived_session_follow_one_another(tmp_path: Path) -> None:
    """A turn waits for the gap less the estimated time of the one before; never less than 0."""
    lines = [
        mooncake(1000, 1000, [1, 2]),
        mooncake(1000, 600, [8, 9]),
        mooncake(61_000, 1500, [1, 3, 4], output_length=400),
        mooncake(61_500, 1600, [1, 3, 5, 6]),
    ]
    workload = read_workload(write(tmp_path / "t.jsonl", lines))

    assert [turn.key for turn in workload.turns] == [("s0", 0), ("s1", 0), ("s0", 1), ("s0", 2)]
    assert [turn.arrival_s for turn in workload.turns] == [0.0, 0.0, 60.0, 60.5]
    assert [turn.after for turn in workload.turns] == [(), (), (("s0", 0),), (("s0", 1),)]
    assert workload.turns[2].wait_s == pytest.approx(60.0 - service_s(1000, 40))
    assert workload.turns[3].wait_s == 0.0
    assert (workload.name, workload.block_size, workload.num_skipped) == ("t.jsonl", 512, 0)


def test_delay_is_what_a_turn_waits(tmp_path: Path) -> None:
    """Milliseconds after the end of the turn before; without a timestamp it arrives then."""
    lines = [
        mooncake(500, 512, [1], session_id="a"),
        {"session_id": "a", "input_length": 1024, "output_length": 1, "hash_ids": [1, 2],
         "delay": 2500.0},
    ]  # fmt: skip
    first, second = read_workload(write(tmp_path / "t.jsonl", lines)).turns

    assert (second.key, second.after, second.wait_s) == (("a", 1), (("a", 0),), 2.5)
    assert second.arrival_s == first.arrival_s + service_s(512, 40) + 2.5


def test_files_of_named_sessions_need_no_global_order(tmp_path: Path) -> None:
    """One session after the other, each in its own order, as generators write them."""
    lines = [
        mooncake(0, 100, [1], session_id=7),
        mooncake(9000, 200, [1], session_id=7),
        mooncake(4000, 100, [2], session_id=8),
    ]
    workload = read_workload(write(tmp_path / "t.jsonl", lines))

    assert [turn.key for turn in workload.turns] == [("7", 0), ("8", 0), ("7", 1)]


def test_deltas_are_put_together(tmp_path: Path) -> None:
    """AIPerf's follow-ups hold what was added: reply and new blocks go behind the prompt."""
    lines = [
        mooncake(0.0, 1100, [0, 1, 900], session_id="a", group_id=4),
        {"session_id": "a", "input_length": 600, "output_length": 10, "hash_ids": [901, 902],
         "delay": 100.0},
        {"session_id": "a", "input_length": 308, "output_length": 10, "hash_ids": [903],
         "delay": 100.0},
        mooncake(0.0, 1024, [0, 1], session_id="b"),
    ]  # fmt: skip
    turns = {turn.key: turn for turn in read_workload(write(tmp_path / "t.jsonl", lines)).turns}

    second, third = turns["a", 1], turns["a", 2]
    assert second.num_input_tokens == 1100 + 40 + 600
    assert third.num_input_tokens == second.num_input_tokens + 10 + 308
    assert second.hash_ids[:2] == turns["b", 0].hash_ids == (0, 1)
    assert len(second.hash_ids) == 4
    assert 900 not in second.hash_ids  # was partial, has become another block
    assert third.hash_ids[:3] == second.hash_ids[:3]
    assert len(set(second.hash_ids + third.hash_ids)) == 4 + 2


@pytest.mark.parametrize(
    ("mode", "num_tokens"),
    [
        ("message_array_with_responses", 600),
        ("deltas_with_responses", 1112),
        ("deltas_without_responses", 1152),
    ],
)
def test_a_file_may_say_what_its_lines_hold(tmp_path: Path, mode: str, num_tokens: int) -> None:
    """Its word counts, not what its blocks look like."""
    lines = [
        mooncake(n, length, ids, session_id="a", context_mode=mode)
        for n, (length, ids) in enumerate([(512, [1]), (600, [2, 3])])
    ]
    workload = read_workload(write(tmp_path / "t.jsonl", lines))

    assert workload.turns[1].num_input_tokens == num_tokens


def test_named_sessions_that_begin_alike_are_whole(tmp_path: Path) -> None:
    """A follow-up that begins with its session's first block is a prompt, not a delta."""
    lines = [mooncake(n, 1024, [1, n + 5], session_id="a") for n in range(3)]
    workload = read_workload(write(tmp_path / "t.jsonl", lines))

    assert [turn.hash_ids for turn in workload.turns] == [(1, 5), (1, 6), (1, 7)]


def test_spread_requests_keep_the_order_of_named_sessions(tmp_path: Path) -> None:
    """Of sessions that the file names, no turn overtakes the one before it."""
    lines = [mooncake(3000 * (n // 8), 512, [n % 2], session_id=str(n % 2)) for n in range(40)]
    path = write(tmp_path / "t.jsonl", lines)

    workload = read_workload(path, timing=Timing(spread_s=3.0, seed=2))

    for name in ("0", "1"):
        numbers = [turn.number for turn in workload.turns if turn.session_id == name]
        assert numbers == list(range(20))
    arrivals = [turn.arrival_s for turn in workload.turns]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) > 8


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw sessions, some of which start from, and are waited for by, others."""
    block_size = draw(st.sampled_from([1, 16, 512]))
    keys: list[TurnKey] = []
    turns: list[Turn] = []
    numbers: dict[str, int] = {}
    arrival_ms = 0
    for _ in range(draw(st.integers(1, 12))):
        session_id = draw(st.sampled_from(["a", "b", "ü 1"]))
        number = numbers.get(session_id, 0)
        numbers[session_id] = number + 1
        num_tokens = draw(st.integers(1, 4 * block_size))
        after = draw(st.lists(st.sampled_from(keys), max_size=2, unique=True)) if keys else []
        size = -(-num_tokens // block_size)
        turn = Turn(
            session_id=session_id,
            number=number,
            arrival_s=arrival_ms / 1000.0,
            num_input_tokens=num_tokens,
            num_output_tokens=draw(st.integers(1, 1000)),
            hash_ids=tuple(draw(st.lists(st.integers(0, 2**64 - 1), min_size=size, max_size=size))),
            after=tuple(after),
            wait_s=draw(st.integers(0, 10**6)) / 1000.0 if after else 0.0,
        )
        arrival_ms += draw(st.integers(0, 10**6))
        keys.append(turn.key)
        turns.append(turn)
    return Workload(name="t.jsonl", block_size=block_size, turns=tuple(turns))


@settings(max_examples=examples(60))
@given(workloads())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, made: Workload) -> None:
    """Any workload comes back as it was, to the microsecond: sessions, order, waits, blocks."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"

    write_trace(made, path)
    read = read_workload(path)

    assert read.block_size == made.block_size
    for mine, theirs in zip(made.turns, read.turns, strict=True):
        assert theirs.arrival_s == pytest.approx(mine.arrival_s, abs=1e-6)
        assert theirs.wait_s == pytest.approx(mine.wait_s, abs=1e-6)
        same = {"arrival_s": 0.0, "wait_s": 0.0}
        assert msgspec.structs.replace(mine, **same) == msgspec.structs.replace(theirs, **same)
