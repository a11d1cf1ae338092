"""The tables of the policies page, on a workload of a few requests."""

from __future__ import annotations

from msgspec.structs import replace

from loadtest.studies.conversation import (
    LOADS,
    ROUTERS,
    SETUP,
    WEIGHTS,
    policies_report,
    routers_report,
)
from policies import POLICIES
from tests.loadtest.simulator.workloads import conversations

FEW = conversations(6, 2)
SMALL = replace(SETUP, num_replicas=2)


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_every_policy_and_weight_has_a_row() -> None:
    """One row per policy and per set of weights, one column per load."""
    text = policies_report(FEW, SMALL)

    assert "12 requests of `conversations`" in text
    assert len(rows_of(text)) == len(POLICIES) + len(WEIGHTS) + 4
    assert all(row.count("|") == len(LOADS) + 2 for row in rows_of(text))


def test_routers_that_do_not_share_load_do_worse() -> None:
    """A row for each number of routers and each delay; the figures differ between them."""
    rows = rows_of(routers_report(FEW, SMALL))

    assert len(rows) == len(ROUTERS) + 2
    assert len({row.split("|", 2)[2] for row in rows[2:]}) > 1
