"""router.observers.early.early_results: predictions are judged by the prompts that come."""

from __future__ import annotations

from collections import Counter

from router.base.contracts import BlockKey
from router.observers.early.early_results import EarlyResults
from router.observers.early.next_prompt import Beginning


def chain(number: int, num_blocks: int = 40) -> list[BlockKey]:
    return [BlockKey(1_000_000 * number + position) for position in range(num_blocks)]


def beginning(number: int) -> Beginning:
    return Beginning(ids=[], keys=chain(number), block_size=16)


class Judged:
    """Results, and what they counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.results = EarlyResults(self._count)

    def _count(self, kind: str, num: float) -> None:
        self.counts[kind] += round(num)

    def turn(self, session: int, keys: list[BlockKey], now_s: float = 0.0) -> None:
        """Compute a beginning early from block 8 on; the next prompt has these keys."""
        self.results.made(session, "m", beginning(session), 8, now_s)
        self.results.came(session, keys, now_s)


def test_a_prompt_that_goes_on_used_all() -> None:
    """Whatever is behind the beginning."""
    judged = Judged()
    judged.turn(1, [*chain(1), *chain(9)])

    assert judged.counts == {"used": 32 * 16, "wasted": 0}
    assert judged.results.may(1, "m", 0.0)


def test_a_prompt_that_turns_off_used_a_part() -> None:
    """Less than half of it is a wrong prediction: the conversation is not predicted again."""
    judged = Judged()
    judged.turn(1, [*chain(1, 16), *chain(9)])

    assert judged.counts == {"used": 8 * 16, "wasted": 24 * 16}
    assert not judged.results.may(1, "m", 0.0)
    assert judged.results.may(2, "m", 0.0)


def test_a_prompt_of_another_thread_says_nothing() -> None:
    """Sub-agents may have the session's name."""
    judged = Judged()
    judged.turn(1, chain(2))
    assert not judged.counts

    judged.results.came(1, chain(1), 1.0)
    assert judged.counts["used"] == 32 * 16


def test_a_model_that_is_predicted_badly_pauses() -> None:
    """For a while; then it is tried again."""
    judged = Judged()
    for session in range(8):
        assert judged.results.may(100, "m", 0.0)
        judged.turn(session, chain(session, 9))

    assert not judged.results.may(100, "m", 1.0)
    assert judged.results.may(100, "another", 1.0)
    assert judged.results.may(100, "m", 601.0)


def test_a_person_who_does_not_come_back_wastes_it() -> None:
    """It is counted when another is made an hour later."""
    judged = Judged()
    judged.results.made(1, "m", beginning(1), 0, 0.0)
    judged.results.made(2, "m", beginning(2), 0, 3601.0)

    assert judged.counts == {"wasted": 40 * 16}
    assert judged.results.may(1, "m", 3601.0)


def test_a_model_of_which_nothing_is_missing_pauses() -> None:
    """Its template keeps reasoning: the next prompts go on from what is cached."""
    judged = Judged()
    for _ in range(31):
        judged.results.needless("m", 0.0)
    assert judged.results.may(1, "m", 0.0)

    judged.results.needless("m", 0.0)

    assert not judged.results.may(1, "m", 599.0)
    assert judged.results.may(1, "another", 1.0)
    assert judged.results.may(1, "m", 601.0)


def test_what_is_used_ends_a_pause() -> None:
    """And the next pause is a short one."""
    judged = Judged()
    for _ in range(32):
        judged.results.needless("m", 0.0)
    judged.turn(1, [*chain(1), *chain(9)], 700.0)
    for _ in range(32):
        judged.results.needless("m", 800.0)

    assert not judged.results.may(1, "m", 1_399.0)
    assert judged.results.may(1, "m", 1_401.0)


def test_only_a_row_of_needless_ones_counts() -> None:
    """A client with reasoning among many without goes on."""
    judged = Judged()
    for _ in range(40):
        judged.results.needless("m", 0.0)
        judged.results.made(1, "m", beginning(1), 8, 0.0)

    assert judged.results.may(1, "m", 0.0)
