"""What was asked for; kept as `compare.json` beside the run files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

from loadtest.compare.arms import Arm

SETTING_SCHEMA: Final = "warmroute.compare-setting/1"

Place = Literal["simulated", "emulated", "engines", "targets"]

PLACES: Final[dict[Place, str]] = {
    "simulated": "simulated",
    "emulated": "live, on emulated replicas that are restarted for every run",
    "engines": "live, on given engines behind a router that is restarted for every run",
    "targets": "live, at given base URLs",
}


class Setting(Struct, frozen=True, kw_only=True):
    """A comparison as asked for. `order` has the variants' labels, shape (num_rounds, num_arms)."""

    schema: str = SETTING_SCHEMA
    place: Place
    arms: tuple[Arm, ...]
    baseline: str
    order: tuple[tuple[str, ...], ...]
    workload: str
    num_turns: int  # of one run
    seed: int = 0
    slo_ttft_s: float | None = None
    slo_tbt_s: float | None = None
    details: dict[str, str | int | float | bool] = {}  # of the place: replicas, clock, …

    @property
    def labels(self) -> tuple[str, ...]:
        """Name the variants, in the order in which they were given."""
        return tuple(arm.label for arm in self.arms)

    @property
    def num_runs(self) -> int:
        """Count the runs that were to be made."""
        return sum(len(labels) for labels in self.order)


def make_order(labels: Sequence[str], num_rounds: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """Order the variants of every round, shape (num_rounds, num_variants).

    Rounds come in pairs, and the second round of a pair reverses the first. Every variant then has
    the same mean place, so a drift that is linear in time cancels. The seed draws the orders.
    """
    draw = random.Random(seed)
    rounds: list[tuple[str, ...]] = []
    while len(rounds) < num_rounds:
        drawn = list(labels)
        draw.shuffle(drawn)
        rounds += [tuple(drawn), tuple(reversed(drawn))]
    return tuple(rounds[:num_rounds])
