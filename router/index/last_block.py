"""Whether an engine computes the last block of every hit again, though it is cached: EAGLE, MTP.

What must live here: what is configured, and what answers show. What must not: matches.

Drafts that are made from the target model's hidden states need those of the last block. So vLLM
drops the last block from each hit, unless `disable_eagle_block_drop` is set. The methods are eagle,
eagle3, mtp, dflash and dspark; from 0.33.0 on dflash and dspark drop nothing. Methods ngram, suffix
and draft models never do. Source: SpeculativeConfig.use_eagle_block_drop in
vllm/config/speculative.py, KVCacheCoordinator in vllm/v1/core/kv_cache_coordinator.py, 0.32.0.

In a model of windows and full attention, the block is dropped in the KV groups that draft. With
EAGLE those are all groups. With MTP it is the group of the last layer. If that has windows, a hit
is as long as if all groups dropped it. If it has full attention, windows keep a block less
(router.index.hit_length).

Engines whose hashes cover the tokens behind a block (`HashContract.lookahead`) drop nothing: their
hit proves the next token. Such hashes overrule what is configured.

Otherwise no event and no metric says which it is, but answers do. The engine must speculate, by its
metrics.

    expected                              reported                 shows
    not dropped                           a block less             dropped in all groups
    dropped, groups of one kind           a block more             not dropped
    dropped in all, groups of both kinds  more                     dropped in full attention
    dropped in full attention, of both    a block less (or more)   dropped in all (or not)

After RUN such answers in a row the expectation changes; each further change needs twice as many. An
answer as predicted ends the row. Other differences show nothing: they are evictions and queues.
What is configured stays; `true` leaves open in which groups.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from router.index.trust import Streak

RUN: Final = 6


class Drop(Enum):
    """Where the last block of a hit is dropped."""

    NOWHERE = 0
    EVERYWHERE = 1
    IN_FULL_ATTENTION = 2


class LastBlock:
    """What is expected of one candidate.

    Args:
        configured: Whether it drops the block; None: to be learned.
        speculates: Whether its metrics show speculative decoding; if not, nothing is learned.
    """

    __slots__ = ("_drop", "_leaning", "_streak", "has_lookahead", "is_open", "num_changes")

    def __init__(self, configured: bool | None, *, speculates: bool) -> None:
        self._drop = Drop.EVERYWHERE if configured else Drop.NOWHERE
        self.has_lookahead = False  # its hashes cover the tokens behind a block: nothing is dropped
        self.num_changes = 0
        self.is_open = configured is None and speculates  # whether it is dropped, is learned
        self._leaning: Drop | None = None  # what the streak shows
        self._streak = Streak(RUN)

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
        """Whether answers showed that it is dropped, not the configuration."""
        return self.is_open and self.is_dropped

    def observe(
        self, num_predicted: int, num_reported: int, block_size: int, *, is_mixed: bool = False
    ) -> bool:
        """Record what an engine reused, in tokens; return whether the expectation changes.

        `is_mixed`: its model has windows and full attention.
        """
        if not num_reported or self.has_lookahead:
            return False
        if num_predicted == num_reported:
            self._streak.end()
            return False
        other = self._shown_by(num_reported - num_predicted, block_size, is_mixed)
        if other is None or not (self.is_open or (self.is_dropped and other is not Drop.NOWHERE)):
            return False
        if other is not self._leaning:
            self._streak.end()
            self._leaning = other
        if not self._streak.add():
            return False
        self.drop = other
        self.num_changes += 1
        return True

    def _shown_by(self, num_more: int, block_size: int, is_mixed: bool) -> Drop | None:
        """Return what an answer shows that reused `num_more` tokens more; None: nothing."""
        if num_more == -block_size and self.drop is not Drop.EVERYWHERE:
            return Drop.EVERYWHERE
        if num_more > 0 and is_mixed and self.drop is Drop.EVERYWHERE:
            return Drop.IN_FULL_ATTENTION
        return Drop.NOWHERE if num_more == block_size and self.is_dropped else None
