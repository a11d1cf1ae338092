"""Whether an engine computes the last block of every hit again, though it is cached: EAGLE, MTP.

What must live here: what is configured, and what answers show. What must not: matches.

Drafts made from the target model's hidden states (methods eagle, eagle3, mtp, dflash, dspark) want
those of the last block, so vLLM drops it from each hit, unless disable_eagle_block_drop is set;
ngram, suffix and draft models do not. Source: SpeculativeConfig.use_eagle_block_drop in
vllm/config/speculative.py, KVCacheCoordinator in vllm/v1/core/kv_cache_coordinator.py, 0.32.0.

No event and no metric says which it is, but each answer does: of an engine that speculates (its
metrics show that it does), and was expected to keep the block

    reported                        so
    a block less than predicted     for it; RUN in a row, and the block is expected to be dropped
    as predicted                    against it: the run begins anew
    anything else                   says nothing: evictions, queues

and the other way round. Each change of mind asks for twice the run before the next.
"""

from __future__ import annotations

from typing import Final

RUN: Final = 6
_MAX_RUN: Final = 384


class LastBlock:
    """What is expected of one candidate.

    Args:
        configured: Whether it drops the block; None: to be found out.
        speculates: Whether its metrics show speculative decoding; else nothing is to be found out.
    """

    __slots__ = ("_is_open", "_needed", "_run", "is_dropped", "num_changes")

    def __init__(self, configured: bool | None, *, speculates: bool) -> None:
        self.is_dropped = configured is True
        self.num_changes = 0
        self._is_open = configured is None and speculates
        self._run = 0
        self._needed = RUN

    @property
    def is_learned(self) -> bool:
        """Whether it was found out, not configured."""
        return self._is_open and self.is_dropped

    def observe(self, num_predicted: int, num_reported: int, block_size: int) -> bool:
        """Note what an engine reused, in tokens; return whether another thing is expected now."""
        if not self._is_open or not num_reported:
            return False
        if num_predicted == num_reported:
            self._run = 0
        elif num_reported == num_predicted + (block_size if self.is_dropped else -block_size):
            self._run += 1
        if self._run < self._needed:
            return False
        self.is_dropped = not self.is_dropped
        self.num_changes += 1
        self._run = 0
        self._needed = min(2 * self._needed, _MAX_RUN)
        return True
