"""loadtest.experiments.observations: which requests count, for which unit, with which weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from router.config.experiments import Experiment, VariantConfig
from router.observers.experiments.assignment import Trial
from router.records.record import DecisionRecord
from tests.loadtest.experiments.samples import CONTROL, START_S, TREATMENT, Scene, observed, records


def test_every_request_has_its_unit_and_arm(tmp_path: Path) -> None:
    """Sums by unit are those of its records."""
    made = records(Scene(num_sessions=60))

    seen = observed(tmp_path, made)

    sums, counts = seen.sums("ttft")
    by_arm = [0.0, 0.0]
    for record in made:
        assert record.assignment is not None
        assert record.ttft_ms is not None
        by_arm[seen.arms.index(record.assignment.arm)] += record.ttft_ms / record.assignment.share
    assert [sums[seen.unit_arm == i].sum() for i in (0, 1)] == pytest.approx(by_arm)
    assert counts.sum() == pytest.approx(2 * len(made))  # each stands for 1 / 0.5
    assert seen.num_units == len({r.assignment.unit for r in made if r.assignment})
    assert np.all(np.diff(seen.unit_first_s) >= 0)


def test_wash_out_does_not_count(tmp_path: Path) -> None:
    """The first moments of a slot are seen, not counted."""
    made = records(Scene(design="switchback", num_sessions=200))

    seen = observed(tmp_path, made)

    washed = sum(r.assignment is not None and r.assignment.not_counted == "wash_out" for r in made)
    assert washed > 0
    assert len(seen.at_s) == len(made)
    assert np.count_nonzero(seen.counts) == len(made) - washed


def test_a_unit_counts_for_its_first_arm_until_it_leaves(tmp_path: Path) -> None:
    """A session that a ramp moved is kept until then; one that comes back is a disagreement."""
    made = records(Scene(num_sessions=60, num_turns=8))
    by_unit: dict[str, list[DecisionRecord]] = {}
    for record in made:
        assert record.assignment is not None
        by_unit.setdefault(record.assignment.unit, []).append(record)
    moved, torn = [unit for unit, own in by_unit.items() if len(own) >= 4][:2]

    def in_other(record: DecisionRecord) -> DecisionRecord:
        assignment = record.assignment
        assert assignment is not None
        other = "control" if assignment.arm == "treatment" else "treatment"
        return replace(record, assignment=replace(assignment, arm=other))

    changed = [in_other(r) for r in (*by_unit[moved][2:], by_unit[torn][1])]
    ids = {record.request_id: record for record in changed}
    num_left = len(by_unit[moved]) - 2 + len(by_unit[torn]) - 1

    seen = observed(tmp_path, [ids.get(record.request_id, record) for record in made])

    assert {(unit.unit, unit.is_back) for unit in seen.crossed} == {(moved, False), (torn, True)}
    assert seen.crossed[0].arms == ("control", "treatment")
    assert seen.crossed[0].files == (str(tmp_path / "r.jsonl"),)
    assert np.count_nonzero(seen.counts) == len(made) - num_left


def test_after_an_arm_was_stopped_nothing_is_compared(tmp_path: Path) -> None:
    """What the other arm did alone has no counterpart."""
    stopped = replace(TREATMENT, share=lambda at: 0.5 if at < 0.6 else 0.0)
    scene = Scene(arms=(CONTROL, stopped), num_sessions=300)

    seen = observed(tmp_path, records(scene))

    begin_s, end_s = seen.window("control", "treatment")
    assert begin_s == -np.inf
    assert START_S + 0.5 * scene.span_s < end_s < START_S + 0.61 * scene.span_s
    assert seen.window("control") == (-np.inf, np.inf)
    assert seen.at_s[seen.counted(seen.window())].max() < end_s + 10
    assert not np.isfinite(observed(tmp_path, records(Scene())).window()[1])


def test_routers_say_when_an_arm_was_stopped(tmp_path: Path) -> None:
    """What the control arm's policy placed for a stopped arm is marked, and ends the arm."""
    made = records(Scene(num_sessions=100))
    stopped_s = made[len(made) // 2].at

    def stop(record: DecisionRecord) -> DecisionRecord:
        assignment = record.assignment
        assert assignment is not None
        if assignment.arm == "control" or record.at < stopped_s:
            return record
        marked = replace(assignment, not_counted="stopped")
        return replace(record, assignment=marked)

    seen = observed(tmp_path, [stop(record) for record in made])

    assert abs(seen.window("treatment")[1] - stopped_s) < 120
    assert seen.window("control")[1] == np.inf


def test_balanced_pairs_of_slots_are_recognised(tmp_path: Path) -> None:
    """Only a schedule in which every pair has both arms is taken for one."""
    made = records(Scene(design="switchback", num_sessions=300))
    paired = []
    for record in made:
        assert record.assignment is not None
        assert record.assignment.slot is not None
        arm = ("control", "treatment")[record.assignment.slot % 2]
        paired.append(replace(record, assignment=replace(record.assignment, arm=arm)))

    assert observed(tmp_path, made).blocks() is None
    blocks = observed(tmp_path, paired).blocks()

    assert blocks is not None
    assert np.max(np.bincount(blocks)) == 2


@pytest.mark.parametrize(("shares", "is_paired"), [((0.5, 0.5), True), ((0.6, 0.4), False)])
def test_pairs_are_those_that_routers_draw(
    tmp_path: Path, shares: tuple[float, float], is_paired: bool
) -> None:
    """The schedule of equal arms is recognised from its records; that of others is none."""
    scene = Scene(design="switchback", num_sessions=300)
    variants = tuple(
        VariantConfig(name=name, policy="random", share=share)
        for name, share in zip(("control", "treatment"), shares, strict=True)
    )
    fields = {"design": "switchback", "slot_s": scene.slot_s, "variants": variants}
    trial = Trial(Experiment(name="trial", **fields), START_S)  # type: ignore[arg-type]

    def drawn(record: DecisionRecord) -> DecisionRecord:
        assert record.assignment is not None
        assert record.assignment.slot is not None
        arm = trial.variant_of_slot(record.assignment.slot)
        assert arm is not None
        return replace(record, assignment=replace(record.assignment, arm=arm))

    seen = observed(tmp_path, [drawn(record) for record in records(scene)])

    blocks = seen.blocks()
    assert (blocks is not None) == is_paired
    if blocks is not None:
        both = np.bincount(blocks) == 2
        arms_of = [set(seen.unit_arm[blocks == block]) for block in np.flatnonzero(both)]
        assert arms_of == [{0, 1}] * len(arms_of)
        assert len(arms_of) > 20


def test_what_was_not_measured_is_in_no_sum(tmp_path: Path) -> None:
    """Failures have no first token, no usage: they count in rates only."""
    failing = replace(TREATMENT, error_rate=0.3)

    made = records(Scene(arms=(CONTROL, failing), num_sessions=100))
    seen = observed(tmp_path, made)

    num_failed = sum(record.outcome != "ok" for record in made)
    assert num_failed > 0
    for name in ("ttft", "tbt", "computed", "cached"):
        assert np.count_nonzero(seen.denominators[name] > 0) == len(made) - num_failed
    assert np.count_nonzero(seen.numerators["errors"] > 0) == num_failed
    assert np.all(seen.denominators["errors"] == 1)
    tbt = seen.numerators["tbt"] / np.where(seen.denominators["tbt"] > 0, 40, np.nan)
    assert np.nanmax(np.abs(tbt - 10.0)) < 1e-6  # 400 ms for 40 further tokens
