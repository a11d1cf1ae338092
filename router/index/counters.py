"""What happened to one rank's events, counted since the process started: for `/metrics`."""

from __future__ import annotations

from msgspec import Struct


class StreamCounters(Struct):
    """Written by History, RankBlocks and RankStream, which share one; read at scrape time."""

    # batches
    num_batches: int = 0
    num_duplicates: int = 0
    num_undecodable: int = 0
    num_failures: int = 0  # of the follower, by an unexpected error
    # history
    num_gaps: int = 0
    num_replays: int = 0
    num_failed_replays: int = 0
    num_truncated: int = 0
    num_restarts: int = 0
    # blocks
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
