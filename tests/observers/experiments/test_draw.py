"""Layouts meet the shares, and a share that grows moves no session to another variant."""

from __future__ import annotations

from collections import Counter

import pytest

from router.config.experiments import UNIT
from router.observers.experiments.draw import ArmLayout

POINTS = range(0, UNIT, 97)


def owners(layout: ArmLayout) -> list[int | None]:
    return [layout.owner(point) for point in POINTS]


@pytest.mark.parametrize(
    ("shares", "holdout"),
    [([0.5, 0.5], 0.0), ([0.1, 0.85], 0.05), ([0.0, 0.0, 0.9], 0.1), ([0.3, 0.01, 0.5], 0.0)],
)
def test_every_variant_gets_its_share(shares: list[float], holdout: float) -> None:
    found = Counter(owners(ArmLayout(shares, holdout)))

    for variant, share in enumerate(shares):
        assert found[variant] / len(POINTS) == pytest.approx(share, abs=0.001)
    assert found[None] / len(POINTS) == pytest.approx(1 - sum(shares), abs=0.001)


def test_growing_shares_move_nothing_between_variants() -> None:
    """Up to equal shares, also with a variant that keeps its share."""
    steps = [[0.01, 0.01, 0.0], [0.1, 0.01, 0.3], [0.3, 0.33, 0.33]]
    before = owners(ArmLayout(steps[0], 0.01))
    for shares in steps[1:]:
        now = owners(ArmLayout(shares, 0.01))
        assert all(new == old for new, old in zip(now, before, strict=True) if old is not None)
        before = now


def test_only_equal_shares_of_the_whole_line_have_blocks() -> None:
    assert ArmLayout([0.5, 0.5], 0.0).blocks == (0, 1)
    assert ArmLayout([0.45, 0.0, 0.45], 0.1).blocks == (0, 2)
    assert ArmLayout([0.333333] * 3, 0.0).blocks == (0, 1, 2)
    assert ArmLayout([0.4, 0.4], 0.0).blocks == ()
    assert ArmLayout([0.6, 0.4], 0.0).blocks == ()
