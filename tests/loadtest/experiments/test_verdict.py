"""The whole report: what it finds in experiments of which the truth is known."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadtest.experiments import Options, RecordsError
from router.records.record import DecisionRecord
from tests.loadtest.experiments.samples import (
    CONTROL,
    TREATMENT,
    Arm,
    Scene,
    codes,
    records,
    reported,
)

FASTER = replace(TREATMENT, effect=0.7)
LARGE = 700


@cache
def even() -> list[DecisionRecord]:
    """Make the records of two arms that only their policies tell apart."""
    return records(Scene(num_sessions=LARGE))


@cache
def uneven() -> list[DecisionRecord]:
    """Make the records of a treatment that takes 0.7 times as long."""
    return records(Scene(arms=(CONTROL, FASTER), num_sessions=LARGE))


def test_a_known_effect_is_found(tmp_path: Path) -> None:
    """30 % faster is said to be so, with bounds around it."""
    report = reported(tmp_path, uneven())

    (verdict,), (comparison,) = report.verdicts, report.comparisons
    assert verdict.kind == "better"
    assert verdict.is_final
    assert verdict.text.startswith("treatment is faster by ")
    assert "than control (" in verdict.text
    found = comparison.difference
    assert found.low is not None
    assert found.high is not None
    assert found.low < -0.3 < found.high < 0
    assert report.is_sound
    assert [list(arm.policies) for arm in report.variants] == [["least_loaded"], ["kv_aware"]]


def test_the_other_way_round_it_is_worse(tmp_path: Path) -> None:
    """The control of the definition is what others are compared with."""
    made = records(Scene(arms=(CONTROL, FASTER), num_sessions=LARGE, control="treatment"))
    report = reported(tmp_path, made)

    assert report.verdicts[0].kind == "worse"
    assert "control is slower by " in report.verdicts[0].text


def test_no_difference_is_not_decided_at_first(tmp_path: Path) -> None:
    """Few sessions decide nothing, and what is needed is said."""
    report = reported(tmp_path, records(Scene(num_sessions=150)))

    (verdict,) = report.verdicts
    assert verdict.kind == "undecided"
    assert "Finding a difference of 10 % needs about " in verdict.text
    assert "more sessions (" in verdict.text
    needs = report.comparisons[0].needs
    assert needs.to_find is not None
    assert needs.to_find.num_units > 150


def test_arms_that_are_alike_are_called_equivalent(tmp_path: Path) -> None:
    """With enough sessions and a margin that matters, "no difference" is an answer."""
    report = reported(tmp_path, even(), Options(margin=0.25))

    assert report.verdicts[0].kind == "equal"
    assert report.verdicts[0].text.startswith("no difference larger than 25 %")


def test_too_few_units_say_nothing(tmp_path: Path) -> None:
    """Nine sessions are no experiment, whatever their numbers."""
    report = reported(tmp_path, records(Scene(num_sessions=9)))

    assert report.verdicts[0].text.startswith("not decided yet: too little is known")
    assert report.comparisons[0].difference.low is None
    assert "few_units" in codes(report, "warning")


def test_a_mismatch_breaks_the_verdict(tmp_path: Path) -> None:
    """Where one arm loses sessions, no difference is to be believed."""
    made = [
        record
        for record in uneven()
        if record.assignment is not None
        and (record.assignment.arm == "control" or int(record.assignment.unit, 16) % 3)
    ]

    report = reported(tmp_path, made)

    assert report.verdicts[0].kind == "broken"
    assert report.verdicts[0].text.startswith("broken: do not trust any difference")
    assert codes(report, "broken") == {"sample_ratio"}
    assert not report.is_sound


def test_a_switchback_is_judged_by_slots(tmp_path: Path) -> None:
    """Slots are the units, and the wash-out is left out."""
    scene = Scene(
        design="switchback", arms=(CONTROL, FASTER), num_sessions=LARGE, span_s=86_400.0,
        slot_s=600.0, wash_out_s=60.0,
    )  # fmt: skip

    report = reported(tmp_path, records(scene))

    assert report.verdicts[0].kind == "better"
    assert 120 <= report.num_units <= 145
    assert report.num_counted < report.num_requests
    assert "wash_out" in codes(report, "note")
    assert "interference" not in codes(report, "warning")


def test_every_metric_can_decide(tmp_path: Path) -> None:
    """Shares are compared by their difference, and more of a good one is better."""
    cached = reported(tmp_path, even(), Options(metric="cached"))
    computed = reported(tmp_path, even(), Options(metric="computed"))

    assert cached.verdicts[0].kind == "better"
    assert "higher by 2" in cached.verdicts[0].text
    assert "points" in cached.verdicts[0].text
    assert computed.verdicts[0].kind == "better"
    assert "treatment is lower by " in computed.verdicts[0].text


def test_several_arms_share_the_level(tmp_path: Path) -> None:
    """Three arms are two comparisons at half the level each."""
    third = Arm(name="third", policy="round_robin", share=lambda at: 1 / 3)
    arms = tuple(replace(arm, share=third.share) for arm in (CONTROL, TREATMENT, third))

    report = reported(tmp_path, records(Scene(arms=arms, num_sessions=150)))

    assert [comparison.alpha for comparison in report.comparisons] == [0.025, 0.025]
    assert [verdict.arm for verdict in report.verdicts] == ["third", "treatment"]
    assert "several_arms" in codes(report, "note")


def test_an_experiment_of_one_variant_is_refused(tmp_path: Path) -> None:
    made = records(Scene(num_sessions=40))
    alone = [r for r in made if r.assignment is not None and r.assignment.arm == "control"]

    with pytest.raises(RecordsError, match="all records are of one variant, control"):
        reported(tmp_path, alone)
