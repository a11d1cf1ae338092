"""Which variant runs when: rounds of all variants, ordered so that drift cancels.

Rounds come in pairs, the second one in the reverse order of the first (ABBA): over a pair every
variant has the same mean place, so a drift that is linear in time falls out of the comparison.
Which order each pair has is drawn by the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def make_order(labels: Sequence[str], num_rounds: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """Order the arms of every round, shape (num_rounds, num_arms)."""
    draw = random.Random(seed)
    rounds: list[tuple[str, ...]] = []
    while len(rounds) < num_rounds:
        drawn = list(labels)
        draw.shuffle(drawn)
        rounds += [tuple(drawn), tuple(reversed(drawn))]
    return tuple(rounds[:num_rounds])


def mean_places(runs: Sequence[str]) -> dict[str, float]:
    """Average the places, from 0, at which each arm ran; `runs` are labels in order of time."""
    places: dict[str, list[int]] = {}
    for place, label in enumerate(runs):
        places.setdefault(label, []).append(place)
    return {label: sum(found) / len(found) for label, found in places.items()}
