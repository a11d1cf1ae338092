"""The order of arms lets drift cancel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.compare.order import make_order, mean_places

LABELS = st.lists(st.text("abcdef", min_size=1), min_size=2, max_size=6, unique=True)


@given(LABELS, st.integers(1, 4), st.integers())
def test_over_pairs_of_rounds_every_arm_has_the_same_mean_place(
    labels: list[str], num_pairs: int, seed: int
) -> None:
    """Whatever is drawn: a drift linear in time adds the same to every arm."""
    order = make_order(labels, 2 * num_pairs, seed)

    places = mean_places([label for row in order for label in row])

    assert len({round(place, 9) for place in places.values()}) == 1


@given(LABELS, st.integers(1, 7), st.integers())
def test_every_round_has_every_arm_once(labels: list[str], num_rounds: int, seed: int) -> None:
    """And the seed decides."""
    order = make_order(labels, num_rounds, seed)

    assert len(order) == num_rounds
    assert all(sorted(row) == sorted(labels) for row in order)
    assert order == make_order(labels, num_rounds, seed)
