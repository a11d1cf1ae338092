"""Plans of faults: the same for the same seed, and never more at once than can be survived."""

from __future__ import annotations

import pytest

from loadtest.dev.chaos.plan import AT_ONCE, KINDS, plan


def test_a_seed_is_a_plan() -> None:
    """A failed run can be run again."""
    assert plan(7, 600.0, 2.0) == plan(7, 600.0, 2.0)
    assert plan(7, 600.0, 2.0) != plan(8, 600.0, 2.0)


def test_ten_minutes_have_every_kind() -> None:
    """Nothing on the list is never done."""
    assert {fault.kind for fault in plan(7, 600.0, 1.0)} == set(KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_two_replicas_are_always_left(seed: int) -> None:
    """Whatever is disturbed at one time, requests have somewhere to go."""
    faults = plan(seed, 300.0, 0.5)

    for fault in faults:
        under_way = [
            other
            for other in faults
            if other.kind.group == fault.kind.group
            and other.at_s <= fault.at_s <= other.at_s + other.duration_s
        ]
        assert len(under_way) <= AT_ONCE[fault.kind.group]


def test_a_plan_of_some_faults_has_no_others() -> None:
    """To look into one of them."""
    faults = plan(7, 60.0, 1.0, "strays")

    assert {fault.kind.name for fault in faults} == {"http gets strays"}
    assert all(fault.at_s + fault.duration_s <= 60.0 for fault in faults)


def test_one_router_lives_long() -> None:
    """Whether its memory grows can be seen."""
    faults = plan(7, 600.0, 1.0)

    late = [f for f in faults if f.kind.restarts and f.target == "b" and f.at_s > 200.0]
    assert not late
