"""The machine's own account of how busy it was."""

from __future__ import annotations

import pytest

from loadtest.compare.busy import Ticks, measure, parse_ticks


def test_proc_stat_is_read() -> None:
    """Guest times are part of user times already."""
    ticks = parse_ticks("cpu  100 10 50 800 20 5 5 10 40 0\ncpu0 1 2 3\n")

    assert ticks == Ticks(total=1000, idle=820, stolen=10)
    assert parse_ticks("intr 1 2 3") is None
    assert parse_ticks("") is None


def test_shares_are_of_the_time_between() -> None:
    """Busy, idle and stolen between two readings."""
    before = Ticks(total=1000, idle=800, stolen=10)

    busy = measure(before, Ticks(total=2000, idle=1000, stolen=60))

    assert busy is not None
    assert busy.busy_share == pytest.approx(0.8)
    assert busy.stolen_share == pytest.approx(0.05)
    assert measure(before, before) is None
    assert measure(None, before) is None
