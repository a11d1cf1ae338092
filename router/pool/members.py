"""Which replicas belong to which shared pool: noted when a replica is found."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from router.config import ReplicaConfig, pool_of
from router.pool.keys import names_in_keys
from router.pool.pools import Pool
from router.pool.readers import PoolReaders
from router.replicas.replica import Replica, candidates_of

logger = logging.getLogger(__name__)


class PoolMembers:
    """Attaches replicas to the pools there are, none of them included."""

    def __init__(self, pools: Mapping[str, Pool], readers: PoolReaders) -> None:
        self._pools = pools
        self._readers = readers

    def pool_of(self, configured: ReplicaConfig) -> str | None:
        """Name the pool that a replica reads and writes; None: none."""
        return pool_of(configured, tuple(self._pools))

    def detach(self, replica: Replica) -> None:
        """Note that the replica is not there, or will be another process."""
        if replica.pool is not None:
            self._pools[replica.pool].catalog.remove_replica(replica.name)

    def attach(self, replica: Replica, configured: ReplicaConfig) -> None:
        """Note what the replica's objects in its pool may be called; forget whether it reads it."""
        said = configured.pool
        self._readers.configure(replica.name, said if isinstance(said, bool) else None)
        if replica.pool is not None:
            self._pools[replica.pool].catalog.add_model(
                replica.base_model,
                names_in_keys(replica.models),
                replica=replica.name,
                layout=configured.pool_layout,
                kv_dtype=replica.kv_dtype,
            )
        elif self._pools and said is not False:
            logger.warning(
                "replica names no pool, so it counts as reading none; set replicas[].pool",
                extra={"replica": replica.name, "pools": ",".join(self._pools)},
            )
        for candidate in candidates_of(replica):
            self._readers.forget(candidate.id)
            for pool in self._pools.values():
                pool.catalog.forget(candidate.id)
