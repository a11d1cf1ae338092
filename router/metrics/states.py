"""What gauges show, described at scrape time on the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct


class RankState(Struct, frozen=True, kw_only=True):
    """What one candidate looks like at scrape time."""

    replica: str  # candidate id: `r1`, `r1#2`
    state: str  # exact | degraded | blind
    healthy: bool
    withheld: dict[str, bool] = {}  # why it gets no new requests -> whether that is so
    num_requests: int
    num_elsewhere: int  # of these, sent by other routers
    num_queued_tokens: int
    queue_ms: float
    num_blocks: dict[str, int]  # tier -> blocks in the index
    events: dict[str, int]  # counter name -> value, since the router started
    cost_error_ms: float
    trust: float  # share of recent audited predictions that were right, 1.0 before the first
    cpu_trust: float | None = None  # the same of its cpu tier; None: nothing was seen of it
    drops_last: bool | None = None  # the last block of a hit; None: its engine does not speculate
    num_sessions: int = 0  # conversations that are alive there
    footprint_ratio: float | None = None  # what they take, of the cache; None: its size is unknown
    num_loss_tokens: int = 0  # that they have only there
    loss_s: float = 0.0  # to compute those again


class SharingState(Struct, frozen=True, kw_only=True):
    """How this router stands to Redis and to other routers at scrape time."""

    is_up: bool
    num_routers: int  # that live, this one included
    num_streams: dict[str, int]  # role -> candidates
    counts: dict[str, int]  # what happened -> how often, since the router started
    reason: str = ""  # why it is not up
    redis: str | None = None  # which server it is, or was last
    roles: dict[str, str] = {}  # candidate -> role


class PoolState(Struct, frozen=True, kw_only=True):
    """What a shared pool looks like at scrape time; None: not known (yet)."""

    name: str = ""  # "": the only one
    is_up: bool
    num_blocks: dict[str, int]  # base model -> blocks in its directory
    counts: dict[str, int]  # counter name -> value, since the router started
    listing_age_s: float | None
    allocated_bytes: int | None
    capacity_bytes: int | None
    bytes_per_token: dict[str, float]  # base model -> of KV cache, mean
    fetch_bytes_per_s: dict[str, float]  # candidate -> fitted from first-token times


class SourceState(Struct, frozen=True, kw_only=True):
    """How a source of replicas stands."""

    name: str
    num_replicas: int  # of its last good answer
    reason: str  # why its last answer was not followed; empty: it was
    age_s: float | None  # of its last good answer; None: there was none
    not_followed: dict[str, str]  # address -> why


class StateSource(Protocol):
    """What describes the replicas and the pool."""

    def rank_states(self) -> Iterable[RankState]:
        """Describe every candidate now."""
        ...

    def pool_states(self) -> Sequence[PoolState]:
        """Describe the shared pools that are configured."""
        ...
