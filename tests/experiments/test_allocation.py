"""router.experiments.allocation: shares are met, and as few points move as must."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.experiments.allocation import NO_ARM, Layout
from router.experiments.definition import UNIT
from tests.policies.snapshots import quick

POINTS = range(0, UNIT, 997)


@st.composite
def share_vectors(draw: st.DrawFn, num_arms: int = 3) -> list[float]:
    """Draw shares of arms that sum to 0.9 at most."""
    weights = draw(st.lists(st.integers(0, 100), min_size=num_arms, max_size=num_arms))
    total = draw(st.integers(0, 900)) / 1000
    whole = sum(weights) or 1
    return [int(weight / whole * total * 1000) / 1000 for weight in weights]


@quick
@given(st.lists(share_vectors(), min_size=1, max_size=6))
def test_every_arm_has_its_share_and_the_holdout_stays(history: list[list[float]]) -> None:
    """After any history of shares, to the millionth."""
    layout = Layout(UNIT * 9 // 10)
    for shares in history:
        layout = layout.moved(shares)

        assert layout.counts(3) == [round(share * UNIT) for share in shares]
    assert all(layout.owner(point) == NO_ARM for point in range(UNIT * 9 // 10, UNIT, 997))


@quick
@given(share_vectors(), share_vectors())
def test_as_few_points_move_as_must(before: list[float], after: list[float]) -> None:
    """Exactly what arms (and the rest) lose changes hands."""
    first = Layout(UNIT * 9 // 10).moved(before)
    second = first.moved(after)
    cuts = sorted({*first._starts, *second._starts, first.size})
    moved = sum(
        end - start for start, end in pairwise(cuts) if first.owner(start) != second.owner(start)
    )
    has, wants = first.counts(3), second.counts(3)
    rest = first.size - sum(has), first.size - sum(wants)

    assert moved == sum(
        max(0, b - a) for b, a in zip((*has, rest[0]), (*wants, rest[1]), strict=True)
    )


def test_growing_arms_take_nothing_from_one_another() -> None:
    """A ramp from 1 % to half: who was in an arm stays in it."""
    small = Layout(UNIT).moved([0.01, 0.01])
    large = small.moved([0.2, 0.1]).moved([0.5, 0.5])

    for point in POINTS:
        if small.owner(point) != NO_ARM:
            assert large.owner(point) == small.owner(point)


@pytest.mark.parametrize(
    ("shares", "size", "arms"),
    [
        ([0.5, 0.5], UNIT, (0, 1)),
        ([0.333333, 0.333333, 0.333333], UNIT, (0, 1, 2)),  # equal parts of a line: one is left
        ([0.4, 0.0, 0.4], UNIT * 8 // 10, (0, 2)),  # all but the holdout
        ([1.0, 0.0], UNIT, (0,)),
        ([0.5, 0.499999], UNIT, ()),
        ([0.4, 0.4], UNIT, ()),
        ([0.0, 0.0], UNIT, ()),
    ],
)
def test_equal_arms_are_those_that_have_it_all(
    shares: list[float], size: int, arms: tuple[int, ...]
) -> None:
    """Whatever they had before; none where a part is left, or larger."""
    assert Layout(size).moved(shares).equals() == arms
    assert Layout(size).moved([0.1] * len(shares)).moved(shares).equals() == arms


def test_more_than_there_is_is_not_given() -> None:
    """Shares that others wrote into the store: no point has two owners."""
    layout = Layout(UNIT).moved([0.8, 0.8])

    assert layout.counts(2) == [800_000, 200_000]
