"""Idle time is saved up and spent."""

from __future__ import annotations

import pytest

from router.replicas.idle_time import MAX_MS, IdleTime


def test_one_that_was_never_asked_has_all_that_can_be_saved() -> None:
    assert IdleTime().saved_ms(1e6) == MAX_MS


def test_idle_time_beyond_what_is_kept_is_saved() -> None:
    """Busy time takes off what it must leave idle: at work for 17 of 20 parts saves nothing."""
    idle = IdleTime()
    idle.spend(MAX_MS, 0.0)
    for tenth in range(5):
        idle.switch(False, 0.1 * tenth)
        idle.switch(True, 0.1 * tenth + 0.05)
    assert idle.saved_ms(0.5) == pytest.approx(250.0 - 75.0)

    idle = IdleTime()
    idle.spend(MAX_MS, 0.0)
    for tenth in range(1000):
        idle.switch(False, 0.1 * tenth)
        idle.switch(True, 0.1 * tenth + 0.085)

    assert idle.saved_ms(100.0) == pytest.approx(0.0, abs=1e-6)


def test_it_is_bounded_both_ways() -> None:
    """A long quiet time is worth no more than a short one, and a busy hour is soon forgotten."""
    idle = IdleTime()
    idle.switch(False, 0.0)
    assert idle.saved_ms(3_600.0) == -MAX_MS
    idle.switch(True, 3_600.0)
    assert idle.saved_ms(7_200.0) == MAX_MS


def test_a_dear_prompt_goes_when_all_is_saved_and_owes_the_rest() -> None:
    idle = IdleTime()
    idle.switch(True, 0.0)
    assert idle.can_spend(20_000.0, 0.0)
    idle.spend(20_000.0, 0.0)

    assert idle.saved_ms(0.0) == MAX_MS - 20_000.0
    assert not idle.can_spend(1.0, 10.0)
    idle.switch(False, 10.0)
    assert idle.saved_ms(20.0) == pytest.approx(MAX_MS - 11_500.0)  # busy time adds none
    idle.switch(True, 20.0)
    assert idle.can_spend(0.0, 40.0)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    idle = IdleTime()
    idle.switch(False, 5.0)
    assert idle.saved_ms(4.0) == MAX_MS
