"""Plans of faults: the same for the same seed, and never more at once than can be survived."""

from __future__ import annotations

import pytest

from loadtest.dev.chaos.plan import AT_ONCE, KINDS, plan


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
