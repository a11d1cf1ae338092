"""Stores sessions and responses, for other routers and for a router that starts."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from router.base.errors import StoreFull
from router.cluster.order_share import FULL_S
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_store import RedisStore
from router.replicas.response_owners import ResponseOwners

_SESSIONS_S: Final = 1.0
_RESPONSES_S: Final = 0.02  # how soon a response is stored


class RecordShare:
    """Which replica a session had its last turn at, and which one issued a response.

    Args:
        ttl_s: How long Redis keeps them.
    """

    def __init__(
        self,
        store: RedisStore,
        *,
        peers: Peers,
        outbox: Outbox,
        responses: ResponseOwners,
        ttl_s: float,
    ) -> None:
        self._store = store
        self._peers = peers
        self._outbox = outbox
        self._responses = responses
        self._ttl_s = ttl_s

    async def store_sessions(self) -> None:
        """Read the sessions there are, then store those that had a turn here, for ever.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        async for session_hash, state in self._store.records.sessions():
            self._peers.learn_sessions({session_hash: state}, time.monotonic())
        while True:
            with suppress(StoreFull):  # their next turn stores them
                while sessions := self._outbox.take_sessions():
                    await self._store.records.put_sessions(sessions, self._ttl_s)
            await asyncio.sleep(_SESSIONS_S)

    def store_responses_again(self) -> None:
        """Store what was issued here once more: Redis may have lost it."""
        self._responses.lost()

    async def store_responses(self) -> None:
        """Store which replicas issued the responses that came through here, for ever.

        Raises:
            StoreError: Redis is gone or will not do.
        """
        while True:
            try:
                while owners := self._responses.unsaved():
                    await self._store.records.put_response_owners(owners, self._ttl_s)
                    self._responses.saved(owners)
            except StoreFull:
                await asyncio.sleep(FULL_S)
            await asyncio.sleep(_RESPONSES_S)
