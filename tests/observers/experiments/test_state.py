"""router.observers.experiments.state: two routers' knowledge becomes one, whichever way round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.messages import encode
from router.observers.experiments.state import SharesChange, State, Stopped, decode_state, merged
from tests.observers.experiments.samples import NOW_S, experiment, step
from tests.policies.snapshots import quick

TIMES = st.integers(0, 5).map(lambda number: NOW_S + number)
STOPPED = st.builds(Stopped, at_s=TIMES, reason=st.sampled_from(["slow", "wrong"]))
STATES = st.builds(
    State,
    id=st.sampled_from(["1", "2"]),
    definition=st.just(experiment()),
    started_s=TIMES,
    changes=st.lists(
        st.builds(SharesChange, at_s=TIMES, shares=st.just({"a": 0.1, "b": 0.2})), max_size=2
    ).map(lambda changes: tuple(sorted(set_of(changes), key=lambda change: change.at_s))),
    stopped=st.dictionaries(st.sampled_from(["a", "b"]), STOPPED),
    ended=st.none() | STOPPED,
    removed=st.booleans(),
)


def set_of(changes: list[SharesChange]) -> list[SharesChange]:
    return list({change.at_s: change for change in changes}.values())


@quick
@given(STATES, STATES, STATES)
def test_merging_is_the_same_in_any_order(one: State, two: State, three: State) -> None:
    """And twice is as once: routers end with the same, whatever came first."""
    if one.id == two.id == three.id:
        assert merged(merged(one, two), three) == merged(one, merged(two, three))
    assert merged(one, two) == merged(two, one) or one.started_s == two.started_s
    assert merged(one, one) == one
    assert merged(merged(one, two), two) == merged(one, two)


@quick
@given(STATES)
def test_a_state_survives_the_store(state: State) -> None:
    """As it was packed."""
    assert decode_state(encode(state)) == state


def test_a_stop_anywhere_is_a_stop_everywhere() -> None:
    """Also where the other router has ordered shares meanwhile."""
    start = State(id="1", definition=experiment(), started_s=NOW_S)
    ramped = State(
        id="1",
        definition=experiment(),
        started_s=NOW_S,
        changes=(SharesChange(at_s=NOW_S + 1, shares={"a": 0.1, "b": 0.9}),),
    )
    stopped = State(
        id="1",
        definition=experiment(),
        started_s=NOW_S,
        stopped={"b": Stopped(at_s=NOW_S + 2, reason="slow")},
    )
    both = merged(merged(start, ramped), stopped)

    assert both.changes == ramped.changes
    assert both.stopped == stopped.stopped


def test_an_order_ends_the_definitions_own_ramp() -> None:
    """Steps before it count, later ones do not."""
    ramp = (step(10, a=0.1, b=0.1), step(20, b=0.3), step(60, a=0.5, b=0.5))
    definition = experiment(ramp=ramp)
    state = State(id="1", definition=definition, started_s=NOW_S)
    ordered = State(
        id="1",
        definition=definition,
        started_s=NOW_S,
        changes=(SharesChange(at_s=NOW_S + 30, shares={"a": 0.0, "b": 0.2}),),
    )

    assert [(at_s - NOW_S, shares["a"], shares["b"]) for at_s, shares in state.timeline()] == [
        (0, 0.5, 0.5),
        (10, 0.1, 0.1),
        (20, 0.1, 0.3),
        (60, 0.5, 0.5),
    ]
    assert [at_s - NOW_S for at_s, _ in ordered.timeline()] == [0, 10, 20, 30]


@pytest.mark.parametrize("later", [0, 1])
def test_another_start_of_a_name_replaces_the_one_before(later: int) -> None:
    """With all that was stopped in it."""
    starts = [
        State(
            id="1",
            definition=experiment(),
            started_s=NOW_S + (1 - later),
            ended=Stopped(at_s=NOW_S, reason="slow"),
        ),
        State(id="2", definition=experiment(seed=1), started_s=NOW_S + later),
    ]

    assert merged(*starts) == starts[later]
