"""When an engine's date may change, by what it said its date was."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from router.tokens.engine_clock import EngineClock

NOON = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)


def test_an_unknown_zone_may_change_at_any_quarter() -> None:
    """One date leaves many time zones possible, so any quarter of an hour may be a midnight."""
    clock = EngineClock()

    clock.observe(NOON.date(), NOON)

    assert clock.next_midnight(NOON) == NOON + timedelta(minutes=15)


@pytest.mark.parametrize("offset_h", [-8, 0, 5.5, 13])
def test_a_day_shows_the_zone(offset_h: float) -> None:
    """Asked after each possible midnight for a day, only midnights near the true one are left."""
    offset, now = timedelta(hours=offset_h), NOON
    clock = EngineClock()
    for _ in range(200):
        clock.observe((now + offset).date(), now)
        midnight = clock.next_midnight(now)
        assert midnight is not None
        now = midnight + timedelta(seconds=5)
        if now > NOON + timedelta(days=1):
            break

    clock.observe((now + offset).date(), now)
    midnight = clock.next_midnight(now)

    assert midnight is not None
    local = midnight + offset
    assert (local.hour, local.minute) in [(23, 0), (23, 30), (0, 0), (0, 30), (1, 0)]


def test_no_midnight_is_missed() -> None:
    """The date is asked for again after every change of it, summer time included."""
    clock, now, offset = EngineClock(), NOON, timedelta(hours=1)
    for _ in range(400):
        clock.observe((now + offset).date(), now)
        midnight = clock.next_midnight(now)
        assert midnight is not None
        changed_at = now + timedelta(minutes=1)
        while (changed_at + offset).date() == (now + offset).date():
            changed_at += timedelta(minutes=15) - timedelta(minutes=changed_at.minute % 15)
        assert midnight <= changed_at
        now = midnight + timedelta(seconds=5)
        if now > NOON + timedelta(days=2):
            offset = timedelta(hours=2)


def test_a_date_of_no_zone_is_pinned() -> None:
    """An engine with VLLM_SYSTEM_START_DATE keeps its date."""
    clock = EngineClock()

    clock.observe(date(2025, 6, 28), NOON)

    assert clock.next_midnight(NOON) is None
