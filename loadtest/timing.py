"""Arrival times of requests: spread, scaled, or drawn if they are unknown."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.agents import Profile, lognormal
from loadtest.workload import Workload

PREFILL_TOKENS_PER_S: Final = 10_000.0
DECODE_TOKENS_PER_S: Final = 40.0
"""An engine of middling speed, to split the gap between two turns into reply and wait."""


class Timing(Struct, frozen=True, kw_only=True):
    """What a reader makes of the times in a file.

    `rate` serves traces without times only: sessions start as a Poisson process, and between their
    turns tools take as long as those of `loadtest.agents`. `seed` draws all of it, and the spread.
    """

    spread_s: float = 0.0  # each request arrives at some moment of the window behind its time
    rate: float = 1.0  # sessions per second
    scale_time: float = 1.0  # of all arrivals and waits; 0.5: twice as fast
    seed: int = 0


def service_s(num_uncached_tokens: int, num_output_tokens: int) -> float:
    """Estimate how long a turn takes at an engine that is not busy."""
    return num_uncached_tokens / PREFILL_TOKENS_PER_S + num_output_tokens / DECODE_TOKENS_PER_S


def poisson(rate: float, dice: random.Random, *, start_s: float = 0.0) -> Iterator[float]:
    """Draw arrivals without end, the first one at `start_s`; infinite rate: all at once."""
    now_s = start_s
    while True:
        yield now_s
        now_s += 0.0 if math.isinf(rate) else dice.expovariate(rate)


def tool_waits(dice: random.Random) -> Iterator[float]:
    """Draw the seconds that tools take, without end."""
    profile = Profile()
    while True:
        yield lognormal(dice, profile.tool_wait_s, profile.tool_wait_sigma)


def offsets_of(window: float, seed: int) -> Iterator[float]:
    """Draw moments of a window, without end.

    The published traces are rounded to 3 s, which hides effects of milliseconds.
    """
    dice = random.Random(seed)
    while True:
        yield dice.uniform(0.0, window)


def scaled(workload: Workload, factor: float) -> Workload:
    """Stretch all arrivals and waits; 0.5: twice as fast."""
    if factor == 1.0:
        return workload
    return replace(
        workload,
        turns=tuple(
            replace(t, arrival_s=t.arrival_s * factor, wait_s=t.wait_s * factor)
            for t in workload.turns
        ),
    )
