"""What routers tell one another of the shared pool: who lists it, and what each has learned.

One router holds the lease `pool` and lists the master's keys. All learn: from the events of the
engines they follow, from verification. What any of them learns it writes without a lease: that a
block is there, or is not, is no replica's secret, and the last word in the log counts, for our own
entries come back in their place among the others'.

A router that joins adds what Redis has to what it knows, and tells the rest what Redis lacks. What
is stale of either goes with the next listing.
"""

from __future__ import annotations

import logging
from typing import Final

from router.cluster.redis_store import RedisStore
from router.messages import Delta, FeedId, TierChange, pack_keys, pool_feed
from router.pool.catalog import PoolCatalog
from router.pool.directory import PoolDirectory
from router.pool.follower import PoolFollower

logger = logging.getLogger(__name__)

LISTER: Final = FeedId("pool")
"""The lease of the router that lists the master's keys."""

_MAX_KEYS: Final = 50_000  # told in one delta


class PoolShare:
    """The pool's directories among routers.

    Args:
        follower: Lists the master's keys, or does not.
    """

    def __init__(self, pool: PoolCatalog, follower: PoolFollower) -> None:
        self._pool = pool
        self._follower = follower
        self._joined: set[str] = set()  # models whose directory has met what Redis has
        self._is_up = False
        self._rest: list[Delta] = []  # what Redis lacks, to be told

    def held(self, held: frozenset[FeedId] | None) -> None:
        """Learn whether listing is ours; None: Redis is gone, and everybody lists."""
        is_lister = held is None or LISTER in held
        if is_lister != self._follower.is_lister:
            self._follower.is_lister = is_lister
            self._pool.wants_listing = True
            logger.info("we list the pool" if is_lister else "another router lists the pool")

    def came_up(self) -> None:
        """Redis is there (again): begin to note what we learn."""
        self._is_up = True
        self._joined.clear()
        self._rest.clear()

    def went_down(self) -> None:
        """Redis is gone: nobody is told."""
        self._is_up = False
        for directory in self._pool.directories.values():
            directory.journal(False)
        self.held(None)

    async def join(self, store: RedisStore) -> None:
        """Bring the directories together that have not met what Redis has.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        for model, directory in list(self._pool.directories.items()):
            if model not in self._joined:
                self._joined.add(model)
                directory.journal(True)
                await self._meet(store, model, directory)

    async def _meet(self, store: RedisStore, model: str, directory: PoolDirectory) -> None:
        feed = pool_feed(model)
        shared: set[int] = set()
        async for blocks in (await store.snapshot([feed])).slices():
            for keys in blocks.values():
                shared.update(keys.tolist())
                directory.apply(TierChange("pool", stored=keys.astype("<u8").tobytes()))
        lacking = [key for key in directory.keys() if key not in shared]
        for start in range(0, len(lacking), _MAX_KEYS):
            stored = pack_keys(lacking[start : start + _MAX_KEYS])
            self._rest.append(_delta(model, TierChange("pool", stored=stored)))
        self._pool.wants_listing = True

    def take(self) -> list[Delta]:
        """Hand out what we learned, as deltas that need no lease."""
        deltas, self._rest = self._rest, []
        for model in self._joined if self._is_up else ():
            change = self._pool.directories[model].take_changes()
            if change is not None:
                deltas.append(_delta(model, change))
        return deltas

    def apply(self, delta: Delta) -> None:
        """Learn what a router learned; our own words, too, in the order of the log."""
        for change in delta.changes:
            if change.tier != "pool":
                continue
            model = (delta.pool or delta.feed).removeprefix("pool/")
            directory = self._pool.directories.get(model)
            if directory is not None:
                try:
                    directory.apply(change)
                except ValueError:
                    logger.warning("a delta of the pool is not understood", extra={"model": model})


def _delta(model: str, change: TierChange) -> Delta:
    return Delta(pool_feed(model), 0, changes=(change,), pool=pool_feed(model))
