"""router.request.verify: which blocks are asked for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.request.verify import _plan


def test_few_blocks_are_all_asked_for() -> None:
    """And a few behind the boundary: the pool may have more than is known."""
    assert _plan(3, 100, 512) == list(range(7))
    assert _plan(3, 5, 512) == list(range(5))
    assert _plan(0, 0, 512) == []


def test_what_a_candidate_holds_is_asked_for() -> None:
    """As far as 3/4 of the keys go, where they are many: the rest is the next round's."""
    assert _plan(3, 100, 512, 40) == list(range(40))
    assert _plan(0, 30, 512, 40) == list(range(30))
    assert _plan(40, 100, 512, 3) == list(range(44))
    assert set(range(984, 1384)) <= set(_plan(1000, 7000, 512, 5000))
    assert max(_plan(1000, 7000, 512, 5000)) == 1383
    assert len(_plan(1000, 7000, 512, 5000)) <= 512


@given(st.integers(1, 7000), st.integers(0, 100), st.integers(1, 600))
def test_many_blocks_are_sampled(num_blocks: int, num_more: int, max_blocks: int) -> None:
    """The first, those around the boundary, and others evenly between."""
    plan = _plan(num_blocks, num_blocks + num_more, max_blocks)

    assert plan == sorted(set(plan))
    assert plan[0] == 0
    assert plan[-1] < num_blocks + num_more
    assert num_blocks - 1 in plan
    assert len(plan) <= max(max_blocks, 21)
    if num_blocks > 2000 and max_blocks > 100:
        gaps = [after - before for before, after in pairwise(plan)]
        assert max(gaps) <= 1 + num_blocks // (max_blocks - 20)
