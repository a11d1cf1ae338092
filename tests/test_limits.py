"""router.base.limits: token buckets."""

from __future__ import annotations

import pytest

from router.base.limits import Bucket


def test_a_bucket_fills_evenly_and_holds_a_minute() -> None:
    """Empty after a minute's worth; a sixtieth a second; never more than full."""
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)

    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 1.0) == 0.0
    assert bucket.level(1000.0) == 60.0


def test_more_than_a_minutes_worth_is_paid_back() -> None:
    """A full bucket lets it through; then nothing until the debt is gone."""
    bucket = Bucket(100, 0.0)

    assert bucket.wait_s(250, 0.0) == 0.0
    bucket.take(250, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(151 * 60 / 100)


def test_time_that_goes_back_fills_nothing() -> None:
    """And breaks nothing."""
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)

    assert bucket.level(50.0) == 0.0
    assert bucket.level(101.0) == pytest.approx(1.0)


def test_a_new_limit_leaves_used_what_is_used() -> None:
    """No fresh minute's worth at each change of the file."""
    bucket = Bucket(100, 0.0)
    bucket.take(90, 0.0)
    bucket.resize(50, 0.0)

    assert bucket.level(0.0) == -40.0
    bucket.resize(200, 0.0)
    assert bucket.level(0.0) == 110.0
