"""What is behind a candidate's cache: blocks that its engine reads back after their eviction."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from policies.view import CandidateId, CostModel


class Behind(NamedTuple):
    """Blocks from which a candidate reads what its cache has evicted: its CPU tier, or the pool."""

    num_blocks: int
    is_full: bool = False  # it has evicted some
    num_disk_blocks: int = 0  # of these, on SSD only
    sharers: Collection[CandidateId] = ()  # of a pool; empty: it is a CPU tier

    def ms_per_token(self, model: CostModel) -> float:
        """Return what reading a token takes."""
        if not self.sharers:
            return model.ms_per_cpu_token
        on_disk = self.num_disk_blocks / self.num_blocks
        return (1.0 - on_disk) * model.ms_per_fetched_token + on_disk * model.ms_per_disk_token


NOTHING_BEHIND = Behind(0)
