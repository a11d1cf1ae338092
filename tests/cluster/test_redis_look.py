"""router.cluster.redis_look: reads how a namespace stands, and leaves it as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from router.cluster.redis_look import look
from router.cluster.redis_store import RedisStore
from router.config import RedisConfig
from router.errors import StoreRefused
from router.messages import Delta, FeedId, ReplicaRecord, SessionState, TierChange, pack_keys
from tests.redis_servers import RedisServer, namespace, shared_redis

__all__ = ["namespace", "shared_redis"]

FEED = FeedId("one#0")


@pytest.fixture
def settings(shared_redis: RedisServer, namespace: str) -> RedisConfig:
    return RedisConfig(url=shared_redis.url, namespace=namespace, timeout_s=20.0)


@pytest.fixture
async def store(settings: RedisConfig) -> AsyncIterator[RedisStore]:
    store = RedisStore(settings, router="router-a", password=None)
    await store.open()
    yield store
    await store.close()


async def test_a_new_namespace_stays_new(settings: RedisConfig, shared_redis: RedisServer) -> None:
    """Nothing is made by looking."""
    found = await look(settings, password=None)

    assert found.schema is None
    assert (found.feeds, found.leaders, found.routers, found.records) == ({}, {}, (), {})
    assert found.num_log_entries == 0
    assert found.info["used_memory"].isdigit()
    assert found.round_trip_ms > 0
    assert not list(shared_redis.client.scan_iter(f"{{wr:{settings.namespace}}}:*"))


async def test_what_routers_share_is_read(settings: RedisConfig, store: RedisStore) -> None:
    """Who lives, who feeds what, how much there is."""
    await store.beat(b"")
    await store.hold([FEED])
    await store.write([Delta(FEED, 1, changes=(TierChange("gpu", pack_keys([1, 2])),))])  # type: ignore[list-item]
    await store.put_sessions({7: SessionState(FEED, 1, None)}, 60.0)
    await store.put_replica("two", ReplicaRecord(url="http://10.0.0.6:8000"))

    found = await look(settings, password=None)

    assert found.schema == "1"
    assert found.routers == ("router-a",)
    assert found.leaders == {FEED: "router-a"}
    assert found.feeds[FEED].number == 1
    assert (found.num_log_entries, found.num_sessions) == (1, 1)
    assert found.records["two"].url == "http://10.0.0.6:8000"


async def test_garbage_is_left_out(
    settings: RedisConfig, store: RedisStore, shared_redis: RedisServer
) -> None:
    """Routers that are over, records that are none; a key of another kind is refused."""
    base = f"{{wr:{settings.namespace}}}:"
    shared_redis.client.zadd(f"{base}routers", {"long-gone": 1.0})
    shared_redis.client.hset(f"{base}replicas", "x", b"\xc1")
    shared_redis.client.set(f"{base}log", "not a stream")

    found = await look(settings, password=None)

    assert found.routers == ()
    assert found.records == {}
    assert found.num_log_entries is None
    shared_redis.client.set(f"{base}feeds", "not a hash")
    with pytest.raises(StoreRefused, match="something else lies under a key"):
        await look(settings, password=None)
