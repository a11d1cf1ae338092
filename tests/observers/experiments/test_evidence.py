"""The evidence: a bound that is kept is hardly ever refuted, a broken one soon."""

from __future__ import annotations

import random
from math import exp, log

import pytest

from router.observers.experiments.evidence import Evidence


def looks(bound: float, rate: float, seed: int, num: int) -> int | None:
    """Look after each of `num` draws; return when the evidence was enough at alpha 0.05."""
    dice, evidence = random.Random(seed), Evidence(bound)
    for number in range(1, num + 1):
        evidence.add(float(dice.random() < rate))
        if evidence.log_wealth >= log(20):
            return number
    return None


@pytest.mark.parametrize("bound", [0.02, 0.5])
def test_an_arm_at_its_bound_is_stopped_no_oftener_than_promised(bound: float) -> None:
    """Looked at after every observation: 400 arms exactly at the bound, alpha 0.05."""
    stopped = sum(looks(bound, bound, seed, 600) is not None for seed in range(400))

    assert stopped <= 32  # 20 expected at most; 32 has probability 0.6 % then


@pytest.mark.parametrize(("bound", "rate", "within"), [(0.02, 0.2, 80), (0.5, 0.95, 30)])
def test_a_broken_bound_is_found_soon(bound: float, rate: float, within: int) -> None:
    """In nearly all of 100 runs."""
    found = [looks(bound, rate, seed, within) for seed in range(100)]

    assert sum(number is not None for number in found) >= 95


@pytest.mark.parametrize("bound", [0.01, 0.3, 0.5, 0.95])
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.2, 0.7)])
def test_no_bet_gains_at_the_bound(bound: float, values: tuple[float, float]) -> None:
    """Whatever came before, the expected wealth after one more fair value is what it was."""
    low, high = values
    if not low <= bound <= high:
        return
    p = (bound - low) / (high - low)
    before = [1.0, 0.0, 0.0]
    wealth = []
    for last in (low, high, None):
        evidence = Evidence(bound)
        for value in (*before, *(() if last is None else (last,))):
            evidence.add(value)
        wealth.append(exp(evidence.log_wealth))

    assert (1 - p) * wealth[0] + p * wealth[1] == pytest.approx(wealth[2])


def test_it_counts_what_it_saw() -> None:
    """Number and mean; none before the first."""
    evidence = Evidence(0.5)
    assert evidence.mean is None
    evidence.add(1.0)
    evidence.add(0.0)

    assert (evidence.num, evidence.mean) == (2, 0.5)


@pytest.mark.parametrize("bound", [0.0, 1.0, -1.0, float("nan")])
def test_a_bound_that_cannot_be_broken_is_none(bound: float) -> None:
    """Nor one that is broken by anything."""
    with pytest.raises(ValueError, match="between 0 and 1"):
        Evidence(bound)
