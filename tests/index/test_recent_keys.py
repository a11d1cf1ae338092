"""router.index.recent_keys: the last ones are known, and never many more."""

from __future__ import annotations

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
