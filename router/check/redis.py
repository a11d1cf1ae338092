"""The shared store: what routers keep in Redis, and whether it can be relied on.

Only read commands are sent, unlike by RedisStore.open, which creates the namespace and loads
scripts: an ACL user who may only read can check, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from router.base.errors import StoreError, StoreRefused
from router.base.messages import (
    SCHEMA,
    UPGRADED,
    ReplicaRecord,
    decode_record,
    is_pool_stream,
)
from router.check.deadline import Deadline
from router.check.finding import Finding, Subject, size
from router.check.seen import ReplicaSeen
from router.cluster.redis_connection import RedisConnection
from router.cluster.redis_snapshot import read_heads
from router.config import IndexConfig, RedisConfig
from router.replicas.registry import Registry

_MAX_STREAMS: Final = 10_000
_FULL: Final = 0.9  # of maxmemory
_SLOW_MS: Final = 5.0  # a round trip; routers write about as often
_REDIS: Final = Subject("redis")


class RedisSeen(Struct, frozen=True, kw_only=True):
    """The shared store. `error` says why nothing else is known; None: not reported."""

    address: str
    namespace: str
    error: str | None = None
    is_refused: bool = False  # it answers, but cannot be used as it is
    server: str = ""  # its kind, release and mode
    round_trip_ms: float | None = None
    schema: str | None = None  # None: the namespace is new
    used_bytes: int | None = None
    max_bytes: int | None = None  # 0: no bound
    policy: str | None = None
    save_error: bool = False  # it refuses writes because it cannot save
    routers: tuple[str, ...] = ()  # that live
    leaders: Mapping[str, str | None] = {}  # event stream -> the router that writes it
    refused: tuple[str, ...] = ()  # orders about replicas that no router follows, and why


Records = dict[str, ReplicaRecord]
"""What operators ordered, by a replica's name among routers."""


# -- look ----------------------------------------------------------------------------------------


async def look(
    config: RedisConfig, registry: Registry, *, password: str | None, deadline: Deadline
) -> tuple[RedisSeen, Records]:
    """Read what routers share; `registry` finds the orders among it that no router follows."""
    seen = RedisSeen(
        address=config.url or f"{config.sentinel_service} at {', '.join(config.sentinels)}",
        namespace=config.namespace,
    )
    key = f"{{wr:{config.namespace}}}:meta"
    connection = RedisConnection(config, key=key, password=password)
    try:
        async with asyncio.timeout(deadline.left_s):
            seen, records = await _read(seen, connection)
    except StoreError as exc:
        return replace(seen, error=exc.message, is_refused=isinstance(exc, StoreRefused)), {}
    except TimeoutError:
        return replace(seen, error="it did not answer in time"), {}
    finally:
        await connection.close()
    refused = tuple(
        f"{name}: {why}"
        for name, record in sorted(records.items())
        if (why := registry.refused(name, record)) is not None
    )
    return replace(seen, refused=refused), records


async def _read(seen: RedisSeen, connection: RedisConnection) -> tuple[RedisSeen, Records]:
    base = f"{{wr:{seen.namespace}}}:"
    await connection.ask("PING")  # connects, so that the next one is a round trip alone
    started_s = time.perf_counter()
    await connection.ask("PING")
    round_trip_ms = (time.perf_counter() - started_s) * 1000
    replies = await connection.ask_all(
        [
            ("INFO",),
            ("HMGET", f"{base}meta", "schema"),
            ("HGETALL", f"{base}feeds"),
            ("ZRANGE", f"{base}routers", 0, -1, "WITHSCORES"),
            ("HGETALL", f"{base}replicas"),
            ("TIME",),
        ]
    )
    info, meta, feeds, routers, records, clock = replies
    for needed in (meta, feeds, routers):
        if isinstance(needed, Exception):
            raise await connection.refusal(needed)
    heads, _ = read_heads(feeds)
    names = sorted(name for name in heads if not is_pool_stream(name))[:_MAX_STREAMS]
    leases = [f"{base}lease:{name}" for name in names]
    owners = await connection.ask("MGET", *leases) if leases else []
    server = connection.server
    assert server is not None
    facts = _info(info)
    found = replace(
        seen,
        address=server.address,
        server=f"{server.name} {server.version}, {server.mode}",
        round_trip_ms=round(round_trip_ms, 3),
        schema=_text(meta[0]),
        used_bytes=_number(facts.get("used_memory")),
        max_bytes=_number(facts.get("maxmemory")),
        policy=facts.get("maxmemory_policy"),
        save_error=facts.get("rdb_last_bgsave_status", "ok") != "ok",
        routers=_living(routers, clock),
        leaders={name: _text(owner) for name, owner in zip(names, owners, strict=True)},
    )
    return found, _records(records)


def _info(reply: Any) -> dict[str, str]:
    if not isinstance(reply, bytes):  # the ACL user may not ask
        return {}
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _living(flat: list[bytes], clock: Any) -> tuple[str, ...]:
    """List routers whose time is not over; the next heartbeat removes the others."""
    now_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000 if isinstance(clock, list) else 0
    return tuple(
        name.decode(errors="replace")
        for name, until_ms in zip(flat[::2], flat[1::2], strict=True)
        if float(until_ms) > now_ms
    )


def _records(flat: Any) -> Records:
    records: Records = {}
    if isinstance(flat, list):
        for name, record in zip(flat[::2], flat[1::2], strict=True):
            try:
                records[name.decode()] = decode_record(record)
            except ValueError:
                continue  # not ours: the router counts and skips it
    return records


# -- judge ---------------------------------------------------------------------------------------


def judge(
    seen: RedisSeen, *, config: RedisConfig, index: IndexConfig, replicas: Sequence[ReplicaSeen]
) -> Iterator[Finding]:
    """Judge the shared store."""
    if seen.error is not None:
        hint = "" if seen.is_refused else "is it running? Until then each router works alone"
        yield _REDIS.error("reachable", seen.error, hint)
        return
    trip = f", {seen.round_trip_ms:.1f} ms away" if seen.round_trip_ms is not None else ""
    yield _REDIS.ok("reachable", f"{seen.address}: {seen.server}{trip}")
    yield from _distance(seen, config, index)
    yield _namespace(seen)
    yield _memory(seen)
    if seen.save_error:
        yield _REDIS.warning(
            "disk",
            "its last save to disk failed, so it refuses writes unless configured otherwise",
            "see its log; warmroute's data needs no saving: --save ''",
        )
    names = f"{len(seen.routers)}: {', '.join(seen.routers)}"
    yield _REDIS.ok("routers", names if seen.routers else "no router runs now")
    yield from _streams(seen, replicas)
    for text in seen.refused:
        yield _REDIS.warning(
            "replicas",
            f"a stored order is ignored: {text}",
            f"delete its field in the hash {{wr:{seen.namespace}}}:replicas",
        )


def _distance(seen: RedisSeen, config: RedisConfig, index: IndexConfig) -> Iterator[Finding]:
    trip_ms, limit_ms = seen.round_trip_ms or 0.0, config.lookup_timeout_s * 1000
    trip = f"a round trip takes {trip_ms:.1f} ms"
    if index.mode == "redis" and trip_ms > limit_ms / 2:
        yield _REDIS.warning(
            "distance",
            f"{trip}, but a look-up may take only {limit_ms:g} ms: many will be late",
            "use a Redis nearby, a longer --redis-lookup-timeout-s, or --index-mode local",
        )
    elif trip_ms > _SLOW_MS:
        text = f"{trip}: routers learn of each other's requests late"
        yield _REDIS.note("distance", text, "use a Redis nearby")


def _namespace(seen: RedisSeen) -> Finding:
    if seen.schema is None:
        return _REDIS.ok("namespace", f"{seen.namespace!r} is new: the first router creates it")
    if seen.schema in UPGRADED:
        text = f"{seen.namespace!r} has schema {seen.schema}: the first router upgrades it"
        return _REDIS.ok("namespace", text)
    if seen.schema == str(SCHEMA):
        return _REDIS.ok("namespace", f"{seen.namespace!r}, schema {seen.schema}")
    if not seen.schema.isdigit():
        hint = "the key belongs to another program: choose another --redis-namespace"
    elif int(seen.schema) > SCHEMA:
        hint = "update this router, or choose another --redis-namespace"
    else:
        hint = (
            f"stop the older routers and delete the keys {{wr:{seen.namespace}}}:*, or choose "
            "another --redis-namespace"
        )
    text = f"{seen.namespace!r} has schema {seen.schema}, this router has {SCHEMA}"
    return _REDIS.error("namespace", text, hint)


def _memory(seen: RedisSeen) -> Finding:
    if seen.used_bytes is None:
        return _REDIS.note(
            "memory",
            "the ACL user may not read its settings, so it may evict",
            "+info for the ACL user; maxmemory-policy noeviction",
        )
    policy, limit = seen.policy or "", seen.max_bytes
    used = size(seen.used_bytes)
    if not limit:
        hint = "maxmemory with maxmemory-policy noeviction keeps the machine safe"
        return _REDIS.note("memory", f"{used} used, no limit", hint)
    text = f"{used} used of {size(limit)}, {policy}"
    if policy.startswith("allkeys"):
        return _REDIS.error(
            "memory",
            f"{text}: it may evict the holders of blocks, so routers refuse it",
            "maxmemory-policy noeviction, or a separate Redis",
        )
    if policy.startswith("volatile"):
        return _REDIS.warning(
            "memory",
            f"{text}: it may evict leases, so routers write everything again without need",
            "maxmemory-policy noeviction",
        )
    if seen.used_bytes >= _FULL * limit:
        return _REDIS.warning(
            "memory",
            f"{text}: a full Redis accepts no new blocks, and each router works alone for them",
            "raise maxmemory: 19 bytes a block, see docs/operate/sizing.md",
        )
    return _REDIS.ok("memory", text)


def _streams(seen: RedisSeen, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Compare the streams that routers write with the replicas that are configured here."""
    there = {stream for each in replicas if each.ranks for stream in _stream_ids(each)}
    orphans = [name for name, leader in seen.leaders.items() if leader is None and name in there]
    if orphans and seen.routers:
        yield _REDIS.warning(
            "feeds",
            f"no router writes {', '.join(orphans)}, although routers run",
            "can a router reach its event port, and do they configure it under this name?",
        )
    known = {_owner(stream) for replica in replicas for stream in _stream_ids(replica)}
    led = {_owner(name) for name, leader in seen.leaders.items() if leader is not None}
    if strange := sorted(led - known):
        yield _REDIS.warning(
            "names",
            f"other routers follow replicas that are unknown here: {', '.join(strange)}",
            "routers identify a replica by its name, or else its URL: give each the same name and "
            "list in every router's configuration",
        )


def _stream_ids(replica: ReplicaSeen) -> Iterator[str]:
    for rank in range(replica.num_ranks):
        yield f"{replica.identity}#{rank}"


def _owner(stream: str) -> str:
    head, hash_sign, rank = stream.rpartition("#")
    return head if hash_sign and rank.isdigit() else stream
