"""Long random lives: what hypothesis, which likes short ones, would hardly ever come upon.

Two copies of a block, one published, the router dies, the other is removed: it takes many steps in
the right order. A walk that fails is found again by its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from router.index.copies import TIERS
from tests.index.contract.conftest import Subject
from tests.index.contract.engine import BLOCKS, CHAINS, NUM_BLOCKS
from tests.index.contract.machine import CANDIDATES, machine

NUM_STEPS = 300
NUM_HAPPENINGS = 60


def walk(suite: type[RuleBasedStateMachine], seed: int, num_steps: int = NUM_STEPS) -> None:
    """Take random steps, and look every now and then."""
    rng = random.Random(seed)
    subject: Any = suite()
    happenings = rng.sample(range(NUM_HAPPENINGS), rng.choice([4, 8, 16, NUM_HAPPENINGS]))
    steps: list[tuple[int, bool, Callable[[], object]]] = [
        (24, True, lambda: subject.compute(**_where(rng), **_what(rng), again=rng.random() < 0.6)),
        (24, True, lambda: subject.evict_any(**_held(subject, rng))),
        (4, False, lambda: subject.evict_tail(**_where(rng), **_what(rng))),
        (
            1,
            False,
            lambda: subject.clear(candidate=rng.choice(CANDIDATES), received=rng.randrange(8)),
        ),
        (1, False, lambda: subject.restart(candidate=rng.choice(CANDIDATES))),
        (2, False, lambda: subject.replace(**_other(rng))),
        (1, False, lambda: subject.trim(**_few(rng))),
        (2, False, lambda: subject.claim(candidate=rng.choice(CANDIDATES), **_what(rng))),
        (4, True, lambda: subject.end(number=rng.randrange(4))),
        (50, True, lambda: subject.disturb(what=rng.choice(happenings), how=rng.randint(1, 9))),
        (rng.choice([2, 4, 8]), True, lambda: subject.look()),
    ]
    # Each walk leaves things out: what happens often hides what needs time to show.
    steps = [step for step in steps if step[1] or rng.random() < 0.5]
    weights = [weight for weight, _, _ in steps]
    try:
        for _, _, step in rng.choices(steps, weights, k=num_steps):
            step()
        subject.look()
    finally:
        subject.teardown()


def _where(rng: random.Random) -> dict[str, Any]:
    return {
        "candidate": rng.choice(CANDIDATES),
        "tier": rng.choice([*TIERS, "gpu"]),
        "received": rng.randrange(8),
    }


def _other(rng: random.Random) -> dict[str, Any]:
    return {"candidate": rng.choice(CANDIDATES), **_what(rng), "further": rng.randrange(3)}


def _what(rng: random.Random) -> dict[str, int]:
    return {"number": rng.randrange(len(CHAINS)), "length": rng.randint(1, NUM_BLOCKS)}


def _few(rng: random.Random) -> dict[str, Any]:
    return {"candidate": rng.choice(CANDIDATES), "num_batches": rng.randint(1, 3)}


def _held(subject: Any, rng: random.Random) -> dict[str, Any]:
    """Choose blocks to evict: some copies of some, or all of one, which shows a wrong count."""
    where = _where(rng)
    copies = subject.engines[where["candidate"]].held[where["tier"]]
    held = sorted(copies.elements()) or BLOCKS
    if rng.random() < 0.5:
        block = rng.choice(held)
        return {**where, "blocks": [block] * max(1, copies[block])}
    return {**where, "blocks": rng.choices(held, k=rng.randint(1, 6))}


@pytest.mark.timeout(300)
@pytest.mark.hypothesis
def test_an_index_survives_long_lives(subject: Subject) -> None:
    """All knowledge of engines is right whenever it is checked, hundreds of times."""
    suite = machine(subject.make)

    for seed in range(subject.num_walks):
        try:
            walk(suite, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
