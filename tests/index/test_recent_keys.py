"""router.index.recent_keys: the last ones are known, and never many more."""

from __future__ import annotations

import tracemalloc
from time import monotonic

from hypothesis import given
from hypothesis import strategies as st

from router.index.recent_keys import RecentKeys


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=20), max_size=60), st.integers(20, 50))
def test_the_last_keys_are_known_and_old_ones_forgotten(
    batches: list[list[int]], max_keys: int
) -> None:
    recent = RecentKeys(max_keys=max_keys)
    for keys in batches:
        recent.add(keys)

    added = [key for keys in batches for key in keys]
    assert all(key in recent for key in added[-max_keys:])
    assert sum(key in recent for key in set(added)) <= 2 * (max_keys + 20)


def test_nothing_is_recent_at_first() -> None:
    assert 1 not in RecentKeys()


def test_keys_that_come_again_and_again_take_no_more_memory() -> None:
    """A cache evicts the same few prompts in turn for weeks."""
    recent = RecentKeys()
    tracemalloc.start()
    try:
        for _ in range(20_000):
            recent.add((1, 2, 3))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert num_bytes < 10_000


def test_the_time_of_a_key_is_that_of_its_last_call() -> None:
    recent = RecentKeys()
    before_s = monotonic()
    recent.add((1, 2))
    between_s = monotonic()
    recent.add((2,))

    first_s, second_s = recent.added_s(1), recent.added_s(2)
    assert first_s is not None
    assert second_s is not None
    assert before_s <= first_s <= between_s <= second_s
    assert recent.added_s(3) is None
