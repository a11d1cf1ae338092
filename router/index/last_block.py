"""Whether an engine computes the last block of every hit again, though it is cached: EAGLE, MTP.

What must live here: what is configured, and what answers show. What must not: matches.

Drafts made from the target model's hidden states (methods eagle, eagle3, mtp, dflash, dspark) want
those of the last block, so vLLM drops it from each hit, unless disable_eagle_block_drop is set;
ngram, suffix and draft models do not. Source: SpeculativeConfig.use_eagle_block_drop in
vllm/config/speculative.py, KVCacheCoordinator in vllm/v1/core/kv_cache_coordinator.py, 0.32.0.

Where a model has windows and full attention, it is dropped in the KV groups that draft: with EAGLE
in all; with MTP in that of the last layer, be it the windows' (as far as a hit goes, that is as if
in all) or full attention's, where windows keep a block less (router.index.hit_length).

From 0.33.0 on, dflash and dspark drop nothing. Nor do engines whose hashes cover the tokens behind
a block (`HashContract.lookahead`): their hit proves the next token. Such hashes overrule what is
configured.

Otherwise no event and no metric says which it is, but each answer does. An engine that speculates
(its metrics show it) and was expected to

    keep the block                       reported a block less than predicted   it is dropped in all
    drop it, of one kind of groups       a block more                           it is kept
    drop it in all, of both kinds        more                                   in full attention
    drop it in full attention, of both   a block less; a block more             in all; it is kept

RUN such answers in a row, and the other thing is expected. One that is as predicted begins the run
anew; what differs otherwise says nothing: evictions, queues. Each change of mind asks for twice the
run before the next. What is configured stands; where it is dropped, `true` does not say.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

RUN: Final = 6
_MAX_RUN: Final = 384


class Drop(Enum):
    """Where the last block of a hit is dropped."""

    NOWHERE = 0
    EVERYWHERE = 1
    IN_FULL_ATTENTION = 2


class LastBlock:
    """What is expected of one candidate.

    Args:
        configured: Whether it drops the block; None: to be found out.
        speculates: Whether its metrics show speculative decoding; else nothing is to be found out.
    """

    __slots__ = ("_drop", "_leaning", "_needed", "_run", "has_lookahead", "is_open", "num_changes")

    def __init__(self, configured: bool | None, *, speculates: bool) -> None:
        self._drop = Drop.EVERYWHERE if configured else Drop.NOWHERE
        self.has_lookahead = False  # its hashes cover the tokens behind a block: nothing is dropped
        self.num_changes = 0
        self.is_open = configured is None and speculates  # whether it is dropped, is found out
        self._leaning: Drop | None = None  # what the run speaks for
        self._run = 0
        self._needed = RUN

    @property
    def drop(self) -> Drop:
        """Where it is dropped."""
        return Drop.NOWHERE if self.has_lookahead else self._drop

    @drop.setter
    def drop(self, drop: Drop) -> None:
        self._drop = drop

    @property
    def is_dropped(self) -> bool:
        """Whether it is dropped anywhere."""
        return self.drop is not Drop.NOWHERE

    @property
    def is_learned(self) -> bool:
        """Whether it was found out that it is dropped, not configured."""
        return self.is_open and self.is_dropped

    def observe(
        self, num_predicted: int, num_reported: int, block_size: int, *, is_mixed: bool = False
    ) -> bool:
        """Note what an engine reused, in tokens; return whether another thing is expected now.

        `is_mixed`: its model has windows and full attention.
        """
        if not num_reported or self.has_lookahead:
            return False
        if num_predicted == num_reported:
            self._run = 0
            return False
        other = self._spoken_for(num_reported - num_predicted, block_size, is_mixed)
        if other is None or not (self.is_open or (self.is_dropped and other is not Drop.NOWHERE)):
            return False
        self._run = self._run + 1 if other is self._leaning else 1
        self._leaning = other
        if self._run < self._needed:
            return False
        self.drop = other
        self.num_changes += 1
        self._run = 0
        self._needed = min(2 * self._needed, _MAX_RUN)
        return True

    def _spoken_for(self, num_more: int, block_size: int, is_mixed: bool) -> Drop | None:
        """Return what an answer speaks for that reused so many tokens more; None: nothing."""
        if num_more == -block_size and self.drop is not Drop.EVERYWHERE:
            return Drop.EVERYWHERE
        if num_more > 0 and is_mixed and self.drop is Drop.EVERYWHERE:
            return Drop.IN_FULL_ATTENTION
        return Drop.NOWHERE if num_more == block_size and self.is_dropped else None
