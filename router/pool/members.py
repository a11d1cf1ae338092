"""Which replicas use which shared pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from router.config import ReplicaConfig, pool_of
from router.pool.keys import names_in_keys
from router.pool.pools import Pool
from router.pool.readers import PoolReaders
from router.replicas.replica import Replica, candidates_of

logger = logging.getLogger(__name__)


def layout_of(configured: ReplicaConfig, key_head: str | None) -> str | None:
    """Choose a replica's layout fields: configured ones, else those that it reports.

    Args:
        configured: Its configuration.
        key_head: `[PREFIX@]MODEL` of its keys; None: it does not report them.
    """
    has_prefix = key_head is not None and "@" in key_head
    return configured.pool_layout or (key_head if has_prefix else None)


class PoolMembers:
    """Attaches replicas to their pools, if there are any."""

    def __init__(self, pools: Mapping[str, Pool], readers: PoolReaders) -> None:
        self._pools = pools
        self._readers = readers

    def pool_of(self, configured: ReplicaConfig) -> str | None:
        """Name the pool that a replica reads and writes; None: none."""
        return pool_of(configured, tuple(self._pools))

    def detach(self, replica: Replica) -> None:
        """Remove a replica that is gone, or will be another process."""
        if replica.pool is not None:
            self._pools[replica.pool].catalog.remove_replica(replica.name)

    def attach(
        self, replica: Replica, configured: ReplicaConfig, key_head: str | None = None
    ) -> None:
        """Add a discovered replica to its pool; it is a new process, so it may read the pool.

        `key_head`: `[PREFIX@]MODEL` of its keys, if it reports them.
        """
        pool = configured.pool
        self._readers.configure(replica.name, pool if isinstance(pool, bool) else None)
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
            self._readers.forget(candidate.id)
