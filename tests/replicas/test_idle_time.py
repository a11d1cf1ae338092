"""Idle time adds up until a prompt goes for it."""

from __future__ import annotations

import pytest

from router.replicas.ledger import BUSY_SHARE, MAX_MS, IdleTime


def test_an_unused_engine_has_the_most_idle_time() -> None:
    assert IdleTime().saved_ms(1e6) == MAX_MS


def test_idle_time_adds_up_and_of_busy_time_a_share() -> None:
    idle = IdleTime()
    idle.spend(MAX_MS, 0.0)
    for tenth in range(1000):
        idle.switch(False, 0.1 * tenth)
        idle.switch(True, 0.1 * tenth + 0.06)

    assert idle.saved_ms(100.0) == pytest.approx(40_000.0 + BUSY_SHARE * 60_000.0)


def test_a_long_idle_time_serves_one_prompt() -> None:
    idle = IdleTime()
    idle.switch(True, 0.0)
    assert idle.saved_ms(3_600.0) == 3_600_000.0 + MAX_MS
    idle.spend(20_000.0, 3_600.0)

    assert idle.saved_ms(3_600.0) == MAX_MS
    assert idle.saved_ms(3_601.0) == pytest.approx(MAX_MS + 1_000.0)


def test_idle_time_that_was_not_there_is_owed() -> None:
    idle = IdleTime()
    idle.switch(True, 0.0)
    idle.spend(MAX_MS + 500.0, 0.0)

    assert idle.saved_ms(0.5) == pytest.approx(0.0)


def test_a_clock_that_stands_still_or_steps_back_changes_nothing() -> None:
    idle = IdleTime()
    idle.switch(True, 5.0)
    assert idle.saved_ms(4.0) == MAX_MS
    idle.switch(False, 4.0)
    assert idle.saved_ms(3.0) == MAX_MS
    assert idle.saved_ms(9.0) == MAX_MS + BUSY_SHARE * 5_000.0
