"""What limits a claim: each weakness of an experiment is named, and none that is not there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec.structs import replace

from router.records.record import DecisionRecord
from tests.loadtest.experiments.samples import (
    CONTROL,
    START_S,
    TREATMENT,
    Arm,
    Scene,
    codes,
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
    """Both make the arms look alike, and are said."""
    dry = reported(tmp_path, records(replace(SLOTS, wash_out_s=0.0)))
    short = reported(tmp_path, records(replace(SLOTS, slot_s=5.0, wash_out_s=1.0)))

    assert "no_wash_out" in codes(dry, "warning")
    assert "short_slots" in codes(short, "warning")


def test_few_slots_are_said(tmp_path: Path) -> None:
    """Twelve slots are few."""
    report = reported(tmp_path, records(replace(SLOTS, slot_s=1_000.0, num_sessions=40)))

    assert "few_units" in codes(report, "warning")


def test_routers_that_disagree_break_it(tmp_path: Path) -> None:
    """Sessions that go to and fro between arms mean two definitions."""

    def by_other_router(index: int, record: DecisionRecord) -> DecisionRecord:
        if index % 3 or record.assignment is None:
            return record
        return replace(record, assignment=replace(record.assignment, arm="control"))

    made = [by_other_router(index, record) for index, record in enumerate(split())]
    report = reported(tmp_path, made)

    assert "arms_disagree" in codes(report, "broken")
    assert "routers disagree" in text_of(report, "arms_disagree")


def test_missing_outcomes_break_it(tmp_path: Path) -> None:
    """An arm that loses a tenth of its first tokens is not compared by the rest."""
    arms = (CONTROL, replace(TREATMENT, missing_rate=0.1))

    report = reported(tmp_path, records(Scene(arms=arms)))

    assert codes(report, "broken") == {"missing_outcomes"}


def test_a_stopped_arm_and_a_ramp_are_said(tmp_path: Path) -> None:
    """Who stops when, and that shares changed, is in the report."""
    arms = (CONTROL, replace(TREATMENT, share=lambda at: (0.1, 0.5, 0.0)[int(3 * at)]))

    report = reported(tmp_path, records(Scene(arms=arms)))

    assert "treatment got no sessions of its own after" in text_of(report, "arm_stopped")


def test_why_an_arm_was_stopped_is_said(tmp_path: Path) -> None:
    """As the records of its traffic say, which others placed."""
    stopped_s = split()[len(split()) // 2].at

    def stop(record: DecisionRecord) -> DecisionRecord:
        assignment = record.assignment
        assert assignment is not None
        if assignment.arm == "control" or record.at < stopped_s:
            return record
        marked = replace(
            assignment, is_wash_out=True, not_counted="stopped", stop_reason="too slow by half"
        )
        return replace(record, assignment=marked)

    report = reported(tmp_path, [stop(record) for record in split()])

    assert "UTC: stopped (too slow by half). It is compared" in text_of(report, "arm_stopped")


def test_other_starts_of_the_name_are_left_out_and_named(tmp_path: Path) -> None:
    """The newest is reported on; asked for together they are one experiment."""
    made = [*records(Scene(trial="0a", num_sessions=40))]
    made += records(Scene(trial="0b", num_sessions=40, seed=2, start_s=START_S + 9_000))

    newest = reported(tmp_path, made)
    joined = reported(tmp_path, made, trials=("0a", "0b"))

    assert newest.num_requests < len(made) == joined.num_requests
    assert "this is trial 0b, from 2027-" in text_of(newest, "other_trials")
    assert "0a (from 2027-" in text_of(newest, "other_trials")
    assert "other_trials" not in codes(joined, "note")


def test_starts_at_the_same_time_are_a_warning(tmp_path: Path) -> None:
    """Two routers that do not know each other have ids of their own."""
    made = [*records(Scene(trial="0a", num_sessions=40))]
    made += records(Scene(trial="0b", num_sessions=40, seed=2, start_s=START_S + 100))

    report = reported(tmp_path, made)

    assert "trials_overlap" in codes(report, "warning")


def test_the_control_arm_of_the_definition_is_the_baseline(tmp_path: Path) -> None:
    """Whatever it is called, unless another one is asked for."""
    made = records(Scene(control="treatment", num_sessions=40))
    report = reported(tmp_path, made)

    assert report.baseline == "treatment"
    assert reported(tmp_path, made, baseline="control").baseline == "control"
    gone = records(Scene(control="gone", num_sessions=40))
    assert reported(tmp_path, gone).baseline == "control"


def test_what_records_and_fleet_lack_is_said(tmp_path: Path) -> None:
    """Lost records, blind decisions, several policies, a replica that joined."""

    def worse(index: int, record: DecisionRecord) -> DecisionRecord:
        if index < len(split()) // 4:
            views = record.snapshot.replicas[:-1]
            if record.decision.candidate in {view.id for view in views}:
                record = replace(record, snapshot=replace(record.snapshot, replicas=views))
        if index % 10 == 0:
            record = replace(record, policy="session_sticky", policy_params={})
        return replace(record, state="blind" if index % 5 == 0 else "degraded")

    made = [worse(i, record) for i, record in enumerate(split()) if i % 20]
    report = reported(tmp_path, made)

    assert codes(report, "warning") >= {
        "lost_records",
        "blind_decisions",
        "degraded_decisions",
        "several_policies",
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


def test_unknown_designs_are_said(tmp_path: Path) -> None:
    """A newer router's design is judged with care."""
    arms = (Arm(name="a"), Arm(name="b"))

    report = reported(tmp_path, records(Scene(design="interleaved", arms=arms, num_sessions=60)))

    assert "design" in codes(report, "warning")
