"""Whose turn it is to fail."""

from __future__ import annotations

import pytest

from loadtest.emulator.faults import Fault, Faults


def test_a_count_is_used_up() -> None:
    """Two refusals, then none."""
    faults = Faults(seed=0)
    faults.arm(Fault(kind="refuse", count=2))

    fired = [faults.next() for _ in range(3)]

    assert [fault is not None for fault in fired] == [True, True, False]
    assert faults.num_fired == 2
    assert faults.armed() == []


def test_the_first_armed_goes_first_and_without_count_for_good() -> None:
    """What is left of each is listed until it is cleared."""
    faults = Faults(seed=0)
    faults.arm(Fault(kind="hang", count=2))
    faults.arm(Fault(kind="status", status=418))

    kinds = [fault.kind for fault in (faults.next(), faults.next(), faults.next()) if fault]

    assert kinds == ["hang", "hang", "status"]
    assert faults.armed() == [Fault(kind="status", status=418)]
    faults.clear()
    assert faults.next() is None


def test_chance_is_repeatable() -> None:
    """Same seed, same requests fail, about as many as said."""

    def outcomes(seed: int) -> list[bool]:
        faults = Faults(seed)
        faults.arm(Fault(kind="die_before", probability=0.3))
        return [faults.next() is not None for _ in range(200)]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)
    assert 30 < sum(outcomes(1)) < 90


def test_faults_of_the_whole_replica_cannot_be_armed_for_requests() -> None:
    """A restart happens at once, not to a request."""
    with pytest.raises(ValueError, match="restart is not a fault of requests"):
        Faults(seed=0).arm(Fault(kind="restart"))
