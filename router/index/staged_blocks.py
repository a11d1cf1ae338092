"""A candidate's blocks while they are loaded, to be swapped in when complete.

A million blocks take most of a second to load. They are loaded slice by slice, apart from the
blocks that are matched, so that no request sees half of them. Then `BlockIndex.replace` swaps them
in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from router.contracts import BlockKey
from router.index.copies import TIERS, Copies, Tier, apply_change
from router.messages import TierChange


class StagedBlocks:
    """Blocks of one candidate that are not matched yet.

    Later calls win: add a snapshot, then apply the changes since it was begun.
    """

    __slots__ = ("copies", "retired")

    def __init__(self) -> None:
        self.copies: dict[Tier, Copies] = {tier: {} for tier in TIERS}
        self.retired: list[Copies] = []  # dropped by a clear; the index frees them in slices

    def add(
        self,
        tier: Tier,
        keys: Sequence[BlockKey] | NDArray[np.uint64],
        copies: Iterable[tuple[BlockKey, int]] = (),
    ) -> None:
        """Add blocks with one copy, then those with several.

        Takes 0.1 us a block: give it slices of some 10,000.
        """
        names: Sequence[BlockKey] = keys.tolist() if isinstance(keys, np.ndarray) else keys
        held = self.copies[tier]
        held.update(dict.fromkeys(names, 1))
        held.update(copies)

    def apply(self, changes: Iterable[TierChange], *, cleared: bool = False) -> None:
        """Apply changes made meanwhile; changes of the pool are left out.

        Raises:
            ValueError: packed keys are cut off.
        """
        if cleared:
            self.retired += self.take().values()
        for change in changes:
            if change.tier != "pool":
                apply_change(self.copies[change.tier], change)

    def take(self) -> dict[Tier, Copies]:
        """Return all blocks, and keep none."""
        copies, self.copies = self.copies, {tier: {} for tier in TIERS}
        return copies

    def num_blocks(self, tier: Tier = "gpu") -> int:
        """Count distinct blocks."""
        return len(self.copies[tier])
