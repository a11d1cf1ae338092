"""Figures about the recent past, each in O(1): old events fade, none is kept."""

from __future__ import annotations

from math import exp


class RecentSum:
    """A sum whose terms fade with age: after `constant_s` a term counts 1/e."""

    __slots__ = ("_at_s", "_constant_s", "_sum")

    def __init__(self, constant_s: float) -> None:
        self._constant_s = constant_s
        self._sum = 0.0
        self._at_s = 0.0

    def add(self, value: float, now_s: float) -> None:
        """Add a term; the ones before fade until `now_s`."""
        fade = exp(min(0.0, self._at_s - now_s) / self._constant_s)
        self._sum, self._at_s = self._sum * fade + value, now_s

    def at(self, now_s: float) -> float:
        """Return the sum as of `now_s`, never before the last `add`."""
        if self._sum == 0.0:
            return 0.0
        return self._sum * exp(min(0.0, self._at_s - now_s) / self._constant_s)


class RecentRate:
    """How often something happens, a second.

    Nothing is known from before `begun_s`, so only the time since then counts. At least `least_s`
    is assumed: one event at the start is no pace.
    """

    __slots__ = ("_begun_s", "_constant_s", "_least_s", "_sum")

    def __init__(self, constant_s: float, least_s: float, *, begun_s: float | None = None) -> None:
        self._constant_s = constant_s
        self._least_s = least_s
        self._begun_s = begun_s  # None: with the first event
        self._sum = RecentSum(constant_s)

    def add(self, now_s: float) -> None:
        if self._begun_s is None:
            self._begun_s = now_s
        self._sum.add(1.0, now_s)

    def at(self, now_s: float) -> float:
        """Return the rate as of `now_s`; 0.0 until time has passed."""
        if self._begun_s is None or now_s <= self._begun_s:
            return 0.0
        seen_s = max(self._least_s, now_s - self._begun_s)
        return self._sum.at(now_s) / (self._constant_s * (1.0 - exp(-seen_s / self._constant_s)))


class RecentShare:
    """The share of recent time that something was on, in [0, 1]; off and 0.0 at first."""

    __slots__ = ("_at_s", "_constant_s", "_is_on", "_share")

    def __init__(self, constant_s: float) -> None:
        self._constant_s = constant_s
        self._is_on = False
        self._share = 0.0
        self._at_s = 0.0

    def switch(self, is_on: bool, now_s: float) -> None:
        """Set it on or off from `now_s` on; a second time has no effect."""
        if is_on is not self._is_on:
            self._share = self.at(now_s)
            self._at_s, self._is_on = now_s, is_on

    def at(self, now_s: float) -> float:
        """Return the share as of `now_s`, never before the last switch."""
        target = 1.0 if self._is_on else 0.0
        if self._share == target:
            return target
        fade = exp(min(0.0, self._at_s - now_s) / self._constant_s)
        return target + (self._share - target) * fade
