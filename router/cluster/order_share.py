"""Shares what operators ordered, of every kind that there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from router.base.errors import StoreFull
from router.base.messages import Registered
from router.cluster.redis_store import RedisStore

T = TypeVar("T")

_ORDERS_S: Final = 0.1  # how soon an order given here is stored
FULL_S: Final = 1.0  # how soon Redis is asked again for what it had no room for


class Orders(Struct, Generic[T], frozen=True, kw_only=True):
    """The orders of one kind, by name.

    key: The hash in Redis that has them.
    decode: Reads one; ValueError: it is malformed.
    known: All that are known here, for a Redis that lost them.
    unsaved: Those given here that Redis does not have yet.
    saved: Called with what Redis has now.
    apply: Follows what Redis has.
    """

    key: str
    decode: Callable[[bytes], T]
    known: Callable[[], Mapping[str, T]]
    unsaved: dict[str, T]
    saved: Callable[[str, T], None]
    apply: Callable[[Mapping[str, T]], object]


class OrderShare:
    """The orders of all kinds, and when they are read and stored."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._kinds: list[Orders[Any]] = []
        self.must_read = asyncio.Event()  # another router has stored an order

    def add(self, orders: Orders[Any]) -> None:
        """Share a kind of orders, too; before `run`."""
        self._kinds.append(orders)

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
        for orders in self._kinds:
            for name, order in list(orders.unsaved.items()):
                await self._store.records.put_order(orders.key, name, order)
                orders.saved(name, order)
                await self._store.publish((Registered(),))

    async def read(self) -> None:
        """Follow what was ordered elsewhere; what Redis has lost of it is stored again."""
        for orders in self._kinds:
            stored = await self._store.records.orders(orders.key, orders.decode)
            orders.apply(stored)
            for name, order in orders.known().items():
                if name not in stored:
                    orders.unsaved.setdefault(name, order)
