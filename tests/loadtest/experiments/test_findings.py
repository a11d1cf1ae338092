"""What limits a claim: each weakness of an experiment is named, and none that is not there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import scipy  # its `stats` is imported by the first test that asks for it
from msgspec.structs import replace

from loadtest.experiments.findings import RATIO_LEVEL, sample_ratio
from router.records.record import DecisionRecord
from tests.loadtest.experiments.samples import (
    CONTROL,
    START_S,
    TREATMENT,
    Scene,
    codes,
    observed,
    records,
    reported,
)

SLOTS = Scene(design="switchback", num_sessions=200, span_s=36_000.0, slot_s=300.0, wash_out_s=30.0)


@cache
def split() -> list[DecisionRecord]:
    """Make the records of a plain split."""
    return records(Scene(num_sessions=250))


@cache
def slots() -> list[DecisionRecord]:
    """Make the records of a sound switchback."""
    return records(SLOTS)


def text_of(report: object, code: str) -> str:
    return next(f.text for f in report.findings if f.code == code)  # type: ignore[attr-defined]


def test_a_split_on_shared_replicas_is_interference(tmp_path: Path) -> None:
    """The direction of the bias is said, and what to do instead."""
    report = reported(tmp_path, split())

    assert codes(report, "warning") == {"interference"}
    assert "bias towards no difference" in text_of(report, "interference")
    assert "use switchback" in text_of(report, "interference")


def test_a_sound_switchback_has_no_warning(tmp_path: Path) -> None:
    """Long slots with wash-out, enough of them: nothing to complain about."""
    report = reported(tmp_path, slots())

    assert codes(report, "warning") == set()
    assert codes(report, "note") >= {"wash_out", "sample_ratio"}


def test_slots_without_wash_out_or_too_short(tmp_path: Path) -> None:
    """Both make the variants look alike, and are said."""
    dry = reported(tmp_path, records(replace(SLOTS, wash_out_s=0.0)))
    short = reported(tmp_path, records(replace(SLOTS, slot_s=5.0, wash_out_s=1.0)))

    assert "no_wash_out" in codes(dry, "warning")
    assert "short_slots" in codes(short, "warning")


def test_few_slots_are_said(tmp_path: Path) -> None:
    """Twelve slots are few."""
    report = reported(tmp_path, records(replace(SLOTS, slot_s=1_000.0, num_sessions=40)))

    assert "few_units" in codes(report, "warning")


def test_routers_that_disagree_break_it(tmp_path: Path) -> None:
    """Sessions in several variants are not what the definition says."""

    def by_other_router(index: int, record: DecisionRecord) -> DecisionRecord:
        if index % 3 or record.assignment is None:
            return record
        return replace(record, assignment=replace(record.assignment, arm="control"))

    made = [by_other_router(index, record) for index, record in enumerate(split())]
    report = reported(tmp_path, made)

    assert "arms_disagree" in codes(report, "broken")
    assert "routers disagree" in text_of(report, "arms_disagree")


def test_missing_outcomes_break_it(tmp_path: Path) -> None:
    """A variant that loses a tenth of its first tokens is not compared by the rest."""
    arms = (CONTROL, replace(TREATMENT, missing_rate=0.1))

    report = reported(tmp_path, records(Scene(arms=arms)))

    assert codes(report, "broken") == {"missing_outcomes"}


def test_what_records_and_fleet_lack_is_said(tmp_path: Path) -> None:
    """Lost records, blind decisions, a replica that joined."""

    def worse(index: int, record: DecisionRecord) -> DecisionRecord:
        if index < len(split()) // 4:
            views = record.snapshot.replicas[:-1]
            if record.decision.candidate in {view.id for view in views}:
                record = replace(record, snapshot=replace(record.snapshot, replicas=views))
        return replace(record, state="blind" if index % 5 == 0 else "degraded")

    made = [worse(i, record) for i, record in enumerate(split()) if i % 20]
    report = reported(tmp_path, made)

    assert codes(report, "warning") >= {
        "lost_records",
        "blind_decisions",
        "degraded_decisions",
        "fleet_changed",
    }
    num_lost = len(split()) - len(made) - 1  # before the first that is there it is unknown
    assert f"about {num_lost} of " in text_of(report, "lost_records")


def test_clients_without_sessions_are_noticed(tmp_path: Path) -> None:
    """Sessions of one request each are probably none."""
    made = [r for r in split() if r.assignment is not None]
    alone = [
        replace(r, assignment=replace(r.assignment, unit=f"{i:016x}"))  # type: ignore[type-var]
        for i, r in enumerate(made)
    ]

    assert "no_sessions" in codes(reported(tmp_path, alone), "warning")


def test_other_definitions_of_the_name_are_left_out_and_named(tmp_path: Path) -> None:
    """The newest is reported on, unless another one is asked for."""
    made = [*records(Scene(trial="0a", num_sessions=40))]
    made += records(Scene(trial="0b", num_sessions=40, seed=2, start_s=START_S + 9_000))

    newest, oldest = reported(tmp_path, made), reported(tmp_path, made, trial="0a")

    assert newest.num_requests + oldest.num_requests == len(made)
    assert "this is trial 0b, from 2027-" in text_of(newest, "other_trials")
    assert "0a (from 2027-" in text_of(newest, "other_trials")
    assert "trials_overlap" not in codes(newest, "warning")


def test_definitions_at_the_same_time_are_a_warning(tmp_path: Path) -> None:
    """Routers read their files at different moments."""
    made = [*records(Scene(trial="0a", num_sessions=40))]
    made += records(Scene(trial="0b", num_sessions=40, seed=2, start_s=START_S + 100))

    assert "trials_overlap" in codes(reported(tmp_path, made), "warning")


def test_the_sample_ratio_is_pearsons_test(tmp_path: Path) -> None:
    thin = replace(TREATMENT, share=lambda at: 0.2)
    found = sample_ratio(observed(tmp_path, records(Scene(arms=(CONTROL, thin), num_turns=1))))

    total = sum(found.seen.values())
    expected = [total * 0.5 / 0.7, total * 0.2 / 0.7]
    assert list(found.expected.values()) == pytest.approx(expected)
    pearson = scipy.stats.chisquare(list(found.seen.values()), expected)
    assert found.p_value == pytest.approx(pearson.pvalue)
    assert found.p_value > RATIO_LEVEL
