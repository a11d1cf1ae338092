"""loadtest.statistics.power: what is still needed, and whether that is enough."""

from __future__ import annotations

import pytest

from loadtest.statistics.power import Needs, needs


def needed(se: float | None = 0.05, effect: float = 0.1, **changes: float) -> Needs:
    given = {"df": 500.0, "num_units": 1000, "span_s": 3600.0, **changes}
    return needs(
        se=se,
        alpha=0.05,
        scale=0.2,
        effect=effect,
        margin=0.05,
        **given,  # type: ignore[arg-type]
    )


def test_half_the_effect_needs_four_times_the_units() -> None:
    """As for every standard error, a little more for the looking."""
    large, small = needed(effect=0.2).to_find, needed(effect=0.1).to_find

    assert large is not None
    assert small is not None
    assert small.num_units / large.num_units == pytest.approx(4, rel=0.12)


def test_hours_follow_the_traffic() -> None:
    """Three times as many units take twice as long again."""
    found = needed().to_find

    assert found is not None
    assert found.more_s == pytest.approx(3600 * found.num_more_units / 1000)
    still = needed(span_s=0.0).to_find
    assert still is not None
    assert still.more_s is None


def test_what_is_needed_is_unknown_where_nothing_is_known() -> None:
    """Without a variance, or for practically nothing to find, there is no number."""
    assert needed(se=None) == Needs(to_find=None, to_equal=None)
    assert needed(effect=1e-6).to_find is None
