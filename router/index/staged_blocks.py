"""A candidate's blocks while they are loaded, to be swapped in when complete.

A million blocks take most of a second to load. They are loaded slice by slice, apart from the
blocks that are matched, so that no request sees half of them. Then `BlockIndex.replace` swaps them
in.
"""

from __future__ import annotations

from router.base.messages import TierChange, unpack_keys
from router.index.copies import TIERS, Copies, Tier


class StagedBlocks:
    """Blocks of one candidate that are not matched yet."""

    __slots__ = ("copies",)

    def __init__(self) -> None:
        self.copies: dict[Tier, Copies] = {tier: {} for tier in TIERS}

    def apply(self, change: TierChange) -> int:
        """Apply a change; return how many keys it names. Takes 0.1 us a block."""
        assert change.tier != "pool"
        held = self.copies[change.tier]
        removed, stored = unpack_keys(change.removed), unpack_keys(change.stored)
        for key in removed:
            held.pop(key, None)
        held.update(dict.fromkeys(stored, 1))
        held.update(change.copies)
        return len(removed) + len(stored)

    def take(self) -> dict[Tier, Copies]:
        """Return all blocks, and keep none."""
        copies, self.copies = self.copies, {tier: {} for tier in TIERS}
        return copies

    def num_blocks(self, tier: Tier = "gpu") -> int:
        """Count distinct blocks."""
        return len(self.copies[tier])
