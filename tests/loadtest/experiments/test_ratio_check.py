"""loadtest.experiments.ratio_check: every arm gets the units that it was meant to."""

from __future__ import annotations

from pathlib import Path

import pytest
import scipy  # its `stats` is imported by the first test that asks for it
from msgspec.structs import replace

from loadtest.experiments.ratio_check import check
from tests.loadtest.experiments.samples import CONTROL, TREATMENT, Scene, observed, records


def test_constant_shares_are_pearsons_test(tmp_path: Path) -> None:
    """With shares that never change it is the chi-square test of the text books."""
    thin = replace(TREATMENT, share=lambda at: 0.2)
    found = check(observed(tmp_path, records(Scene(arms=(CONTROL, thin), num_turns=1))))

    total = sum(found.seen.values())
    expected = [total * 0.5 / 0.7, total * 0.2 / 0.7]
    pearson = scipy.stats.chisquare(list(found.seen.values()), expected)
    assert list(found.expected.values()) == pytest.approx(expected)
    assert found.p_value == pytest.approx(pearson.pvalue)
    assert not found.is_broken


def test_a_ramp_is_no_mismatch(tmp_path: Path) -> None:
    """Expected numbers follow the shares of the time, not those of the end."""
    ramped = replace(TREATMENT, share=lambda at: 0.05 if at < 0.6 else 0.5)

    found = check(observed(tmp_path, records(Scene(arms=(CONTROL, ramped), num_sessions=800))))

    assert found.seen["treatment"] < 0.6 * found.seen["control"]
    assert found.p_value > 0.01
    assert not found.is_broken


def test_lost_sessions_are_found(tmp_path: Path) -> None:
    """A third of one variant's sessions missing is beyond chance."""
    made = records(Scene(num_sessions=900, num_turns=2))
    kept = [
        record
        for record in made
        if record.assignment is not None
        and (record.assignment.arm == "control" or int(record.assignment.unit, 16) % 3)
    ]

    found = check(observed(tmp_path, kept))

    assert found.is_broken
