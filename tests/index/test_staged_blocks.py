"""Blocks loaded into an index: swapped in whole, freed in slices."""

from __future__ import annotations

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.messages import SharedTier, TierChange, pack_keys
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch
from router.index.staged_blocks import StagedBlocks
from tests.samples import keys

A = CandidateId("a")


def stored(tier: SharedTier, *named: int) -> TierChange:
    return TierChange(tier, pack_keys(keys(*named)))


def num_matched(index: BlockIndex, num_blocks: int = 9) -> int:
    return index.match(keys(*range(num_blocks)), [A])[A].num_gpu_blocks


def test_a_snapshot_is_swapped_in_whole_and_claims_live_on() -> None:
    index = BlockIndex()
    index.store(A, keys(0, 1, 2, 3))
    claim = index.speculate(A, keys(2, 3))
    staged = StagedBlocks()
    staged.apply(stored("gpu", 0, 9))
    staged.apply(TierChange("gpu", pack_keys(keys(1, 5)), pack_keys(keys(9)), ((BlockKey(5), 2),)))
    staged.apply(stored("cpu", 4))

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
    staged.apply(stored("gpu", 1, 2))
    given_up.apply(stored("cpu", 3))
    index.replace(A, staged)
    index.discard(given_up)

    assert index.match(keys(1), [A])[A] != NO_BLOCKS
    assert [index.sweep(2) for _ in range(2)] == [True, False]
    assert index.num_blocks(A) == 2
