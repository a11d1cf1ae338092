"""The shared store: what routers keep in Redis, and whether it can be relied on.

Only read commands are sent, unlike by RedisStore.open, which creates the namespace and loads
scripts: an ACL user who may only read can check, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from router.base.errors import StoreError, StoreRefused
from router.base.messages import SCHEMA, UPGRADED, is_pool_stream
from router.check.finding import Finding, Subject, size
from router.check.seen import Deadline, ReplicaSeen
from router.cluster.redis_connection import RedisConnection
from router.cluster.redis_snapshot import read_heads
from router.config import IndexConfig, RedisConfig

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
    server: str = ""  # its kind and release
    round_trip_ms: float | None = None
    schema: str | None = None  # None: the namespace is new
    used_bytes: int | None = None
    max_bytes: int | None = None  # 0: no bound
    policy: str | None = None
    followed: tuple[str, ...] = ()  # replicas that routers follow now, but those added by orders


# -- look ----------------------------------------------------------------------------------------


async def look(config: RedisConfig, *, password: str | None, deadline: Deadline) -> RedisSeen:
    """Read how Redis is set up, and which streams routers write there."""
    seen = RedisSeen(
        address=config.url or f"{config.sentinel_service} at {', '.join(config.sentinels)}",
        namespace=config.namespace,
    )
    connection = RedisConnection(config, password=password)
    try:
        async with asyncio.timeout(deadline.left_s):
            return await _read(seen, connection)
    except StoreError as exc:
        return replace(seen, error=exc.message, is_refused=isinstance(exc, StoreRefused))
    except TimeoutError:
        return replace(seen, error="it did not answer in time")
    finally:
        await connection.close()


async def _read(seen: RedisSeen, connection: RedisConnection) -> RedisSeen:
    base = f"{{wr:{seen.namespace}}}:"
    await connection.ask("PING")  # connects, so that the next one is a round trip alone
    started_s = time.perf_counter()
    await connection.ask("PING")
    round_trip_ms = (time.perf_counter() - started_s) * 1000
    info, meta, feeds, ordered = await connection.ask_all(
        [
            ("INFO",),
            ("HMGET", f"{base}meta", "schema"),
            ("HGETALL", f"{base}feeds"),
            ("HKEYS", f"{base}replicas"),
        ]
    )
    for needed in (meta, feeds, ordered):
        if isinstance(needed, Exception):
            raise await connection.refusal(needed)
    heads, _ = read_heads(feeds)
    names = sorted(name for name in heads if not is_pool_stream(name))[:_MAX_STREAMS]
    leases = [f"{base}lease:{name}" for name in names]
    owners = await connection.ask("MGET", *leases) if leases else []
    server = connection.server
    assert server is not None
    facts = _info(info)
    return replace(
        seen,
        address=server.address,
        server=f"{server.name} {server.version}",
        round_trip_ms=round(round_trip_ms, 3),
        schema=_text(meta[0]),
        used_bytes=_number(facts.get("used_memory")),
        max_bytes=_number(facts.get("maxmemory")),
        policy=facts.get("maxmemory_policy"),
        followed=tuple(
            sorted(
                {_owner(name) for name, owner in zip(names, owners, strict=True) if owner}
                - {name.decode(errors="replace") for name in ordered}
            )
        ),
    )


def _info(reply: Any) -> dict[str, str]:
    if not isinstance(reply, bytes):  # the ACL user may not ask
        return {}
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


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
    yield from _names(seen, replicas)


def _distance(seen: RedisSeen, config: RedisConfig, index: IndexConfig) -> Iterator[Finding]:
    trip_ms, limit_ms = seen.round_trip_ms or 0.0, config.lookup_timeout_s * 1000
    trip = f"a round trip takes {trip_ms:.1f} ms"
    if index.mode == "redis" and trip_ms > limit_ms / 2:
        yield _REDIS.warning(
            "distance",
            f"{trip}, but a look-up may take only {limit_ms:g} ms: many will be late",
            "use a Redis nearby, a longer redis.lookup_timeout_s, or --set index.mode=local",
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
        hint = "the key belongs to another program: choose another redis.namespace"
    elif int(seen.schema) > SCHEMA:
        hint = "update this router, or choose another redis.namespace"
    else:
        hint = (
            f"stop the older routers and delete the keys {{wr:{seen.namespace}}}:*, or choose "
            "another redis.namespace"
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


def _names(seen: RedisSeen, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Compare the replicas that routers follow with those that are configured here."""
    local = [each.url for each in replicas if each.identity == each.url and _is_local(each.url)]
    if local:
        yield _REDIS.note(
            "names",
            f"routers share replicas by URL, and {local[0]} is a different one on each machine",
            "give each replica a `name` in the configuration, the same for every router",
        )
    known = {replica.identity for replica in replicas}
    if strange := [name for name in seen.followed if name not in known]:
        yield _REDIS.warning(
            "names",
            f"other routers follow replicas that are unknown here: {', '.join(strange)}",
            "routers identify a replica by its name, or else its URL: give each the same name and "
            "list in every router's configuration",
        )


def _is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1", "http://localhost"))


def _owner(stream: str) -> str:
    head, hash_sign, rank = stream.rpartition("#")
    return head if hash_sign and rank.isdigit() else stream
