"""Did every variant get the units it was meant to? If not, something loses them, and what is left
of the variants cannot be compared: no difference between them can be trusted.

Source: Fabijan et al. 2019, "Diagnosing sample ratio mismatch"; for looking repeatedly, Lindon and
Malek 2022, "Anytime-valid inference for multinomial count data".
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from loadtest.experiments.observations import Observations
from loadtest.extras import need
from loadtest.statistics.effects import totals
from loadtest.statistics.sequence import Floats

LEVEL: Final = 0.005
"""Of the sequential test: so seldom is a sound experiment ever called broken."""

_PRIOR: Final = 100.0  # units that the expected shares are worth, before the first is seen


class RatioCheck(Struct, frozen=True, kw_only=True):
    """Units seen and expected, by arm. `p_sequential` holds at every look, `p_once` at one."""

    seen: dict[str, int]
    expected: dict[str, float]
    p_once: float
    p_sequential: float
    is_broken: bool


def check(observations: Observations) -> RatioCheck:
    """Compare the units of each arm with the shares that the arms had when they came."""
    begin_s, end_s = observations.window()
    is_in = (observations.unit_first_s >= begin_s) & (observations.unit_first_s <= end_s)
    arm = observations.unit_arm[is_in]
    chances = _chances(observations)[is_in]
    seen = totals(arm, None, len(observations.arms))
    p_sequential = _sequential(arm, chances)
    return RatioCheck(
        seen=dict(zip(observations.arms, seen.astype(int).tolist(), strict=True)),
        expected=dict(zip(observations.arms, chances.sum(0).tolist(), strict=True)),
        p_once=_once(seen, chances),
        p_sequential=p_sequential,
        is_broken=p_sequential < LEVEL,
    )


def _chances(observations: Observations) -> Floats:
    """Return each unit's chance to come to each arm, given that it came; (num_units, num_arms).

    A record knows its own arm's share; the others' are those that their last records before had.
    """
    shares = np.empty((observations.num_units, len(observations.arms)))
    for index, (since_s, share) in enumerate(observations.shares):
        at = np.searchsorted(since_s, observations.unit_first_s, "right") - 1
        shares[:, index] = share[np.maximum(at, 0)]
    own = np.arange(observations.num_units)
    shares[own, observations.unit_arm] = observations.unit_share
    return np.asarray(shares / shares.sum(1, keepdims=True))


def _once(seen: Floats, chances: Floats) -> float:
    """Do the chi-square test; with shares that never change, Pearson's."""
    if len(chances) < 1 or len(seen) < 2:
        return 1.0
    difference = (seen - chances.sum(0))[:-1]
    covariance = np.diag(chances.sum(0)) - chances.T @ chances
    squared = float(difference @ np.linalg.pinv(covariance[:-1, :-1]) @ difference)
    return float(need("scipy.stats").chi2.sf(squared, len(seen) - 1))


def _sequential(arm: np.ndarray, chances: Floats) -> float:
    """Bet on what was seen so far against the shares, unit by unit; 1 / the most ever won.

    The bet on a unit is its chances, tilted by (seen + prior) / (expected + prior) of each arm so
    far: with constant chances, the Dirichlet mixture of Lindon and Malek.
    """
    if not len(arm):
        return 1.0
    hits = np.eye(chances.shape[1])[arm]
    mean = chances.mean(0)
    seen = np.cumsum(hits, 0) - hits + _PRIOR * mean
    expected = np.cumsum(chances, 0) - chances + _PRIOR * mean
    bets = chances * seen / expected
    bets /= bets.sum(1, keepdims=True)
    rows = np.arange(len(arm))
    won = np.cumsum(np.log(bets[rows, arm]) - np.log(chances[rows, arm]))
    return float(min(1.0, np.exp(-max(0.0, won.max()))))
