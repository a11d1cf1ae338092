"""A candidate's blocks while they are loaded, to be swapped in when complete.

A million blocks take most of a second to load. They are loaded slice by slice, apart from the
blocks that are matched, so that no request sees half of them. Then `BlockIndex.replace` swaps them
in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from router.base.contracts import BlockKey
from router.index.copies import TIERS, Copies, Tier


class StagedBlocks:
    """Blocks of one candidate that are not matched yet."""

    __slots__ = ("copies",)

    def __init__(self) -> None:
        self.copies: dict[Tier, Copies] = {tier: {} for tier in TIERS}

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

    def take(self) -> dict[Tier, Copies]:
        """Return all blocks, and keep none."""
        copies, self.copies = self.copies, {tier: {} for tier in TIERS}
        return copies

    def num_blocks(self, tier: Tier = "gpu") -> int:
        """Count distinct blocks."""
        return len(self.copies[tier])
