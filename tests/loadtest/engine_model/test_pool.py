"""The shared pool evicts what was not used for longest."""

from __future__ import annotations

from loadtest.engine_model.pool import BlockPool


def test_the_least_recently_used_goes_first() -> None:
    """An engine's look-up is a use, a router's is not; only new blocks count as put."""
    pool = BlockPool(capacity_blocks=3)
    assert pool.put(["a", "b", "c"]) == ["a", "b", "c"]
    assert pool.leading(["a", "x", "b"]) == 1
    assert pool.match(["b", "c"]) == 2
    assert pool.holds(["b", "x"]) == [True, False]

    assert pool.put(["a", "d"]) == ["d"]

    assert pool.keys() == ["c", "a", "d"]
    assert (pool.num_evicted, pool.num_put, len(pool)) == (1, 4, 3)


def test_lost_blocks_are_not_evicted_ones() -> None:
    """Neither are unknown ones."""
    pool = BlockPool()
    pool.put("abc")

    pool.remove("bx")
    assert pool.match("ab") == 1
    pool.clear()

    assert (len(pool), pool.num_evicted) == (0, 0)
