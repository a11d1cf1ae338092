"""Experiments drawn by chance, with what makes real ones hard; for the study and its tests.

What must live here: how outcomes are drawn. What must not: how they are judged.

Two designs. *Split*: sessions of heavy-tailed length (log-normal, a few of hundreds of turns) come
over time and overlap; each has a level of its own (prompt, language, tools), requests vary around
it, and the hour moves them all. *Switchback*: slots whose level wanders (autocorrelated), with
requests that share the slot's queue. The effect multiplies a variant's outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.random import Generator
from numpy.typing import NDArray

from loadtest.statistics.effects import Mask
from loadtest.statistics.sequence import Floats


class Look(Struct, frozen=True, kw_only=True):
    """What is known at one look, for all repetitions at once.

    Shapes (num_repetitions, num_units): sums and counts of units so far. `naive` are the sums that
    a test by request needs, shape (num_repetitions, 2 arms, 3): number, sum, sum of squares.
    """

    sums: Floats
    counts: Floats
    is_treated: Mask
    naive: Floats


class Sessions(Struct, frozen=True, kw_only=True):
    """A split by session. Turns are `gap` apart in units of the experiment's whole length."""

    num_sessions: int = 1000
    median_turns: float = 6.0
    spread_turns: float = 1.1  # sigma of their logarithm: the longest hundredth is > 75 turns
    max_turns: int = 400
    spread_session: float = 0.5  # sigma of the session's own level
    spread_request: float = 0.8
    swing: float = 0.5  # of the hour, in logarithms
    gap: float = 0.004
    share: float = 0.5  # of sessions that are treated

    def looks(
        self, effect: float, num_looks: int, num_repetitions: int, rng: Generator
    ) -> Iterator[Look]:
        """Draw, and show what is known after each of so many equal stretches of time."""
        shape = (num_repetitions, self.num_sessions)
        drawn = rng.lognormal(np.log(self.median_turns), self.spread_turns, shape)
        num_turns = np.clip(drawn, 1, self.max_turns).astype(np.int64)
        is_treated = rng.random(shape) < self.share
        begins = rng.random(shape)
        level = rng.normal(0.0, self.spread_session, shape)
        unit = np.repeat(np.arange(is_treated.size), num_turns.ravel())
        first = np.cumsum(num_turns.ravel()) - num_turns.ravel()
        number = np.arange(len(unit)) - first[unit]
        at = begins.ravel()[unit] + number * self.gap * rng.exponential(1.0, len(unit))
        logs = level.ravel()[unit] + rng.normal(0.0, self.spread_request, len(unit))
        logs += self.swing * np.sin(2 * np.pi * at) + effect * is_treated.ravel()[unit]
        look = np.floor(at * num_looks).astype(np.int64)
        yield from _cumulated(unit, np.exp(logs), look, is_treated, num_looks)


class Slots(Struct, frozen=True, kw_only=True):
    """A switchback. `is_balanced`: each two slots in a row have one of each arm."""

    num_slots: int = 80
    mean_requests: float = 60.0
    correlation: float = 0.8  # of a slot's level with the one before
    spread_slot: float = 0.35
    spread_request: float = 0.8
    is_balanced: bool = False

    def looks(
        self, effect: float, num_looks: int, num_repetitions: int, rng: Generator
    ) -> Iterator[Look]:
        """Draw, and show what is known after each of so many equal numbers of slots."""
        shape = (num_repetitions, self.num_slots)
        level = np.empty(shape)
        level[:, 0] = rng.normal(0.0, self.spread_slot, num_repetitions)
        fresh = rng.normal(0.0, self.spread_slot * np.sqrt(1 - self.correlation**2), shape)
        for slot in range(1, self.num_slots):
            level[:, slot] = self.correlation * level[:, slot - 1] + fresh[:, slot]
        is_treated = rng.random(shape) < 0.5
        if self.is_balanced:
            is_treated[:, 1::2] = ~is_treated[:, ::2]
        # More requests where the level is high: the hour moves both.
        num_requests = rng.poisson(self.mean_requests * np.exp(0.5 * level))
        unit = np.repeat(np.arange(is_treated.size), num_requests.ravel())
        logs = level.ravel()[unit] + rng.normal(0.0, self.spread_request, len(unit))
        logs += effect * is_treated.ravel()[unit]
        look = unit % self.num_slots * num_looks // self.num_slots
        yield from _cumulated(unit, np.exp(logs), look, is_treated, num_looks)


def _cumulated(
    unit: NDArray[np.int64],
    values: Floats,
    look: NDArray[np.int64],
    is_treated: Mask,
    num_looks: int,
) -> Iterator[Look]:
    """Add up, look by look; what comes after the last one is never seen."""
    shape = is_treated.shape
    sums, counts = np.zeros(shape), np.zeros(shape)
    naive = np.zeros((shape[0], 2, 3))
    order = np.argsort(look, kind="stable")
    ends = np.searchsorted(look[order], np.arange(num_looks), side="right")
    begin = 0
    for end in ends:
        chosen = order[begin:end]
        units, fresh = unit[chosen], values[chosen]
        sums += np.bincount(units, fresh, sums.size).reshape(shape)
        counts += np.bincount(units, minlength=sums.size).reshape(shape)
        group = units // shape[1] * 2 + is_treated.ravel()[units]
        powers = [np.bincount(group, fresh**power, 2 * shape[0]) for power in range(3)]
        naive += np.stack(powers, -1).reshape(naive.shape)
        begin = end
        yield Look(
            sums=sums.copy(), counts=counts.copy(), is_treated=is_treated, naive=naive.copy()
        )
