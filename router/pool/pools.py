"""The Mooncake pools behind one router, and which replicas use which.

A replica is in one pool at most (`Replica.pool`), and each pool has its own master. A single pool,
configured by `mooncake.master`, has the name "".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct

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
