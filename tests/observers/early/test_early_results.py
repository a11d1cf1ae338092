"""router.observers.early.early_results: predictions are judged by what engines report."""

from __future__ import annotations

from collections import Counter

import pytest

from router.base.contracts import BlockKey
from router.observers.early.early_results import NEEDLESS, EarlyResults


def chain(number: int, num_blocks: int = 40) -> list[BlockKey]:
    return [BlockKey(1_000_000 * number + position) for position in range(num_blocks)]


class Judged:
    """Results, and what they counted; blocks have 16 tokens."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.results = EarlyResults(self._count)

    def _count(self, kind: str, num: float) -> None:
        self.counts[kind] += round(num)

    def make(self, session: int, now_s: float = 0.0) -> None:
        """Compute blocks 8 to 40 of a beginning early."""
        self.results.spend("m", 1.0, now_s)
        self.results.made(
            session, "m", "r1", keys=chain(session), blocks=range(8, 40), block_size=16, now_s=now_s
        )

    def turn(self, session: int, num_cached: int, now_s: float = 0.0) -> None:
        """Compute a beginning early; the next turn has so many cached tokens."""
        self.make(session, now_s)
        self.results.came(session, "r1", [*chain(session), *chain(9)], num_cached, now_s)

    def may(self, now_s: float = 0.0, session: int = 100) -> bool:
        return self.results.may(session, "m", now_s)


@pytest.mark.parametrize("num_cached", [40 * 16, 60 * 16])
def test_a_turn_that_finds_all_cached_used_all(num_cached: int) -> None:
    """Whatever is cached behind the beginning."""
    judged = Judged()
    judged.turn(1, num_cached)

    assert judged.counts == {"used": 32 * 16, "wasted": 0}
    assert judged.may(session=1)


def test_the_engines_figure_counts() -> None:
    """Of a turn that uses less than half, the conversation is not predicted again."""
    judged = Judged()
    judged.turn(1, 16 * 16)
    judged.turn(2, 4 * 16)

    assert judged.counts == {"used": 8 * 16, "wasted": (24 + 32) * 16}
    assert not judged.may(session=1)
    assert judged.may(session=3)


def test_a_turn_at_another_replica_used_nothing() -> None:
    """Though it may have as much cached there."""
    judged = Judged()
    judged.make(1)
    judged.results.came(1, "r2", chain(1), 40 * 16, 0.0)

    assert judged.counts == {"used": 0, "wasted": 32 * 16}


def test_a_prompt_of_another_thread_says_nothing() -> None:
    """Sub-agents may have the session's name."""
    judged = Judged()
    judged.make(1)
    judged.results.came(1, "r1", chain(2), 0, 0.0)
    assert not judged.counts

    judged.results.came(1, "r1", chain(1), 40 * 16, 1.0)
    assert judged.counts["used"] == 32 * 16


def test_a_model_whose_conversations_end_rests() -> None:
    """Of questions that nobody follows up, a few are computed, and one a minute later on."""
    judged, num = Judged(), 0
    for second in range(30_000):
        if judged.may(second / 100, session=second):
            judged.make(second, second / 100)
            num += 1

    assert 16 <= num <= 16 + 300 / 60
    assert judged.results.may(1, "another", 300.0)


@pytest.mark.parametrize(("used", "rests"), [(0.4, True), (0.8, False)])
def test_a_model_goes_on_if_most_is_used(used: float, rests: bool) -> None:
    """The share is what counts, however many wait for their next turn."""
    judged = Judged()
    for number in range(500):
        if judged.may():
            judged.turn(number, 640 if number % 10 < 10 * used else 0)

    assert judged.may() is not rests


def test_a_person_who_does_not_come_back_wastes_it() -> None:
    """It is counted when another is made an hour later."""
    judged = Judged()
    judged.make(1)
    judged.make(2, 3601.0)

    assert judged.counts == {"wasted": 32 * 16}


def test_a_model_of_which_nothing_is_missing_rests() -> None:
    """Its template keeps reasoning: the next prompts go on from what is cached."""
    judged = Judged()
    for _ in range(31):
        judged.results.spend("m", NEEDLESS, 0.0)
        assert not judged.counts
    assert not judged.may()
    assert judged.may(60.0)


def test_a_model_whose_engines_refuse_rests() -> None:
    """It is tried again a minute later."""
    judged = Judged()
    judged.results.rest("m", 0.0)

    assert not judged.may(30.0)
    assert judged.may(61.0)
