"""Blocks brought into an index from elsewhere: applied as they change, or swapped in whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.view import CandidateId
from router.contracts import BlockKey
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch
from router.index.staged_blocks import StagedBlocks
from router.messages import TierChange, pack_keys

A = CandidateId("a")


def keys(*names: int) -> list[BlockKey]:
    return [BlockKey(name) for name in names]


def stored(*names: int) -> TierChange:
    return TierChange("gpu", stored=pack_keys(keys(*names)))


def removed(*names: int) -> TierChange:
    return TierChange("gpu", removed=pack_keys(keys(*names)))


def num_matched(index: BlockIndex, num_blocks: int = 9) -> int:
    return index.match(keys(*range(num_blocks)), [A])[A].num_gpu_blocks


changes = st.builds(
    lambda held, gone, copies: TierChange(
        "gpu",
        stored=pack_keys(keys(*held, *copies)),
        removed=pack_keys(keys(*(gone - held - copies.keys()))),
        copies=tuple((BlockKey(key), n) for key, n in copies.items()),
    ),
    st.sets(st.integers(0, 9)),
    st.sets(st.integers(0, 9)),
    st.dictionaries(st.integers(0, 9), st.integers(1, 3), max_size=3),
)


@given(st.lists(changes, max_size=6), st.integers(0, 5))
def test_applying_again_from_anywhere_changes_nothing(said: list[TierChange], start: int) -> None:
    """Entries of a log read twice, on top of a state that has them."""
    once, twice = BlockIndex(), BlockIndex()
    once.apply(A, said)
    twice.apply(A, said)
    twice.apply(A, said[start:])

    for key in keys(*range(10)):
        for _ in range(3):  # as many removals as there are copies
            assert once.remove(A, [key]) == twice.remove(A, [key])


def test_a_change_says_how_many_copies_there_are() -> None:
    """One where it does not; so many removals are needed."""
    index = BlockIndex()
    index.apply(A, [TierChange("gpu", stored=pack_keys(keys(0, 1)), copies=((BlockKey(1), 2),))])

    assert index.remove(A, keys(0, 1)) == 0
    assert [index.holds(A, key) for key in keys(0, 1)] == [False, True]
    index.apply(A, [stored(1)])
    index.remove(A, keys(1))
    assert not index.holds(A, BlockKey(1))


def test_a_cleared_change_begins_an_epoch() -> None:
    """Nothing of before is left."""
    index = BlockIndex()
    index.store(A, keys(0, 1))
    index.speculate(A, keys(2))
    index.apply(A, [stored(0)], cleared=True)

    assert num_matched(index) == 1


def test_a_guess_goes_when_the_truth_is_known() -> None:
    """What was remembered of a silent candidate does not mix with deltas."""
    index = BlockIndex()
    index.remember(A, keys(0, 1, 2), 10)
    index.apply(A, [stored(0)])

    assert num_matched(index) == 1


def test_cut_off_keys_are_refused() -> None:
    """Nothing of such a change is applied."""
    index = BlockIndex()

    with pytest.raises(ValueError, match="bytes length"):
        index.apply(A, [TierChange("gpu", stored=b"123", removed=b"")])
    assert index.num_blocks(A) == 0


def test_a_snapshot_is_swapped_in_whole_and_claims_live_on() -> None:
    """It is not matched by halves; requests in flight go on computing what they claimed."""
    index = BlockIndex()
    index.store(A, keys(0, 1, 2, 3))
    claim = index.speculate(A, keys(2, 3))
    staged = StagedBlocks()
    staged.add("gpu", np.array([0], dtype=np.uint64))
    staged.add("gpu", keys(1, 5), [(BlockKey(5), 2)])
    staged.add("cpu", keys(4))

    assert staged.num_blocks() == 3
    assert num_matched(index) == 4
    index.replace(A, staged)
    assert index.match(keys(0, 1, 2, 3, 4), [A])[A] == BlockMatch(4, 2, 5)
    claim.end()
    assert num_matched(index) == 2
    assert staged.num_blocks() == 0


def test_what_is_swapped_out_or_given_up_is_freed_in_slices() -> None:
    """Blocks that were there, and blocks that were loaded in vain."""
    index = BlockIndex()
    index.store(A, keys(0, 1, 2))
    staged, given_up = StagedBlocks(), StagedBlocks()
    staged.add("gpu", keys(1, 2))
    given_up.add("cpu", keys(3))
    index.replace(A, staged)
    index.discard(given_up)

    assert index.match(keys(1), [A])[A] != NO_BLOCKS
    assert [index.sweep(2) for _ in range(2)] == [True, False]
    assert index.num_blocks(A) == 2
