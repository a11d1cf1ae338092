"""router.experiments.guardrails: what counts as one observation, and what stops an arm."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from router.experiments.definition import Guardrails
from router.experiments.guardrails import MAX_UNITS, Guard, Verdict, drawn_turn
from tests.experiments.samples import arms, experiment


def guard(design: str = "split", **rules: float) -> Guard:
    rules = {"min_samples": 5} | rules  # type: ignore[assignment]
    return Guard(experiment(design=design, guardrails=Guardrails(**rules)))  # type: ignore[arg-type]


def units(seed: int = 0) -> Iterator[str]:
    """Draw sessions whose first turn is the one that counts."""
    dice = random.Random(seed)
    while True:
        unit = f"{dice.getrandbits(63):016x}"
        if drawn_turn(unit) == 1:
            yield unit


def test_errors_stop_an_arm() -> None:
    """Also the control arm; never before `min_samples`."""
    guarded = guard(max_error_rate=0.1, min_samples=10)
    verdicts = [guarded.ended("a", is_error=True) for _ in range(10)]

    assert verdicts[:9] == [None] * 9
    assert isinstance(verdicts[9], Verdict)
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
        assert guarded.answered("b", unit, None, 9.0) is None

    (reading,) = [r for r in guarded.readings() if r.arm == "b"]
    assert (reading.guardrail, reading.num_samples) == ("ttft", 1)


def test_late_first_tokens_stop_an_arm() -> None:
    """More of its sessions than the quantile allows."""
    guarded, sessions = guard(max_ttft_s=1.0, ttft_quantile=0.9), units()
    verdicts = [guarded.answered("b", next(sessions), None, 2.0) for _ in range(10)]
    found = next(verdict for verdict in verdicts if verdict is not None)

    assert (found.arm, found.guardrail) == ("b", "ttft")
    assert "after 1 s; at most 10.0% may" in found.reason


def test_slower_than_the_control_arm_stops_a_treated_one() -> None:
    """Twice as slow, allowed is half more; the control arm is not held against itself."""
    guarded, sessions = guard(max_ttft_ratio=1.5), units()
    verdict = None
    for _ in range(40):
        assert guarded.answered("a", next(sessions), None, 1.0) is None
        verdict = verdict or guarded.answered("b", next(sessions), None, 2.0)

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
            assert guarded.answered(arm, unit, None, pace_s * dice.lognormvariate(0, 0.1)) is None


def test_a_slot_is_one_observation() -> None:
    """Its share of late ones, its mean; taken when the slot after the next one begins."""
    guarded = guard("switchback", max_ttft_s=1.0, max_ttft_ratio=1.5, min_samples=3)
    for slot in range(4):
        arm, value_s = ("b", 3.0) if slot % 2 else ("a", 0.1)
        for _ in range(100):
            assert guarded.answered(arm, str(slot), slot, value_s) is None
    readings = {(r.arm, r.guardrail): r.num_samples for r in guarded.readings()}

    assert readings == {("a", "ttft"): 1, ("b", "ttft"): 1, ("b", "ttft_ratio"): 1}


def test_what_comes_late_counts_all_the_same() -> None:
    """A slot is open for one more slot; later ones go to the newest slot of the arm."""
    guarded = guard("switchback", max_ttft_s=1.0, ttft_quantile=0.5, min_samples=1)
    for slot, arm, value_s in ((0, "b", 0.1), (1, "a", 0.1), (0, "b", 9.0), (2, "a", 0.1)):
        guarded.answered(arm, str(slot), slot, value_s)
    means = {r.arm: r.mean for r in guarded.readings()}
    assert means == {"a": None, "b": 0.5}

    for slot, arm, value_s in ((3, "b", 0.1), (0, "b", 9.0), (5, "a", 0.1)):
        guarded.answered(arm, str(slot), slot, value_s)
    assert {r.arm: r.num_samples for r in guarded.readings()} == {"a": 2, "b": 2}
    assert {r.arm: r.mean for r in guarded.readings()} == {"a": 0.0, "b": 0.5}


def test_a_late_one_without_an_open_slot_is_left_out() -> None:
    """There is nothing to count it in."""
    guarded = guard("switchback", max_ttft_s=1.0)
    for slot, arm in ((0, "b"), (5, "a"), (0, "b")):
        guarded.answered(arm, str(slot), slot, 9.0)

    assert {r.arm: r.num_samples for r in guarded.readings()} == {"a": 0, "b": 1}


def test_slow_slots_stop_an_arm() -> None:
    """After a few; the good arm stays."""
    guarded = guard("switchback", max_ttft_s=1.0, ttft_quantile=0.9, min_samples=3)
    found = []
    for slot in range(12):
        arm, value_s = ("b", 3.0) if slot % 2 else ("a", 0.1)
        found += [v for _ in range(5) if (v := guarded.answered(arm, str(slot), slot, value_s))]

    assert {verdict.arm for verdict in found} == {"b"}


def test_several_arms_are_held_against_the_control() -> None:
    """Each for itself; who is named as control counts."""
    three = experiment(
        arms=arms(a=0.3, b=0.3, c=0.3),
        control="c",
        guardrails=Guardrails(max_ttft_ratio=1.2, min_samples=5),
    )
    guarded, sessions = Guard(three), units()
    found = []
    for _ in range(30):
        for arm, value_s in (("a", 1.0), ("b", 5.0), ("c", 1.0)):
            found.append(guarded.answered(arm, next(sessions), None, value_s))

    assert {verdict.arm for verdict in found if verdict} == {"b"}


def test_without_rules_nothing_is_kept() -> None:
    """No evidence, no verdict, no memory of sessions."""
    guarded = guard()
    assert guarded.is_idle
    assert guarded.ended("a", is_error=True) is None
    assert guarded.answered("a", "00", None, 1.0) is None
    assert not list(guarded.readings())
    assert not guarded._turns


def test_the_turn_that_counts_is_mostly_an_early_one() -> None:
    """The first for half of the sessions, none beyond the eighth."""
    turns = [drawn_turn(f"{number:016x}") for number in range(4000)]

    assert 0.45 < turns.count(1) / 4000 < 0.55
    assert max(turns) == 8


def test_sessions_are_forgotten_when_there_are_too_many() -> None:
    """The least recent first."""
    guarded = guard(max_ttft_s=1.0)
    for number in range(MAX_UNITS + 10):
        guarded.answered("a", f"{number:x}", None, 0.1)
    assert guarded._turns is not None

    assert len(guarded._turns) == MAX_UNITS
    assert "0" not in guarded._turns


def test_a_switchback_without_a_slot_has_no_evidence() -> None:
    """Whatever was assigned before the design was another."""
    assert guard("switchback", max_ttft_s=1.0).answered("a", "1", None, 9.0) is None
