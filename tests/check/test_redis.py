"""router.check.redis: it is read and left as it is; what is wrong is found, with what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from router.base.messages import SCHEMA, Delta, ReplicaRecord, StreamId, TierChange, pack_keys
from router.check.finding import Level
from router.check.redis import RedisSeen, judge, look
from router.check.seen import Deadline
from router.cluster.redis_store import RedisStore
from router.config import IndexConfig, RedisConfig
from tests.check.samples import REDIS, REPLICA, named, wrong
from tests.redis_servers import RedisServer, namespace, shared_redis

__all__ = ["namespace", "shared_redis"]

CONFIG = RedisConfig(url="redis://10.0.0.6:6379/0", lookup_timeout_s=0.005)
LOCAL = IndexConfig()
MIB = 1 << 20

# -- look ----------------------------------------------------------------------------------------


@pytest.fixture
def settings(shared_redis: RedisServer, namespace: str) -> RedisConfig:
    return RedisConfig(url=shared_redis.url, namespace=namespace, timeout_s=20.0)


@pytest.fixture
async def store(settings: RedisConfig) -> AsyncIterator[RedisStore]:
    store = RedisStore(settings, router="router-a", password=None)
    await store.open()
    yield store
    await store.close()


async def looked(settings: RedisConfig) -> RedisSeen:
    return await look(settings, password=None, deadline=Deadline(60.0))


async def test_a_new_namespace_stays_new(settings: RedisConfig, shared_redis: RedisServer) -> None:
    """Looking creates nothing."""
    found = await looked(settings)

    assert (found.schema, found.followed) == (None, ())
    assert found.used_bytes
    assert found.round_trip_ms
    assert not list(shared_redis.client.scan_iter(f"{{wr:{settings.namespace}}}:*"))


async def test_what_routers_follow_is_read(
    settings: RedisConfig, store: RedisStore, shared_redis: RedisServer
) -> None:
    """But for replicas that operators added, and streams that no router writes any more."""
    streams = [StreamId(f"{name}#0") for name in ("one", "added", "left")]
    await store.beat(b"")
    await store.hold(streams[:2])
    for stream in streams:
        delta = Delta(stream_id=stream, changes=(TierChange("gpu", pack_keys([1, 2])),))
        await store.write([delta])  # type: ignore[list-item]
    await store.records.put_order("added", ReplicaRecord(url="http://10.0.0.6:8000"))

    found = await looked(settings)

    assert found.schema == str(SCHEMA)
    assert found.followed == ("one",)
    shared_redis.client.set(f"{{wr:{settings.namespace}}}:feeds", "not a hash")
    refused = await looked(settings)
    assert refused.is_refused
    assert "a key of the namespace has other contents" in (refused.error or "")


# -- judge ---------------------------------------------------------------------------------------

REDIS_CASES: list[tuple[RedisSeen, Level, str, str, str]] = [
    (replace(REDIS, error="gone"), "error", "reachable", "gone", "works alone"),
    (replace(REDIS, error="wrong password: see X", is_refused=True), "error", "reachable", "X", ""),
    (replace(REDIS, round_trip_ms=9.0), "note", "distance", "9.0 ms", "a Redis nearby"),
    (replace(REDIS, schema="0"), "error", "namespace", "schema 0", "delete the keys {wr:default}:"),
    (replace(REDIS, schema="9"), "error", "namespace", "schema 9", "update this router"),
    (replace(REDIS, schema="x"), "error", "namespace", "schema x", "another program"),
    (replace(REDIS, used_bytes=None), "note", "memory", "may not read its settings", "+info"),
    (replace(REDIS, policy="allkeys-lru"), "error", "memory", "allkeys-lru", "noeviction"),
    (replace(REDIS, policy="volatile-ttl"), "warning", "memory", "leases", "noeviction"),
    (replace(REDIS, used_bytes=1000 * MIB), "warning", "memory", "1e+03 MiB used", "raise maxmem"),
    (replace(REDIS, max_bytes=0), "note", "memory", "no limit", "maxmemory"),
    (
        replace(REDIS, followed=("http://h:1", "one")),
        "warning", "names", "unknown here: http://h:1", "the same name",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "level", "about", "text", "hint"), REDIS_CASES)
def test_what_is_wrong_with_redis_is_found(
    seen: RedisSeen, level: Level, about: str, text: str, hint: str
) -> None:
    """In one finding, and nothing else is wrong."""
    findings = list(judge(seen, config=CONFIG, index=LOCAL, replicas=[REPLICA]))

    (found,) = [f for f in findings if f.level != "ok"]
    assert (found.subject, found.level, found.about) == ("redis", level, about)
    assert text in found.text
    assert hint in found.hint


def test_a_redis_as_it_should_be_has_nothing_wrong() -> None:
    findings = list(judge(REDIS, config=CONFIG, index=LOCAL, replicas=[REPLICA]))

    assert wrong(findings) == []
    texts = " ".join(f.text for f in findings)
    for part in (
        "redis 7.0.15, standalone, 0.3 ms", "schema 3", "50 MiB used",
        "of 1 GiB",
    ):  # fmt: skip
        assert part in texts, part


def test_a_new_namespace_is_well() -> None:
    """No router was here before."""
    new = replace(REDIS, schema=None, followed=(), round_trip_ms=None)
    findings = list(judge(new, config=CONFIG, index=LOCAL, replicas=[REPLICA]))

    assert wrong(findings) == []
    assert "'default' is new: the first router creates it" in {f.text for f in findings}


def test_a_redis_too_far_for_look_ups_is_found() -> None:
    """In mode redis alone."""
    far = replace(REDIS, round_trip_ms=4.0)
    findings = list(judge(far, config=CONFIG, index=IndexConfig(mode="redis"), replicas=[REPLICA]))

    assert [(f.level, f.about) for f in findings if f.level != "ok"] == [("warning", "distance")]
    assert wrong(list(judge(far, config=CONFIG, index=LOCAL, replicas=[REPLICA]))) == []


def test_unnamed_replicas_on_loopback_are_noted() -> None:
    """Every machine has its own 127.0.0.1."""
    local = named("r1", url="http://127.0.0.1:8000")
    unnamed = replace(local, entry=replace(local.entry, identity=local.url))

    for replica, noted in ((unnamed, 1), (local, 0)):
        findings = list(judge(REDIS, config=CONFIG, index=LOCAL, replicas=[REPLICA, replica]))
        assert [f.about for f in findings if f.level == "note"] == ["names"] * noted
