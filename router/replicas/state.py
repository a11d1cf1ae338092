"""A replica as people see it: one record, which `router.discovery.status` builds.

Every view is made of its fields:

    /admin/replicas, `warmroute replicas`     `ReplicaState.shown`
    /metrics                                  `router.metrics.families.REPLICA`
    live page, `warmroute status`             `router.observers.live.replica_rows`
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from router.base.contracts import HashContract
from router.replicas.candidate_state import CandidateStatus
from router.replicas.replica import Entry, Replica

ON_PURPOSE: Final = ("draining", "asleep", "paused")
"""States in which a replica gets no new requests, and nothing is wrong with it."""


class RankState(Struct, frozen=True, kw_only=True):
    """One candidate of a replica. None: not known, if nothing else is said."""

    replica: Replica
    may_be_chosen: bool  # by its health and by orders
    has_several_engines: bool  # that answer at its address in turn
    status: CandidateStatus  # its load
    cache: str  # how well its cache is known: exact | degraded | blind
    reason: str  # why it is not exact
    contract: HashContract | None
    num_gpu_blocks: int  # in the index
    num_cpu_blocks: int
    trust: float  # share of recent audited predictions that were right, 1.0 before the first
    cpu_trust: float | None  # the same of its cpu tier
    not_understood: list[str]  # kinds of prompts whose blocks are not found
    drops_last_block: bool  # of each hit (EAGLE, MTP)
    num_sessions: int  # conversations that are alive there
    num_live_tokens: float  # that they need
    capacity_tokens: int | None  # of its cache
    reads_pool: bool | None  # None: there is no pool
    events: dict[str, int]  # counter name -> value, since the router started

    @property
    def withheld(self) -> dict[str, bool]:
        """Why it gets no new requests -> whether that is so."""
        orders = {name: getattr(self.replica, name) for name in ON_PURPOSE}
        return {**orders, "stalled": self.status.state == "stalled"}

    @property
    def footprint_ratio(self) -> float | None:
        """Size of the live conversations as a share of its cache; None: its size is unknown."""
        return self.num_live_tokens / self.capacity_tokens if self.capacity_tokens else None

    @property
    def fill_ratio(self) -> float | None:
        """Blocks in the index as a share of its cache; None: its size is unknown."""
        num_blocks = self.replica.num_blocks
        return self.num_gpu_blocks / num_blocks if num_blocks else None

    def shown(self) -> dict[str, Any]:
        """Return the fields of /admin/replicas; a reader has the others in those of its replica."""
        return {name: getattr(self, name) for name in _SHOWN}


_NOT_SHOWN: Final = ("replica", "may_be_chosen", "num_live_tokens", "capacity_tokens")
_SHOWN: Final = [name for name in RankState.__struct_fields__ if name not in _NOT_SHOWN]


class ReplicaState(Struct, frozen=True, kw_only=True):
    """One replica, found or not."""

    entry: Entry
    left_s: float | None  # of its evacuation; None: there is none
    replica: Replica | None  # None: not found
    waiting_for: str  # why it is not found
    ranks: list[RankState]

    def shown(self) -> dict[str, Any]:
        """Return the fields of /admin/replicas."""
        entry, replica = self.entry, self.replica
        fields: dict[str, Any] = {
            "name": entry.name,
            "url": entry.replica.url,
            "draining": entry.draining,
            "leaving": entry.leaving,
        }
        if entry.source is not None:
            fields |= {"source": entry.source, "ready": entry.is_ready}
        if self.left_s is not None:
            fields["evacuation"] = self._evacuation(self.left_s)
        if replica is None:
            return fields | {"waiting_for": self.waiting_for}
        ports = replica.event_ports
        return fields | {
            "replica": replica,
            "warning": ports.why_doubtful() if ports is not None else None,
            "ranks": [rank.shown() for rank in self.ranks],
        }

    def _evacuation(self, left_s: float) -> dict[str, Any]:
        """Describe how far it is. It is over if nothing is there that could stay."""
        num_sessions = sum(rank.num_sessions for rank in self.ranks)
        num_requests = sum(rank.status.num_requests for rank in self.ranks)
        return {
            "sessions": num_sessions,
            "requests": num_requests,
            "left_s": round(left_s, 3),
            "is_over": not num_requests and (not num_sessions or not left_s),
        }
