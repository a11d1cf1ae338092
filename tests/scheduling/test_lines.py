from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import CandidateId
from router.scheduling.lines import Lines
from router.scheduling.waiting import Group, Waiting, middle_ms, step_of

A, B = CandidateId("a"), CandidateId("b")
MAX_WAIT_S: Final = (30.0, 60.0)
NOW_S: Final = 100.0

_candidates = st.sampled_from([A, B, None])
_requests = st.lists(
    st.builds(
        Waiting,
        item=_candidates,
        session=st.sampled_from([None, 7]),  # 7: it lives where it wants to go
        num_tokens=st.just(1),
        since_s=st.floats(20.0, NOW_S),
        is_batch=st.booleans(),
        priority=st.integers(-1, 1),
        is_spent=st.booleans(),
        compute_ms=st.sampled_from([1.0, 30.0, 31.0, 1_000.0]),
    ),
    max_size=40,
)


def lines_of(requests: list[Waiting]) -> Lines:
    """Return lines in which these wait, in the order of their arrival."""
    lines = Lines(MAX_WAIT_S)
    for number, waiting in enumerate(sorted(requests, key=lambda each: each.since_s)):
        waiting.number = number
        step = step_of(waiting.compute_ms)
        waiting.group = Group(waiting.item, True, waiting.rank, step, waiting.session is not None)
        lines.add(waiting)
    lines.note_late(NOW_S)
    return lines


def is_late(waiting: Waiting) -> bool:
    return NOW_S - waiting.since_s >= MAX_WAIT_S[waiting.is_batch]


def place(waiting: Waiting) -> tuple[Any, ...]:
    if is_late(waiting):
        return False, waiting.number
    return True, waiting.rank, step_of(waiting.compute_ms), waiting.number


@given(requests=_requests, full=st.sets(_candidates))
def test_they_go_in_order_whatever_groups_they_stand_in(
    requests: list[Waiting], full: set[CandidateId | None]
) -> None:
    lines = lines_of(requests)
    for behind in (False, True):
        due = [
            waiting
            for waiting in sorted(requests, key=place)
            if (waiting.is_batch and not is_late(waiting)) == behind and waiting.item not in full
        ]
        assert list(lines.in_order(full, (), behind=behind)) == due


@given(requests=_requests, over=st.sets(st.tuples(st.integers(999, 3_002), st.booleans())))
def test_of_those_that_are_over_none_goes(
    requests: list[Waiting], over: set[tuple[int, bool]]
) -> None:
    over |= {each.group.alike for each in lines_of(requests).in_order((), (), behind=True)}
    went = list(lines_of(requests).in_order((), over, behind=False))
    assert went == [
        waiting
        for waiting in sorted(requests, key=place)
        if (not waiting.is_batch or is_late(waiting)) and waiting.group.alike not in over
    ]


@given(requests=_requests, data=st.data())
def test_the_order_holds_while_others_leave_and_move(
    requests: list[Waiting], data: st.DataObject
) -> None:
    lines = lines_of(requests)
    left, moved = set[int](), set[int]()
    went: list[Waiting] = []
    for waiting in lines.in_order((), (), behind=False):
        assert waiting.number in lines
        went.append(waiting)
        if data.draw(st.booleans()):
            lines.remove(waiting)
            left.add(waiting.number)
        other = data.draw(st.sampled_from(requests))
        if other.number in lines:
            step = data.draw(st.integers(0, 80))
            lines.put(other, other.group._replace(candidate=data.draw(_candidates), step=step))
            moved.add(other.number)
    stayed = [waiting for waiting in went if waiting.number not in moved]
    assert stayed == sorted(stayed, key=place)
    assert left.isdisjoint(waiting.number for waiting in lines.in_order((), (), behind=False))
    unmoved = {waiting.number for waiting in requests} - moved
    in_turn = {each.number for each in requests if not each.is_batch or is_late(each)}
    assert {waiting.number for waiting in went} >= unmoved & in_turn


@given(requests=_requests)
def test_the_end_of_a_line_has_all_of_it_in_front(requests: list[Waiting]) -> None:
    ends, lines_ms = lines_of(requests).ends((A, None, B))
    listed = list(ends)
    assert [ahead_ms for ahead_ms, _, _ in listed] == sorted(
        (ahead_ms for ahead_ms, _, _ in listed), reverse=True
    )
    for candidate in (A, B):
        there = [each for each in requests if each.item == candidate]
        took_ms = sum(middle_ms(each.group.step) for each in there)
        assert lines_ms.get(candidate, 0.0) == pytest.approx(took_ms)
        of_line = [(ahead_ms, name) for ahead_ms, which, name in listed if which == candidate]
        assert {name for _, name in of_line} == {each.group for each in there}
        if of_line:
            assert of_line[0][0] == pytest.approx(took_ms)


def test_late_ones_go_by_arrival_where_their_groups_differ() -> None:
    def one(since_s: float, *, is_batch: bool, compute_ms: float) -> Waiting:
        return Waiting(A, None, 1, since_s, is_batch, compute_ms=compute_ms)

    long = one(30.0, is_batch=False, compute_ms=5_000.0)
    batch = one(35.0, is_batch=True, compute_ms=50.0)
    short = one(40.0, is_batch=False, compute_ms=10.0)
    new = one(99.0, is_batch=False, compute_ms=1.0)
    lines = lines_of([long, batch, short, new])
    assert list(lines.in_order((), (), behind=False)) == [long, batch, short, new]
    num_interactive = lines.num_there(A, for_batch=False)
    assert [num_interactive, lines.num_there(A, for_batch=True) - num_interactive] == [3, 1]
