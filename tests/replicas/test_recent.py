from __future__ import annotations

from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.bounded import RecentRate, RecentShare, RecentSum


def test_terms_fade() -> None:
    recent = RecentSum(10.0)
    assert recent.at(5.0) == 0.0
    recent.add(4.0, 0.0)
    recent.add(1.0, 10.0)

    assert recent.at(10.0) == pytest.approx(4.0 * exp(-1) + 1.0)
    assert recent.at(20.0) == pytest.approx(4.0 * exp(-2) + exp(-1))
    assert recent.at(0.0) == recent.at(10.0)


def test_share_rises_while_on_and_falls_while_off() -> None:
    recent = RecentShare(10.0)
    assert recent.at(99.0) == 0.0
    recent.switch(True, 100.0)
    recent.switch(True, 105.0)
    assert recent.at(110.0) == pytest.approx(1 - exp(-1))

    recent.switch(False, 110.0)
    assert recent.at(120.0) == pytest.approx((1 - exp(-1)) * exp(-1))
    assert recent.at(100.0) == recent.at(110.0)


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.booleans(), st.floats(-5.0, 100.0)), max_size=30))
def test_share_stays_a_share(steps: list[tuple[bool, float]]) -> None:
    recent, now_s = RecentShare(10.0), 0.0
    for is_on, pause_s in steps:
        now_s += pause_s
        recent.switch(is_on, now_s)
        assert 0.0 <= recent.at(now_s + 1.0) <= 1.0


def test_a_rate_settles_and_fades() -> None:
    recent = RecentRate(30.0, least_s=3.0)
    assert recent.at(1e9) == 0.0
    for second in range(1000, 1200):
        recent.add(float(second))
        if second > 1010:
            assert recent.at(second + 0.5) == pytest.approx(1.0, rel=0.15)
    assert recent.at(1300.0) < 0.1


@pytest.mark.parametrize(("least_s", "begun_s", "rate"), [(3.0, None, 1 / 3), (1e-3, 0.0, 1 / 10)])
def test_a_rate_of_one_event_is_moderate(
    least_s: float, begun_s: float | None, rate: float
) -> None:
    recent = RecentRate(30.0, least_s, begun_s=begun_s)
    recent.add(10.0)
    assert recent.at(10.001) == pytest.approx(rate, rel=0.2)
