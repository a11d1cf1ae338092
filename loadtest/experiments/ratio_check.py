"""Sample ratio: whether every variant got as many units as its share says.

If a variant loses units, the rest of the variants is not comparable. Source: Fabijan et al. 2019,
"Diagnosing sample ratio mismatch".
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from loadtest.experiments.observations import Observations
from loadtest.extras import need

LEVEL: Final = 0.0005
"""Below this p the experiment is called broken. It is low because people look repeatedly."""


class RatioCheck(Struct, frozen=True, kw_only=True):
    """Units seen and expected, by variant; `p_value` of Pearson's test."""

    seen: dict[str, int]
    expected: dict[str, float]
    p_value: float

    @property
    def is_broken(self) -> bool:
        """Return whether the mismatch is beyond chance."""
        return self.p_value < LEVEL


def check(observations: Observations) -> RatioCheck:
    """Compare the units of each variant with its share while the units came."""
    begin_s, end_s = observations.window()
    is_in = (observations.unit_first_s >= begin_s) & (observations.unit_first_s <= end_s)
    own = [is_in & (observations.unit_arm == index) for index in range(len(observations.arms))]
    seen = np.array([np.count_nonzero(units) for units in own], dtype=float)
    # a unit stands for 1 / share units of the traffic, so this is the mean share during a ramp
    traffic = np.array([float((1 / observations.unit_share[units]).sum()) for units in own])
    shares = np.divide(seen, traffic, out=np.zeros_like(seen), where=traffic > 0)
    expected = seen.sum() * shares / shares.sum() if shares.any() else seen
    p_value = float(need("scipy.stats").chisquare(seen, expected).pvalue) if seen.all() else 1.0
    return RatioCheck(
        seen=dict(zip(observations.arms, seen.astype(int).tolist(), strict=True)),
        expected=dict(zip(observations.arms, expected.tolist(), strict=True)),
        p_value=p_value,
    )
