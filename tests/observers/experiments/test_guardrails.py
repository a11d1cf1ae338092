"""The guardrails: what counts as one observation, and what stops a variant."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from router.config.experiments import Guardrails
from router.observers.experiments.guardrails import MAX_UNITS, Breach, ExperimentGuard, drawn_answer
from tests.observers.experiments.samples import arms, experiment


def guard(design: str = "split", **rules: float) -> ExperimentGuard:
    rules = {"min_samples": 5} | rules  # type: ignore[assignment]
    return ExperimentGuard(experiment(design=design, guardrails=Guardrails(**rules)))  # type: ignore[arg-type]


def units(seed: int = 0) -> Iterator[str]:
    """Draw sessions whose first turn is the one that counts."""
    dice = random.Random(seed)
    while True:
        unit = f"{dice.getrandbits(63):016x}"
        if drawn_answer(unit) == 1:
            yield unit


def test_errors_stop_an_arm() -> None:
    """Also the control arm; never before `min_samples`."""
    guarded = guard(max_error_rate=0.1, min_samples=10)
    verdicts = [guarded.ended("a", is_error=True) for _ in range(10)]

    assert verdicts[:9] == [None] * 9
    assert isinstance(verdicts[9], Breach)
    assert (verdicts[9].arm, verdicts[9].guardrail) == ("a", "errors")
    assert "100.0% of 10 requests failed; max_error_rate is 0.1" in verdicts[9].reason


def test_successes_stop_no_arm() -> None:
    """However many."""
    guarded = guard(max_error_rate=0.01)

    assert all(guarded.ended("b", is_error=number % 200 == 0) is None for number in range(2000))


def test_a_session_counts_once() -> None:
    """One turn of it, drawn beforehand: 50 slow turns of one conversation are one observation."""
    guarded = guard(max_ttft_s=1.0, ttft_quantile=0.9)
    unit = next(units())
    for _ in range(50):
        assert guarded.answered("b", unit, 9.0) is None

    (reading,) = [r for r in guarded.readings() if r.arm == "b"]
    assert (reading.guardrail, reading.num_samples) == ("ttft", 1)


def test_late_first_tokens_stop_an_arm() -> None:
    """More of its sessions than the quantile allows."""
    guarded, sessions = guard(max_ttft_s=1.0, ttft_quantile=0.9), units()
    verdicts = [guarded.answered("b", next(sessions), 2.0) for _ in range(10)]
    found = next(verdict for verdict in verdicts if verdict is not None)

    assert (found.arm, found.guardrail) == ("b", "ttft")
    assert "after 1 s; at most 10.0% may" in found.reason


def test_slower_than_the_control_arm_stops_a_treated_one() -> None:
    """Twice as slow, allowed is half more; the control arm is not held against itself."""
    guarded, sessions = guard(max_ttft_ratio=1.5), units()
    verdict = None
    for _ in range(40):
        assert guarded.answered("a", next(sessions), 1.0) is None
        verdict = verdict or guarded.answered("b", next(sessions), 2.0)

    assert verdict is not None
    assert (verdict.arm, verdict.guardrail) == ("b", "ttft_ratio")
    assert {reading.arm for reading in guarded.readings()} == {"b"}


@pytest.mark.parametrize("seed", range(5))
def test_alike_arms_are_not_stopped(seed: int) -> None:
    """Heavy tails, conversations that are slow throughout, every request looked at."""
    guarded, dice = guard(max_ttft_ratio=1.0, max_ttft_s=50.0, ttft_quantile=0.9), random.Random(7)
    dice.seed(seed)
    for _ in range(600):
        unit, arm = f"{dice.getrandbits(63):016x}", dice.choice("ab")
        pace_s = dice.lognormvariate(0.0, 1.5)
        for _ in range(dice.randint(1, 30)):
            assert guarded.answered(arm, unit, pace_s * dice.lognormvariate(0, 0.1)) is None


def test_slow_slots_stop_an_arm() -> None:
    """Each slot counts once, however many requests it has; the good variant stays."""
    guarded = guard("switchback", max_ttft_s=1.0, ttft_quantile=0.9, min_samples=3)
    found = []
    for slot in range(40):
        arm, value_s = ("b", 3.0) if slot % 2 else ("a", 0.1)
        found += [v for _ in range(9) if (v := guarded.answered(arm, str(slot), value_s))]

    assert {verdict.arm for verdict in found} == {"b"}


def test_several_arms_are_held_against_the_control() -> None:
    """Each for itself; who is named as control counts."""
    three = experiment(
        arms=arms(a=0.3, b=0.3, c=0.3),
        control="c",
        guardrails=Guardrails(max_ttft_ratio=1.2, min_samples=5),
    )
    guarded, sessions = ExperimentGuard(three), units()
    found = []
    for _ in range(30):
        for arm, value_s in (("a", 1.0), ("b", 5.0), ("c", 1.0)):
            found.append(guarded.answered(arm, next(sessions), value_s))

    assert {verdict.arm for verdict in found if verdict} == {"b"}


def test_without_rules_nothing_is_kept() -> None:
    """No evidence, no verdict, no memory of sessions."""
    guarded = guard()
    assert guarded.ended("a", is_error=True) is None
    assert guarded.answered("a", "00", 1.0) is None
    assert not list(guarded.readings())


def test_sessions_are_forgotten_when_there_are_too_many() -> None:
    """The least recent first."""
    guarded = guard(max_ttft_s=1.0)
    for number in range(MAX_UNITS + 10):
        guarded.answered("a", f"{number:x}", 0.1)

    assert len(guarded._answers) == MAX_UNITS
    assert "0" not in guarded._answers
