"""The state of the pools, for /metrics and the admin API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict

from policies.view import CandidateId
from router.metrics import PoolState
from router.pool.pools import Pool, Pools
from router.replicas.fleet import Fleet
from router.replicas.replica import Replica


class PoolStatus:
    """Describes the pools now."""

    def __init__(self, pools: Pools, fleet: Fleet) -> None:
        self._pools = pools
        self._fleet = fleet

    def states(self, now_s: float) -> list[PoolState]:
        """Describe them for /metrics."""
        return [self._state(pool, now_s) for pool in self._pools.values()]

    def describe(self, now_s: float) -> list[dict[str, Any]]:
        """Describe them for people: /admin/pool."""
        return [self._described(pool, now_s) for pool in self._pools.values()]

    def reads(self, candidate: CandidateId) -> bool | None:
        """Return whether a candidate reads its pool. None: there are no pools."""
        if not self._pools:
            return None
        is_member = self._fleet.members.replica(candidate.partition("#")[0]).pool is not None
        return is_member and self._pools.readers.reads(candidate)

    def _state(self, pool: Pool, now_s: float) -> PoolState:
        catalog = pool.catalog
        bytes_per_token = dict(self._bytes_per_token(pool))
        counts = asdict(catalog.counters)
        return PoolState(
            name=pool.name,
            is_up=catalog.is_up,
            num_blocks={model: len(found) for model, found in catalog.directories.items()},
            counts={name.removeprefix("num_"): count for name, count in counts.items()},
            listing_age_s=None if catalog.listed_s is None else now_s - catalog.listed_s,
            allocated_bytes=catalog.figures.allocated_bytes if catalog.figures else None,
            capacity_bytes=catalog.figures.capacity_bytes if catalog.figures else None,
            bytes_per_token=bytes_per_token,
            fetch_bytes_per_s=dict(self._fetch_speeds(pool, bytes_per_token, now_s)),
        )

    def _described(self, pool: Pool, now_s: float) -> dict[str, Any]:
        catalog, state = pool.catalog, self._state(pool, now_s)
        members = {replica.name for replica in self._members(pool)}
        detached = self._pools.readers.detached()
        return {
            "name": pool.name,
            "master": pool.master.url,
            "state": "up" if catalog.is_up else "lost",
            "reason": catalog.reason,
            "models": {
                model: {
                    "num_blocks": len(directory),
                    "key_pattern": layout.text if layout is not None else None,
                    "num_ranks": layout.num_ranks if layout is not None else None,
                    "bytes_per_token": state.bytes_per_token.get(model),
                }
                for model, directory in catalog.directories.items()
                for layout in (catalog.layouts.get(model),)
            },
            "replicas": sorted(members),
            "detached": [each for each in detached if each.partition("#")[0] in members],
            "listing_age_s": state.listing_age_s,
            "allocated_bytes": state.allocated_bytes,
            "capacity_bytes": state.capacity_bytes,
            "fetch_bytes_per_s": state.fetch_bytes_per_s,
            "counts": state.counts,
        }

    def _members(self, pool: Pool) -> list[Replica]:
        return [replica for replica in self._fleet.members.replicas if replica.pool == pool.name]

    def _bytes_per_token(self, pool: Pool) -> Iterator[tuple[str, float]]:
        sizes = {replica.base_model: replica.block_size for replica in self._members(pool)}
        for model in pool.catalog.directories:
            per_block, block_size = pool.catalog.bytes_per_block(model), sizes.get(model)
            if per_block is not None and block_size:
                yield model, per_block / block_size

    def _fetch_speeds(
        self, pool: Pool, bytes_per_token: dict[str, float], now_s: float
    ) -> Iterator[tuple[str, float]]:
        models = {replica.name: replica.base_model for replica in self._members(pool)}
        for status in self._fleet.load.status(now_s):
            size = bytes_per_token.get(models.get(status.replica, ""))
            if size is not None and status.cost.ms_per_fetched_token > 0:
                yield status.id, size / status.cost.ms_per_fetched_token * 1000
