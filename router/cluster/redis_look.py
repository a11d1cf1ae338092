"""A look at the shared store that changes nothing: for `warmroute check`.

RedisStore.open makes a new namespace ours and loads scripts; here there are read commands alone, so
that it works with an ACL user who may only read, too. What may not be asked is None.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from router.cluster.redis_connection import RedisConnection, Server
from router.cluster.redis_log import read_states
from router.config import RedisConfig
from router.messages import FeedId, FeedState, ReplicaRecord, decode_record

_MAX_FEEDS: Final = 10_000


class StoreLook(Struct, frozen=True, kw_only=True):
    """What a namespace holds, and where. None: Redis does not say."""

    server: Server
    round_trip_ms: float
    info: dict[str, str]  # INFO, as it came; empty: not allowed
    schema: str | None  # None: the namespace is new
    feeds: dict[FeedId, FeedState]
    leaders: dict[FeedId, str]  # who holds a feed's lease; nobody: left out
    routers: tuple[str, ...]  # that live
    num_log_entries: int | None
    num_sessions: int | None
    records: dict[str, ReplicaRecord]  # what operators ordered


async def look(
    config: RedisConfig, *, password: str | None, leases: Sequence[FeedId] = ()
) -> StoreLook:
    """Read how a namespace stands.

    Args:
        leases: Whose holders are wanted besides those of the feeds that are there.

    Raises:
        StoreUnavailable: Redis is gone, slow or failing over; StoreRefused: it will not do, with
            what to do about it.
    """
    base = f"{{wr:{config.namespace}}}:"
    connection = RedisConnection(config, key=f"{base}meta", password=password)
    try:
        await connection.ask("PING")  # connects, so that the next one is a round trip alone
        started_s = time.perf_counter()
        await connection.ask("PING")
        round_trip_ms = (time.perf_counter() - started_s) * 1000
        told = await connection.ask_all(
            [
                ("INFO",),
                ("HMGET", f"{base}meta", "schema"),
                ("HGETALL", f"{base}feeds"),
                ("ZRANGE", f"{base}routers", 0, -1, "WITHSCORES"),
                ("XLEN", f"{base}log"),
                ("HLEN", f"{base}sessions"),
                ("HGETALL", f"{base}replicas"),
                ("TIME",),
            ]
        )
        info, meta, feeds, routers, num_log, num_sessions, records, clock = told.values
        for needed in (meta, feeds, routers):
            if isinstance(needed, Exception):
                raise await connection.refusal(needed)
        states, _ = read_states(feeds)
        names = [*states, *leases][:_MAX_FEEDS]
        owners: list[Any] = []
        if names:
            owners = await connection.ask("MGET", *(f"{base}lease:{name}" for name in names))
        assert connection.server is not None
        return StoreLook(
            server=connection.server,
            round_trip_ms=round_trip_ms,
            info=_info(info),
            schema=_text(meta[0]),
            feeds=states,
            leaders={
                name: owner.decode(errors="replace")
                for name, owner in zip(names, owners, strict=True)
                if owner is not None
            },
            routers=_living(routers, clock),
            num_log_entries=num_log if isinstance(num_log, int) else None,
            num_sessions=num_sessions if isinstance(num_sessions, int) else None,
            records=_records(records),
        )
    finally:
        await connection.close()


def _info(told: Any) -> dict[str, str]:
    if not isinstance(told, bytes):  # the ACL user may not ask
        return {}
    lines = (line.partition(":") for line in told.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else None


def _living(flat: list[bytes], clock: Any) -> tuple[str, ...]:
    """List routers whose time is not over; whoever beats next takes the others out."""
    now_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000 if isinstance(clock, list) else 0
    return tuple(
        name.decode(errors="replace")
        for name, until_ms in zip(flat[::2], flat[1::2], strict=True)
        if float(until_ms) > now_ms
    )


def _records(flat: Any) -> dict[str, ReplicaRecord]:
    records: dict[str, ReplicaRecord] = {}
    if isinstance(flat, list):
        for name, record in zip(flat[::2], flat[1::2], strict=True):
            try:
                records[name.decode()] = decode_record(record)
            except ValueError:
                continue  # not ours: the router counts and skips it
    return records
