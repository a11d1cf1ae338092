"""How many more units and hours an experiment needs, at its present variance and traffic.

A standard error shrinks with the square root of the units. The power is that of the last look;
looking earlier as well finds an effect at least as often.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Final

from msgspec import Struct

from loadtest.extras import need
from loadtest.statistics.effects import MIN_UNITS
from loadtest.statistics.sequence import radius

_SURE: Final = 0.75
"""Needs assume a standard error that the true one exceeds in one of four cases only. Half of all
pilots with heavy-tailed sessions see a standard error that is too small."""

_POWER: Final = 0.8
_MOST: Final = 1e6  # times the units so far; beyond that the answer is "never"


class Need(Struct, frozen=True, kw_only=True):
    """Units in all, of both variants, and how many are missing; 0: enough."""

    num_units: int
    num_more_units: int
    more_s: float | None  # None: no traffic to extrapolate from


class Needs(Struct, frozen=True, kw_only=True):
    """What an experiment needs. None: the variance is unknown, or it would take too long."""

    to_find: Need | None  # the effect worth finding
    to_equal: Need | None  # to show that no difference is larger than the margin


def needs(
    *,
    se: float | None,
    df: float,
    num_units: int,
    span_s: float,
    alpha: float,
    scale: float,
    effect: float,
    margin: float,
) -> Needs:
    """Compute the needs from the results of `num_units` units in `span_s` seconds."""
    if se is None or df <= 0 or not num_units:
        return Needs(to_find=None, to_equal=None)
    stats, optimize = need("scipy.stats"), need("scipy.optimize")
    likely = se * sqrt(df / float(stats.chi2.ppf(1 - _SURE, df)))

    def reach(times: float, share: float) -> float:
        """Return the effect that so many times the units find, or exclude."""
        shrunk = likely / sqrt(times)
        found = radius(shrunk, scale=scale, alpha=alpha, df=df * times)
        return found + float(stats.norm.ppf(share)) * shrunk

    def units(target: float, share: float) -> Need | None:
        if reach(_MOST, share) > target:
            return None
        times = optimize.brentq(
            lambda times: min(reach(times, share), 1e9) - target, 1 / _MOST, _MOST, rtol=1e-4
        )
        wanted = max(ceil(times * num_units), 2 * MIN_UNITS)
        more = max(0, wanted - num_units)
        more_s = more / num_units * span_s if span_s > 0 else None
        return Need(num_units=wanted, num_more_units=more, more_s=more_s)

    return Needs(to_find=units(effect, _POWER), to_equal=units(margin, (1 + _POWER) / 2))
