"""What follows from what was seen of Redis. Pure: the hints name Redis' own settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from router.check.findings import Finding
from router.check.seen import FeedSeen, RedisSeen, ReplicaSeen
from router.check.text import size
from router.config import IndexConfig, RedisConfig
from router.messages import SCHEMA, FeedId

_FULL: Final = 0.9  # of maxmemory
_SLOW_MS: Final = 5.0  # a round trip: deltas go out about as often


def of_redis(
    seen: RedisSeen, *, config: RedisConfig, index: IndexConfig, replicas: Sequence[ReplicaSeen]
) -> Iterator[Finding]:
    """Judge the shared store."""
    if seen.error is not None:
        hint = "" if seen.is_refused else "is it running? Until it is there each router is alone"
        yield Finding("redis", "reachable", "error", seen.error, hint)
        return
    server = f"{seen.server} {seen.version}, {seen.mode}"
    trip = f", {seen.round_trip_ms:.1f} ms away" if seen.round_trip_ms is not None else ""
    yield Finding("redis", "reachable", "ok", f"{seen.address}: {server}{trip}")
    yield from _distance(seen, config, index)
    yield _namespace(seen)
    yield from _memory(seen)
    if seen.save_error:
        yield Finding(
            "redis",
            "disk",
            "warning",
            "its last save to disk failed: it refuses writes, unless told otherwise",
            "see its log; what warmroute keeps there needs no saving: --save ''",
        )
    yield _routers(seen)
    yield from _feeds(seen, replicas)
    yield from _orders(seen)


def _distance(seen: RedisSeen, config: RedisConfig, index: IndexConfig) -> Iterator[Finding]:
    trip_ms = seen.round_trip_ms or 0.0
    if index.mode == "redis" and trip_ms > config.lookup_timeout_s * 1000 / 2:
        yield Finding(
            "redis",
            "distance",
            "warning",
            f"a round trip takes {trip_ms:.1f} ms, a look-up may take "
            f"{config.lookup_timeout_s * 1000:g}: many will be too late",
            "a Redis nearby, --redis-lookup-timeout-s, or --index-mode local",
        )
    elif trip_ms > _SLOW_MS:
        yield Finding(
            "redis",
            "distance",
            "note",
            f"a round trip takes {trip_ms:.1f} ms: routers know of each other's requests late",
            "a Redis nearby",
        )


def _namespace(seen: RedisSeen) -> Finding:
    if seen.schema is None:
        text = f"{seen.namespace!r} is new: the first router makes it"
        return Finding("redis", "namespace", "ok", text)
    if seen.schema != str(SCHEMA):
        text = f"{seen.namespace!r} has schema {seen.schema}, this router has {SCHEMA}"
        if not seen.schema.isdigit():
            hint = "the key is not ours: choose another --redis-namespace"
        elif int(seen.schema) > SCHEMA:
            hint = "update this router, or choose another --redis-namespace"
        else:
            hint = (
                f"stop the older routers and delete the keys {{wr:{seen.namespace}}}:*, or choose "
                "another --redis-namespace"
            )
        return Finding("redis", "namespace", "error", text, hint)
    log = f", {seen.num_log_entries:,} entries in the log" if seen.num_log_entries else ""
    sessions = f", {seen.num_sessions:,} sessions" if seen.num_sessions else ""
    text = f"{seen.namespace!r}, schema {seen.schema}{log}{sessions}"
    return Finding("redis", "namespace", "ok", text)


def _memory(seen: RedisSeen) -> Iterator[Finding]:
    if seen.used_bytes is None:
        yield Finding(
            "redis",
            "memory",
            "note",
            "it may not be asked: whether it evicts cannot be told",
            "+info for the ACL user; maxmemory-policy noeviction",
        )
        return
    policy, limit = seen.policy or "", seen.max_bytes
    bound = f" of {size(limit)}, {policy}" if limit else ", no limit"
    text = f"{size(seen.used_bytes)} used{bound}"
    if limit and policy.startswith("allkeys"):
        yield Finding(
            "redis",
            "memory",
            "error",
            f"{text}: it may evict what tells holders apart, and routers refuse it",
            "maxmemory-policy noeviction, or a Redis of its own",
        )
    elif limit and policy.startswith("volatile"):
        yield Finding(
            "redis",
            "memory",
            "warning",
            f"{text}: it may evict leases, and feeds change hands for nothing",
            "maxmemory-policy noeviction",
        )
    elif limit and seen.used_bytes >= _FULL * limit:
        yield Finding(
            "redis",
            "memory",
            "warning",
            f"{text}: full Redis takes no new blocks, and each router is on its own for them",
            "raise maxmemory: about 30 bytes a block and holder set, see docs/routers.md",
        )
    elif not limit:
        yield Finding(
            "redis",
            "memory",
            "note",
            text,
            "maxmemory with maxmemory-policy noeviction keeps the machine safe",
        )
    else:
        yield Finding("redis", "memory", "ok", text)


def _routers(seen: RedisSeen) -> Finding:
    if not seen.routers:
        return Finding("redis", "routers", "ok", "none runs now")
    return Finding("redis", "routers", "ok", f"{len(seen.routers)}: {', '.join(seen.routers)}")


def _feeds(seen: RedisSeen, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Say who feeds what; compare with the replicas that are configured here."""
    engines = [feed for feed in seen.feeds if not feed.id.startswith("pool/")]
    if engines:
        yield Finding("redis", "feeds", "ok", "; ".join(_feed(feed) for feed in engines))
    if seen.pool_lister is not None:
        yield Finding("redis", "pool", "ok", f"listed by {seen.pool_lister}")
    there = {feed for r in replicas if r.ranks and r.error is None for feed in _feed_ids(r)}
    orphans = [feed.id for feed in engines if feed.leader is None and feed.id in there]
    if orphans and seen.routers:
        yield Finding(
            "redis",
            "feeds",
            "warning",
            f"nobody feeds {', '.join(orphans)}, though routers run",
            "can they reach it, and is it in their configuration by this name?",
        )
    known = {feed for replica in replicas for feed in _feed_ids(replica)}
    led = {_owner(feed.id) for feed in engines if feed.leader is not None}
    strange = sorted(led - {_owner(feed) for feed in known})
    if strange:
        yield Finding(
            "redis",
            "names",
            "warning",
            f"other routers feed replicas that are not known here: {', '.join(strange)}",
            "routers mean the same replica by its name, or else its URL: give each the same name "
            "and list in every router's configuration",
        )


def _feed(feed: FeedSeen) -> str:
    state = f" {feed.state.upper()}" if feed.state else ""
    why = f" ({feed.reason})" if feed.reason else ""
    return f"{feed.id}{state}{why} by {feed.leader or 'nobody'}"


def _feed_ids(replica: ReplicaSeen) -> Iterator[FeedId]:
    for rank in range(replica.num_ranks):
        yield FeedId(f"{replica.identity}#{rank}")


def _owner(feed: FeedId) -> str:
    head, hash_sign, rank = feed.rpartition("#")
    return head if hash_sign and rank.isdigit() else feed


def _orders(seen: RedisSeen) -> Iterator[Finding]:
    for text in seen.refused:
        yield Finding(
            "redis",
            "replicas",
            "warning",
            f"a stored order is not followed: {text}",
            f"delete its field in the hash {{wr:{seen.namespace}}}:replicas",
        )
