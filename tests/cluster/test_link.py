"""What is said of Redis: once for each change, whatever is tried again."""

from __future__ import annotations

import pytest

from router.base.errors import StoreRefused, StoreUnavailable
from router.cluster.link import Link

GONE = StoreUnavailable("no server there")
REFUSED = StoreRefused("wrong password")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "router.cluster.link"]


def test_a_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often it comes, also by turns with another one."""
    link = Link()
    for error in (GONE, GONE, REFUSED, GONE, REFUSED):
        link.went_down(error)

    assert said(caplog) == [
        "redis is unreachable: this router shares nothing",
        "redis refused: this router shares nothing",
    ]
    assert (link.is_up, link.reason, link.num_outages) == (False, "wrong password", 0)
    assert link.settled.is_set()


def test_up_is_said_at_once_at_first(caplog: pytest.LogCaptureFixture) -> None:
    """And the next outage is news again."""
    caplog.set_level("INFO")
    link = Link()
    link.came_up()
    link.steady()
    assert (link.is_up, link.reason) == (True, "")
    link.went_down("gone")
    link.came_up()
    link.steady()
    link.went_down("gone")

    assert [line.partition(":")[0] for line in said(caplog)] == [
        "redis is connected",
        "redis is unreachable",
        "redis is connected",
        "redis is unreachable",
    ]
    assert link.num_outages == 2


def test_what_fails_whenever_it_is_up_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Up and down by turns, with one reason: the log ends with that it is down."""
    caplog.set_level("INFO")
    link = Link()
    for _ in range(5):
        link.came_up()
        link.went_down(GONE)

    assert [line.partition(":")[0] for line in said(caplog)] == [
        "redis is connected",
        "redis is unreachable",
    ]
    assert link.num_outages == 5
