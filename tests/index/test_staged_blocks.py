"""Blocks loaded into an index: swapped in whole, freed in slices."""

from __future__ import annotations

import numpy as np

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.index.block_index import NO_BLOCKS, BlockIndex, BlockMatch
from router.index.staged_blocks import StagedBlocks
from tests.samples import keys

A = CandidateId("a")


def num_matched(index: BlockIndex, num_blocks: int = 9) -> int:
    return index.match(keys(*range(num_blocks)), [A])[A].num_gpu_blocks


def test_a_snapshot_is_swapped_in_whole_and_claims_live_on() -> None:
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
