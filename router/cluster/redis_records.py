"""What a namespace keeps beside blocks and load: sessions, responses, orders."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Final

from router.base.messages import (
    MAX_ORDERS,
    ReplicaRecord,
    SessionState,
    decode_record,
    decode_session,
    encode,
)
from router.cluster import redis_scripts as scripts
from router.cluster.redis_connection import RedisConnection, Word
from router.cluster.redis_scripts import Scripts
from router.replicas.response_owners import ResponseKey

_SESSIONS_A_CALL: Final = 500
_MAX_IDENTITY: Final = 1_024
OWNER_TIMEOUT_S: Final = 0.25  # a request waits; elsewhere than at its owner it would be in vain


class RedisRecords:
    """A part of `RedisStore`; raises what that does. `base` begins every key."""

    def __init__(
        self, connection: RedisConnection, store: Scripts, base: str, *, timeout_s: float
    ) -> None:
        self._connection = connection
        self._scripts = store
        self._base = base
        self._timeout_s = timeout_s
        self.num_garbage = 0  # see RedisStore

    async def put_sessions(self, sessions: Mapping[int, SessionState], ttl_s: float) -> None:
        """Write sessions; each is forgotten after `ttl_s` unless it is written again."""
        words: list[Word] = []
        for session, state in sessions.items():
            words += (session, encode(state))
        step = 2 * _SESSIONS_A_CALL
        for at in range(0, len(words), step):
            await self._scripts.run(scripts.REMEMBER, max(1, round(ttl_s)), *words[at : at + step])

    async def sessions(self) -> AsyncIterator[tuple[int, SessionState]]:
        """Yield all sessions, some perhaps twice."""
        position = b"0"
        while True:
            position, _, flat = await self._scripts.run(
                scripts.SESSIONS, position, _SESSIONS_A_CALL
            )
            for session, state in zip(flat[::2], flat[1::2], strict=True):
                try:
                    found = int(session[:24]), decode_session(state)
                except ValueError:
                    self.num_garbage += 1
                    continue
                yield found
            if position == b"0":
                return

    async def put_response_owners(self, owners: Mapping[ResponseKey, str], ttl_s: float) -> None:
        """Write which replicas issued responses, each for `ttl_s`."""
        ttl = max(1, round(ttl_s))
        commands = [("SET", self._response(key), owners[key], "EX", ttl) for key in owners]
        for value in await self._connection.ask_all(commands):
            if isinstance(value, Exception):
                raise await self._connection.refusal(value)

    async def put_response_owner(self, key: ResponseKey, identity: str, ttl_s: float) -> None:
        """Write which replica issued a response whose client waits; soon, or StoreUnavailable."""
        timeout_s = min(OWNER_TIMEOUT_S, self._timeout_s)
        words = ("SET", self._response(key), identity, "EX", max(1, round(ttl_s)))
        await self._connection.ask(*words, timeout_s=timeout_s)

    async def response_owner(self, key: ResponseKey) -> str | None:
        """Read which replica issued a response; soon, or StoreUnavailable."""
        timeout_s = min(OWNER_TIMEOUT_S, self._timeout_s)
        found = await self._connection.ask("GET", self._response(key), timeout_s=timeout_s)
        if found is None or not isinstance(found, bytes) or len(found) > _MAX_IDENTITY:
            return None
        return found.decode(errors="replace")

    async def orders(self) -> dict[str, ReplicaRecord]:
        """Read what operators ordered, by identity of the replica."""
        flat = await self._connection.ask("HGETALL", self._base + "replicas")
        orders: dict[str, ReplicaRecord] = {}
        for name, packed in zip(flat[::2], flat[1::2], strict=True):
            try:
                if len(orders) >= MAX_ORDERS:
                    raise ValueError("too many orders")
                orders[name.decode()] = decode_record(packed)
            except ValueError:
                self.num_garbage += 1
        return orders

    async def put_order(self, identity: str, record: ReplicaRecord) -> None:
        """Write an order."""
        await self._connection.ask("HSET", self._base + "replicas", identity, encode(record))

    def _response(self, key: ResponseKey) -> str:
        return f"{self._base}response:{key}"
