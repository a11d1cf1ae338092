"""The Mooncake pools behind one router, and which replicas use which.

A replica is in one pool at most (`Replica.pool`), and each pool has its own master. A single pool,
configured by `mooncake.master`, has the name "".

Their state is shown by /metrics and the admin API.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.host_names import Names
from router.config import MooncakeConfig, ReplicaConfig, pool_of
from router.metrics import Metrics
from router.pool.catalog import PoolCatalog
from router.pool.follower import PoolFollower
from router.pool.layouts import names_in_keys
from router.pool.master import MasterApi
from router.pool.questions import Questions
from router.pool.readers import PoolReaders
from router.replicas.fleet import Fleet
from router.replicas.replica import Entry, Replica, candidates_of
from router.upstream.session import Strays

logger = logging.getLogger(__name__)


class Pool(Struct, frozen=True):
    """One pool: its contents, and the parts that learn them."""

    name: str
    catalog: PoolCatalog
    master: MasterApi
    follower: PoolFollower
    questions: Questions


class Pools(Mapping[str, Pool]):
    """Every configured pool, by name.

    Args:
        entries: The configured replicas: some say whether they read their pool.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        entries: Iterable[Entry],
        *,
        metrics: Metrics,
        names: Names,
        strays: Strays,
    ) -> None:
        said = {entry.name: entry.replica.pool for entry in entries}
        self.readers = PoolReaders(
            {name: reads for name, reads in said.items() if isinstance(reads, bool)}
        )
        self._pools: dict[str, Pool] = {}
        for each in config.each:
            catalog = PoolCatalog()
            master = MasterApi(each.master, names=names, strays=strays)
            self._pools[each.name] = Pool(
                each.name,
                catalog,
                master,
                PoolFollower(catalog, master, config, metrics, name=each.name),
                Questions(
                    catalog,
                    master,
                    timeout_s=config.verify_timeout_s,
                    metrics=metrics,
                    name=each.name,
                ),
            )

    def __getitem__(self, name: str) -> Pool:
        return self._pools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    # ---------------------------------------------------------------- replicas

    def of(self, configured: ReplicaConfig) -> str | None:
        """Name the pool that a replica reads and writes; None: none."""
        return pool_of(configured, tuple(self._pools))

    def attach(
        self, replica: Replica, configured: ReplicaConfig, key_head: str | None = None
    ) -> None:
        """Add a discovered replica to its pool; it is a new process, so it may read the pool.

        `key_head`: `[PREFIX@]MODEL` of its keys, if it reports them.
        """
        pool = configured.pool
        self.readers.configure(replica.name, pool if isinstance(pool, bool) else None)
        if replica.pool is not None:
            self._pools[replica.pool].catalog.add_replica(
                replica.name,
                replica.base_model,
                names_in_keys(replica.models),
                layout=layout_of(configured, key_head),
                kv_dtype=replica.kv_dtype,
            )
        elif self._pools and pool is not False:
            logger.warning(
                "replica names no pool, so it counts as reading none; set replicas[].pool",
                extra={"replica": replica.name, "pools": ",".join(self._pools)},
            )
        for candidate in candidates_of(replica):
            self.readers.forget(candidate.id)

    def detach(self, replica: Replica) -> None:
        """Remove a replica that is gone, or will be another process."""
        if replica.pool is not None:
            self._pools[replica.pool].catalog.remove_replica(replica.name)

    def stored_by(self, replica: Replica) -> Callable[[Sequence[BlockKey]], None] | None:
        """Return what takes the blocks that a replica reports as stored there. None: nothing."""
        if replica.pool is None:
            return None
        catalog = self._pools[replica.pool].catalog
        return partial(catalog.stored, replica.base_model, replica=replica.name)


def layout_of(configured: ReplicaConfig, key_head: str | None) -> str | None:
    """Choose a replica's layout fields: configured ones, else those that it reports.

    Args:
        configured: Its configuration.
        key_head: `[PREFIX@]MODEL` of its keys; None: it does not report them.
    """
    has_prefix = key_head is not None and "@" in key_head
    return configured.pool_layout or (key_head if has_prefix else None)


class PoolStatus:
    """Describes the pools now."""

    def __init__(self, pools: Pools, fleet: Fleet) -> None:
        self._pools = pools
        self._fleet = fleet

    def describe(self, now_s: float) -> list[dict[str, Any]]:
        """Describe them for every view. None: not known."""
        return [self._described(pool, now_s) for pool in self._pools.values()]

    def reads(self, candidate: CandidateId) -> bool | None:
        """Return whether a candidate reads its pool. None: there are no pools."""
        if not self._pools:
            return None
        is_member = self._fleet.members.replica(candidate.partition("#")[0]).pool is not None
        return is_member and self._pools.readers.reads(candidate)

    def _described(self, pool: Pool, now_s: float) -> dict[str, Any]:
        catalog, figures = pool.catalog, pool.catalog.figures
        members = {replica.name for replica in self._members(pool)}
        bytes_per_token = dict(self._bytes_per_token(pool))
        detached = self._pools.readers.detached()
        counts = asdict(catalog.counters)
        return {
            "name": pool.name,  # "": the only one
            "master": pool.master.url,
            "state": "up" if catalog.is_up else "lost",
            "reason": catalog.reason,
            "models": {
                model: {
                    "num_blocks": len(directory),
                    "key_pattern": layout.text if layout is not None else None,
                    "num_ranks": layout.num_ranks if layout is not None else None,
                    "bytes_per_token": bytes_per_token.get(model),  # of KV cache, mean
                }
                for model, directory in catalog.directories.items()
                for layout in (catalog.layouts.get(model),)
            },
            "replicas": sorted(members),
            "detached": [each for each in detached if each.partition("#")[0] in members],
            "listing_age_s": None if catalog.listed_s is None else now_s - catalog.listed_s,
            "allocated_bytes": figures.allocated_bytes if figures is not None else None,
            "capacity_bytes": figures.capacity_bytes if figures is not None else None,
            "fetch_bytes_per_s": dict(self._fetch_speeds(pool, bytes_per_token, now_s)),
            "counts": {name.removeprefix("num_"): count for name, count in counts.items()},
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
