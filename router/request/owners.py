"""Owners: a request about a response goes to the replica that issued it.

    find     when it is read: which replica that is, as this router or Redis knows
    record   when an answer has begun: the id that it brings. Redis has it before the client does
    found    when an answer has begun to a request that no router knew the replica of

A request about an unknown response is placed like any other, and every replica is asked until one
has it (router.request.retry). With tenants it is refused, since the response may be
another caller's. Redis is asked within a deadline, only for ids that are not known here, and twice
before a request is refused; without Redis a router knows the responses that passed through itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

from router.api.responses import issued_in
from router.base.caller import ANYBODY
from router.base.errors import ResponseNotFound, StoreError
from router.cluster.redis_store import RedisStore
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.response_owners import ResponseKey, ResponseOwners, response_key
from router.request.plan import Placement
from router.request.results import Read
from router.upstream import Answer

logger = logging.getLogger(__name__)

_OK: Final = 200
_ASK_AGAIN_S: Final = 0.1


class Owners:
    """Finds the replicas that issued responses.

    Args:
        store: What other routers issued; None: there are no others.
        ttl_s: How long Redis keeps what is issued here.
        is_up: Whether Redis is there; if not, it is not asked.
    """

    def __init__(
        self,
        known: ResponseOwners,
        *,
        registry: Registry,
        fleet: Fleet,
        store: RedisStore | None,
        ttl_s: float,
        is_up: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self._known = known
        self._registry = registry
        self._fleet = fleet
        self._store = store
        self._ttl_s = ttl_s
        self._is_up = is_up
        self._metrics = metrics

    async def find(self, read: Read) -> str | None:
        """Return the replica that issued the response a request names. None: it may go to any.

        Raises:
            ResponseNotFound: that replica is gone; or the response is not known to be its caller's.
        """
        assert read.response_id is not None
        key = _key(read, read.response_id)
        identity, where = self._known.get(key), "here"
        if identity is None:
            identity, where = await self._ask(key), "redis"
        is_anybody = read.inbound.caller is ANYBODY
        if identity is None and not is_anybody and self._store is not None:
            await asyncio.sleep(_ASK_AGAIN_S)  # the router that issued it may be late
            identity = await self._ask(key)
        if identity is None:
            self._metrics.responses_found.labels("unknown").inc()
            if not is_anybody:
                raise ResponseNotFound(read.response_id)
            return None
        entry = self._registry.of_identity(identity)
        if entry is None or not self._fleet.members.listens(entry.name, monotonic()):
            self._metrics.responses_found.labels("gone").inc()
            raise ResponseNotFound(read.response_id)
        self._metrics.responses_found.labels(where).inc()
        return entry.name

    async def _ask(self, key: ResponseKey) -> str | None:
        """Ask Redis; late or failing means unknown."""
        if self._store is None or not self._is_up():
            return None
        try:
            identity = await self._store.records.response_owner(key)
        except StoreError as exc:
            logger.debug("look-up of a response failed", extra={"reason": exc.message})
            return None
        if identity is not None:
            self._known.learn(key, identity)
        return identity

    async def record(self, read: Read, placement: Placement, answer: Answer) -> None:
        """Remember which replica issued the response that an answer brings, in Redis too."""
        if answer.status != _OK:
            return
        response_id = issued_in(answer.readable, is_event_stream=answer.is_event_stream)
        entry = self._registry.find(placement.replica)
        if response_id is None or entry is None:
            return
        key = _key(read, response_id)
        self._known.note(key, entry.identity)
        if self._store is None or not self._is_up():
            return
        try:
            await self._store.records.put_response_owner(key, entry.identity, self._ttl_s)
        except StoreError as exc:  # it is written later, with others
            logger.debug("a response was not stored", extra={"reason": exc.message})
        else:
            self._known.saved({key: entry.identity})

    def found(self, read: Read, placement: Placement, answer: Answer) -> None:
        """Remember which replica had the response that a request names."""
        assert read.response_id is not None
        entry = self._registry.find(placement.replica)
        if answer.outcome_status == _OK and entry is not None:
            self._known.note(_key(read, read.response_id), entry.identity)


def _key(read: Read, response_id: str) -> ResponseKey:
    return response_key(response_id, read.inbound.caller.name or "")
