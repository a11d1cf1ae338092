"""The claim of one request on the blocks that it will compute at a candidate."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from policies.view import CandidateId
from router.contracts import BlockKey
from router.index.block_index import Speculation
from router.index.eviction import Use


class Claim(Struct, kw_only=True):
    """Blocks that one request will compute at a candidate, until they are there or it failed."""

    candidate: CandidateId
    keys: Sequence[BlockKey]  # the whole chain
    others: Sequence[BlockKey] = ()  # of other KV groups
    speculation: Speculation | None  # of blocks not there yet; None: none, or they came
    use: Use | None = None  # None: the candidate is not known
    until_s: float | None = None  # None: its request is under way; else it waits for events
    num_held_blocks: int = 0  # on the GPU when it was made, with those being computed
    num_tier_blocks: int = 0  # with those of the cpu tier, even if it does not count
    num_removals: int = 0  # of the candidate, before it was made

    def end(self) -> None:
        """Give the blocks back; a second time does nothing."""
        if self.speculation is not None:
            self.speculation.end()
            self.speculation = None
