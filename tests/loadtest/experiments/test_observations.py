"""loadtest.experiments.observations: which requests count, and for which unit."""

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
        by_arm[seen.arms.index(record.assignment.arm)] += record.ttft_ms + record.router_ms
    assert [sums[seen.unit_arm == i].sum() for i in (0, 1)] == pytest.approx(by_arm)
    assert counts.sum() == len(made)
    assert seen.num_units == len({r.assignment.unit for r in made if r.assignment})


def test_wash_out_does_not_count(tmp_path: Path) -> None:
    """The first moments of a slot are seen, not counted."""
    made = records(Scene(design="switchback", num_sessions=200))

    seen = observed(tmp_path, made)

    washed = sum(r.assignment is not None and r.assignment.not_counted == "wash_out" for r in made)
    assert washed > 0
    assert len(seen.requests) == len(made)
    assert np.count_nonzero(seen.counts) == len(made) - washed


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


def test_times_count_from_arrival(tmp_path: Path) -> None:
    """A client waits for its place in the queue, too."""
    made = records(Scene(num_sessions=30))
    waiting = [replace(record, waited_ms=500.0, total_ms=record.total_ms + 500) for record in made]

    seen, waited = (
        observed(tmp_path, each).sums("ttft")[0].sum() / len(made) for each in (made, waiting)
    )

    assert waited == pytest.approx(seen + 500.0)
