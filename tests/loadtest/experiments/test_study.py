"""The promises, on a small scale: false alarms stay rare however often one looks, effects are
found as often as was predicted. The table in docs/research/index.md is the same on a large one.
"""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from loadtest.experiments.drawn import Sessions, Slots
from loadtest.experiments.study import CASES, EFFECTS, Case, needed_units, rates, study

SPLIT = Case(label="split", design=Sessions(num_sessions=300), num_looks=20, num_repetitions=400)
SLOTS = Case(label="slots", design=Slots(num_slots=60), num_looks=20, num_repetitions=800)
PAIRS = replace(SLOTS, design=replace(SLOTS.design, is_balanced=True))


def bound(rate: float, num: int) -> float:
    """A rate that is exceeded by chance once in 1,000 times."""
    return rate + 3.1 * math.sqrt(rate * (1 - rate) / num)


@pytest.mark.parametrize("case", [SPLIT, SLOTS, PAIRS], ids=lambda case: case.label)
def test_an_a_a_experiment_comes_out_so(case: Case) -> None:
    """Looked at after every batch, the verdict errs as seldom as promised; others do not."""
    found = rates(case, 0.0)

    assert found.sequence <= bound(0.05, case.num_repetitions)
    assert found.covered >= 1 - bound(0.05, case.num_repetitions)
    assert found.peeking > 0.2
    assert found.naive > 0.5


@pytest.mark.parametrize("case", [SPLIT, PAIRS], ids=["split", "pairs"])
def test_a_known_effect_is_found_as_often_as_predicted(case: Case) -> None:
    """An experiment of the size that a pilot asked for finds the effect in 80 % of cases."""
    num_units = needed_units(case, 0.4)
    sized = replace(case.sized(num_units), num_repetitions=200)

    found = rates(sized, 0.4)

    assert found.sequence >= 0.8 - 3.1 * math.sqrt(0.8 * 0.2 / 200)
    assert found.covered >= 1 - bound(0.05, 200)


def test_the_table_has_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the documentation shows is laid out from the cases."""
    tiny = replace(SLOTS, num_repetitions=40, design=Slots(num_slots=24), num_looks=2)
    monkeypatch.setattr("loadtest.experiments.study.CASES", (tiny,))
    monkeypatch.setattr("loadtest.experiments.study.EFFECTS", ((tiny, 0.5, 40),))

    text = study(quick=True)

    assert text.count("\n| slots |") == 2
    assert len({case.label for case in CASES}) == len(CASES)
    assert all(case in CASES for case, _, _ in EFFECTS)
