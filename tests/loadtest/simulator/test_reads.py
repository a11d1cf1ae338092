"""Reads share links equally."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.reads import Reads


def test_replicas_share_the_pools_links() -> None:
    """Four replicas on two links read at half their speed."""
    reads = Reads(100.0, num_links=2)
    for replica in range(4):
        reads.begin(replica, "abcd"[replica], 1000, 0.0)

    assert reads.next_s() == pytest.approx(20.0)
    assert [read.request for read in reads.finish(20.0)] == list("abcd")


@given(
    begun=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 10_000), st.floats(0.0, 30.0)), max_size=12
    ),
    num_links=st.floats(0.5, 8.0),
)
def test_no_more_is_read_than_the_links_carry(
    begun: list[tuple[int, int, float]], num_links: float
) -> None:
    """Every read ends, and all together never beat the links."""
    reads = Reads(100.0, num_links=num_links)
    now_s, done, waiting = 0.0, 0, sorted(begun, key=lambda b: b[2])
    while waiting or reads.next_s() is not None:
        next_s = reads.next_s()
        if waiting and (next_s is None or waiting[0][2] <= next_s):
            replica, num_tokens, now_s = waiting.pop(0)
            reads.begin(replica, num_tokens, num_tokens, now_s)
        else:
            assert next_s is not None
            now_s = next_s
            finished = reads.finish(now_s)
            assert finished
            done += len(finished)

    assert done == len(begun)
    total = sum(num_tokens for _, num_tokens, _ in begun)
    assert reads.num_tokens == total
    assert total <= 100.0 * num_links * now_s + 1e-3
