"""What routers share of the shared pool: who lists it, and what each has learned.

One router holds the lease `pool` (`pool@NAME` if the pool has a name) and lists the master's keys.
All routers learn: from the events of engines, from verification. Each writes what it learned, which
needs no lease, and publishes it as notes. The last note about a block counts, our own included.

A router that joins adds what Redis has to what it knows, and publishes what Redis lacks. The next
listing removes what is stale.
"""

from __future__ import annotations

import logging
from typing import Final

from router.base.messages import (
    Delta,
    PoolChanged,
    StreamId,
    TierChange,
    pack_keys,
    pool_lister,
    pool_stream,
)
from router.cluster.redis_store import RedisStore
from router.pool.catalog import PoolCatalog
from router.pool.directory import PoolDirectory
from router.pool.follower import PoolFollower

logger = logging.getLogger(__name__)

_MAX_KEYS: Final = 50_000  # in one delta


class PoolShare:
    """A pool's directories among routers.

    Args:
        follower: Lists the master's keys, or does not.
        name: The pool's; "" is the only one.
    """

    def __init__(self, pool: PoolCatalog, follower: PoolFollower, name: str = "") -> None:
        self.lister = pool_lister(name)  # the lease of the router that lists the master's keys
        self._name = name
        self._pool = pool
        self._follower = follower
        self._joined: set[str] = set()  # models whose directory was merged with what Redis has
        self._is_up = False
        self._rest: list[Delta] = []  # what Redis lacks, to be published

    def held(self, held: frozenset[StreamId] | None) -> None:
        """Record whether listing is ours; None: Redis is gone, and every router lists."""
        is_lister = held is None or self.lister in held
        if is_lister != self._follower.is_lister:
            self._follower.is_lister = is_lister
            self._pool.wants_listing = True
            logger.info(
                "this router lists the pool" if is_lister else "another router lists the pool"
            )

    def came_up(self) -> None:
        """Begin to note what we learn: Redis is there."""
        self._is_up = True
        self._joined.clear()
        self._rest.clear()

    def went_down(self) -> None:
        """Publish nothing: Redis is gone."""
        self._is_up = False
        for directory in self._pool.directories.values():
            directory.journal(False)
        self.held(None)

    async def join(self, store: RedisStore) -> None:
        """Merge directories with what Redis has, each once.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        for model, directory in list(self._pool.directories.items()):
            if model not in self._joined:
                self._joined.add(model)
                directory.journal(True)
                await self._merge(store, model, directory)

    async def _merge(self, store: RedisStore, model: str, directory: PoolDirectory) -> None:
        stream_id = pool_stream(model, self._name)
        shared: set[int] = set()
        async for blocks in (await store.pool_snapshot([stream_id])).slices():
            for keys in blocks.values():
                shared.update(keys.tolist())
                directory.apply(TierChange("pool", stored=keys.astype("<u8").tobytes()))
        lacking = [key for key in directory.keys() if key not in shared]
        for start in range(0, len(lacking), _MAX_KEYS):
            stored = pack_keys(lacking[start : start + _MAX_KEYS])
            self._rest.append(self._delta(model, TierChange("pool", stored=stored)))
        self._pool.wants_listing = True

    def take(self) -> list[Delta]:
        """Return what we learned since the last call."""
        deltas, self._rest = self._rest, []
        for model in self._joined if self._is_up else ():
            change = self._pool.directories[model].take_changes()
            if change is not None:
                deltas.append(self._delta(model, change))
        return deltas

    def apply(self, note: PoolChanged) -> None:
        """Apply what a router learned."""
        own = pool_stream("", self._name)
        directory = self._pool.directories.get(note.stream_id.removeprefix(own))
        if directory is None or not note.stream_id.startswith(own):
            return
        try:
            directory.apply(note.change)
        except ValueError:
            logger.warning("a note of the pool is not valid", extra={"stream": note.stream_id})

    def _delta(self, model: str, change: TierChange) -> Delta:
        return Delta(stream_id=pool_stream(model, self._name), changes=(change,))
