"""Whose turn it is to fail."""

from __future__ import annotations

import pytest

from loadtest.emulator.faults import Fault, Faults


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
