"""What happened to one rank's events, counted since the process started: for `/metrics`."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class HistoryCounters(Struct):
    """Written by History."""

    num_duplicates: int = 0
    num_gaps: int = 0
    num_replays: int = 0
    num_failed_replays: int = 0
    num_truncated: int = 0
    num_restarts: int = 0


class BlockCounters(Struct):
    """Written by RankBlocks."""

    num_stored: int = 0
    num_removed: int = 0
    num_clears: int = 0
    num_missing: int = 0  # removed, but not known as held
    num_recovered: int = 0  # of lost history, proven by a request that reused them
    num_unknown_events: int = 0
    num_unknown_medium: int = 0  # blocks on an unknown tier
    num_other_groups: int = 0  # blocks of KV groups not seen, and of connectors in other groups
    num_other_sizes: int = 0  # blocks of another size than the contract's
    num_untranslated: int = 0
    num_contract_misses: int = 0


class StreamCounters(Struct):
    """Written by RankStream and its parts; read at scrape time."""

    num_batches: int = 0
    num_undecodable: int = 0
    num_failures: int = 0  # of the follower, by an unexpected error
    history: HistoryCounters = msgspec.field(default_factory=HistoryCounters)
    blocks: BlockCounters = msgspec.field(default_factory=BlockCounters)

    def by_name(self) -> dict[str, int]:
        """Return all counts, by name."""
        counts = msgspec.structs.asdict(self)
        history, blocks = counts.pop("history"), counts.pop("blocks")
        return counts | msgspec.structs.asdict(history) | msgspec.structs.asdict(blocks)
