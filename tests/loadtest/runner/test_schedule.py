"""Which turn is due when, in both loops; no clock, no network."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.runner.schedule import Schedule, make_schedule, time_scale
from loadtest.workload import Turn, TurnKey, Workload


def turn(session: str, number: int, arrival_s: float, *after: TurnKey, wait_s: float = 0.0) -> Turn:
    return Turn(
        session_id=session,
        number=number,
        arrival_s=arrival_s,
        num_input_tokens=10,
        num_output_tokens=1,
        hash_ids=(1,),
        after=after,
        wait_s=wait_s,
    )


def workload(*turns: Turn) -> Workload:
    return Workload(name="made up", block_size=16, turns=turns)


def opened(turns: tuple[Turn, ...], scale: float) -> Schedule:
    return make_schedule(workload(*turns), closed=False, scale_time=scale, concurrency=1)


def play(
    schedule: Schedule, duration_s: Callable[[int], float] = lambda index: 1.0
) -> dict[int, float]:
    """Send every turn exactly when it is due; return when each was sent."""
    sent: dict[int, float] = {}
    running: list[tuple[float, int]] = []
    while schedule.num_left or running:
        due_s = schedule.next_due()
        if due_s is not None and (not running or due_s <= running[0][0]):
            entry = schedule.take()
            sent[entry.index] = entry.due_s
            heapq.heappush(running, (entry.due_s + duration_s(entry.index), entry.index))
        else:
            assert running, "nothing is due and nothing is running: stuck"
            now_s, index = heapq.heappop(running)
            schedule.finish(index, now_s)
    return sent


def test_open_loop_keeps_arrivals_only() -> None:
    """Every turn is due at its scaled arrival, counted from the first; waits do not matter."""
    turns = (turn("a", 0, 5.0), turn("a", 1, 7.0, ("a", 0), wait_s=60.0), turn("b", 0, 7.0))

    assert play(opened(turns, 0.5)) == {0: 0.0, 1: 1.0, 2: 1.0}


def test_closed_loop_waits_for_turns_and_tools() -> None:
    """The next turn goes `wait_s`, scaled, after the last one it comes after."""
    turns = (turn("a", 0, 3.0), turn("a", 1, 4.0, ("a", 0), wait_s=10.0))

    assert play(Schedule(turns, 0.5, 1), lambda index: 7.0) == {0: 0.0, 1: 7.0 + 5.0}


def test_a_parent_goes_on_after_its_last_sub_agent() -> None:
    """Sub-agents start together after their parent's turn, beside it, whatever the concurrency."""
    turns = (
        turn("p", 0, 0.0),
        turn("p/1", 0, 1.0, ("p", 0)),
        turn("p/2", 0, 1.0, ("p", 0)),
        turn("q", 0, 1.0),
        turn("p", 1, 2.0, ("p/1", 0), ("p/2", 0), wait_s=1.0),
    )
    durations = {0: 1.0, 1: 2.0, 2: 5.0, 3: 1.0, 4: 1.0}

    sent = play(Schedule(turns, 1.0, 1), durations.__getitem__)

    assert sent == {0: 0.0, 1: 1.0, 2: 1.0, 4: 7.0, 3: 8.0}


def test_sessions_wait_for_a_place() -> None:
    """Two sessions at once: the third starts when one is over, but not before its arrival."""
    turns = (*(turn(name, 0, 0.0) for name in "abc"), turn("d", 0, 50.0))

    sent = play(Schedule(turns, 1.0, 2), lambda index: 3.0 + index)

    assert sent == {0: 0.0, 1: 0.0, 2: 3.0, 3: 50.0}


def test_a_turn_without_predecessors_keeps_its_arrival() -> None:
    """Later turns of a session that wait for nothing are sent at their arrival."""
    turns = (turn("a", 0, 0.0), turn("a", 1, 9.0))

    assert play(Schedule(turns, 1.0, 1)) == {0: 0.0, 1: 9.0}


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns of up to five sessions that come after any earlier ones."""
    count = draw(st.integers(min_value=1, max_value=14))
    turns: list[Turn] = []
    numbers: dict[str, int] = {}
    for index in range(count):
        session = draw(st.sampled_from("abcde"))
        number = numbers.get(session, 0)
        numbers[session] = number + 1
        keys = [earlier.key for earlier in turns]
        after = draw(st.lists(st.sampled_from(keys), max_size=3, unique=True)) if keys else []
        turns.append(turn(session, number, float(index), *after, wait_s=draw(st.floats(0, 3))))
    return tuple(turns)


@given(workloads(), st.integers(min_value=1, max_value=3), st.randoms())
def test_closed_loop_sends_all_in_order(turns: tuple[Turn, ...], places: int, rng: object) -> None:
    """Whatever waits for whatever: every turn is sent once, after those it comes after."""
    durations = [rng.uniform(0, 5) for _ in turns]  # type: ignore[attr-defined]

    sent = play(Schedule(turns, 1.0, places), durations.__getitem__)

    assert sorted(sent) == list(range(len(turns)))
    index_of = {turn.key: index for index, turn in enumerate(turns)}
    for index, each in enumerate(turns):
        for key in each.after:
            before = index_of[key]
            assert sent[index] >= sent[before] + durations[before] + each.wait_s


def test_upcoming_turns_are_known_ahead() -> None:
    """What is due next comes first; in a closed loop only what waits for no other turn is known."""
    turns = (turn("a", 0, 0.0), turn("a", 1, 1.0, ("a", 0)), turn("b", 0, 2.0), turn("c", 0, 3.0))

    assert list(opened(turns, 1.0).upcoming(3)) == [0, 1, 2]
    assert list(Schedule(turns, 1.0, 5).upcoming(3)) == [0, 2, 3]


def test_nothing_to_send() -> None:
    """An empty workload is over at once, in both loops."""
    assert play(opened((), 1.0)) == {}
    assert play(Schedule((), 1.0, 1)) == {}


def test_rates_become_scales() -> None:
    """Four turns over 6 s are 0.5 requests a second; twice the load halves the times."""
    four = workload(*(turn("a", i, 2.0 * i) for i in range(4)))

    assert time_scale(four, 1.0) == 0.5
    assert time_scale(four, None) == 1.0
    with pytest.raises(ValueError, match="all at once"):
        time_scale(workload(turn("a", 0, 0.0)), 1.0)
