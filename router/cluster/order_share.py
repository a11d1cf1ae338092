"""Shares what operators ordered about replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from router.base.errors import StoreFull
from router.base.messages import Registered, ReplicaRecord
from router.cluster.redis_store import RedisStore
from router.replicas.registry import Registry

_ORDERS_S: Final = 0.1  # how soon an order given here is stored
FULL_S: Final = 1.0  # how soon Redis is asked again for what it had no room for


class OrderShare:
    """The registry's orders, and when they are read and stored.

    Args:
        apply: Follows what Redis has.
    """

    def __init__(
        self,
        store: RedisStore,
        registry: Registry,
        apply: Callable[[Mapping[str, ReplicaRecord]], object],
    ) -> None:
        self._store = store
        self._registry = registry
        self._apply = apply
        self.must_read = asyncio.Event()  # another router has stored an order

    async def run(self) -> None:
        """Store what is ordered here; read what was ordered elsewhere."""
        while True:
            try:
                await self._store_all()
            except StoreFull:
                await asyncio.sleep(FULL_S)
            try:
                async with asyncio.timeout(_ORDERS_S):
                    await self.must_read.wait()
            except TimeoutError:
                continue
            self.must_read.clear()
            await self.read()

    async def _store_all(self) -> None:
        for identity, record in list(self._registry.unsaved.items()):
            await self._store.records.put_order(identity, record)
            self._registry.saved(identity, record)
            await self._store.publish((Registered(),))

    async def read(self) -> None:
        """Follow what was ordered elsewhere; what Redis has lost of it is stored again."""
        stored = await self._store.records.orders()
        self._apply(stored)
        for identity, record in self._registry.records.items():
            if identity not in stored:
                self._registry.unsaved.setdefault(identity, record)
