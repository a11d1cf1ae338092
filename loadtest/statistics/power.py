"""How small a difference is found, and how many units and hours more it takes to find another.

What must live here: arithmetic on a standard error that shrinks with the square root of units at
present variance and traffic. The power is that of the last look alone; looking earlier as
well finds the effect at least as often, so the needs are on the safe side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec import Struct

from loadtest.extras import need
from loadtest.statistics.effects import MIN_UNITS
from loadtest.statistics.sequence import radius

_SURE: Final = 0.75
"""Needs are worked out with a standard error that the true one exceeds in one of four cases only:
of a pilot with heavy-tailed sessions, half find theirs too small, and then too few units."""

_MOST: Final = 1e6  # times what was collected; beyond, "never" is the better answer


class Need(Struct, frozen=True, kw_only=True):
    """Units in all, of both arms, and what is still missing of them; 0: enough."""

    num_units: int
    num_more_units: int
    more_s: float | None  # None: no traffic to extrapolate from


class Needs(Struct, frozen=True, kw_only=True):
    """None: nothing is known about the variance yet, or it would take practically for ever.

    `detectable` is the least effect that was found with the power asked for by now, on the scale
    of estimates (a logarithm of a ratio, or a difference).
    """

    detectable: float | None
    to_find: Need | None  # the effect worth finding
    to_equal: Need | None  # to show that there is none larger than the margin, if there is none


def needs(
    *,
    se: float | None,
    df: float,
    num_units: int,
    span_s: float,
    alpha: float,
    power: float,
    scale: float,
    effect: float,
    margin: float,
) -> Needs:
    """Work out the needs from what `num_units` units in `span_s` seconds gave."""
    if se is None or df <= 0 or not num_units:
        return Needs(detectable=None, to_find=None, to_equal=None)
    stats = need("scipy.stats")
    found, equal = float(stats.norm.ppf(power)), float(stats.norm.ppf((1 + power) / 2))
    likely = se * float(np.sqrt(df / stats.chi2.ppf(1 - _SURE, df)))

    def reach(times: float, quantile: float) -> float:
        """The effect that is found (or excluded) with so many times the units."""
        shrunk = likely / np.sqrt(times)
        return float(radius(shrunk, scale=scale, alpha=alpha, df=df * times) + quantile * shrunk)

    def units(target: float, quantile: float) -> Need | None:
        times = _least(lambda t: reach(t, quantile) <= target)
        if times is None:
            return None
        wanted = max(int(np.ceil(times * num_units)), 2 * MIN_UNITS)
        more = max(0, wanted - num_units)
        more_s = more / num_units * span_s if span_s > 0 else None
        return Need(num_units=wanted, num_more_units=more, more_s=more_s)

    detectable = reach(1.0, found)
    return Needs(
        detectable=detectable if np.isfinite(detectable) else None,
        to_find=units(effect, found),
        to_equal=units(margin, equal),
    )


def _least(is_enough: Callable[[float], bool]) -> float | None:
    """Find the least number in [1 / _MOST, _MOST] that is enough, to one in a thousand."""
    low, high = 1 / _MOST, _MOST
    if not is_enough(high):
        return None
    while high / low > 1.001:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
