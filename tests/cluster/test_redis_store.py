"""router.cluster.redis_store on real servers: blocks, leases, streams, sessions, sweeping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.base.contracts import BlockKey, HashContract
from router.base.errors import EMPTIED, StoreRefused, StoreUnavailable
from router.base.messages import (
    Alive,
    Delta,
    Ended,
    Notes,
    Position,
    ReplicaRecord,
    SessionState,
    StreamHead,
    StreamStatus,
    TierChange,
    encode,
    pool_stream,
)
from router.cluster import redis_connection
from router.cluster import redis_snapshot as redis_log
from router.cluster.following import LogTails
from router.cluster.redis_snapshot import LogReader
from router.cluster.redis_store import RedisStore, Swept, Written
from tests.cluster.redis_stores import (
    POOL_STREAM,
    R1,
    R2,
    blocks,
    lookup,
    opened,
    pack,
    read,
    removed,
    stored,
)
from tests.fuzz.samples import DEEP_MSGPACK
from tests.redis_servers import RedisServer, Start

OK, FENCED, NO_ROOM = Written
ALL = (R1, R2, POOL_STREAM)
STATUS = StreamStatus("exact", "", HashContract(algorithm="sha256", block_size=16), 1200)


@pytest.fixture
async def store(shared_redis: RedisServer, namespace: str) -> AsyncIterator[RedisStore]:
    """Give an open store that holds the leases of two streams."""
    async with opened(shared_redis.url, namespace=namespace) as store:
        await store.hold([R1, R2, POOL_STREAM])
        yield store


# -- blocks --------------------------------------------------------------------------------------


async def test_what_was_written_comes_back(store: RedisStore) -> None:
    """By replica and tier, with the stream's head; a pool's by its name."""
    position, newest = Position(7, b"mark"), Position(9, b"mark")
    deltas = [
        stored(R1, range(100), cleared=True, position=position, newest=newest, status=STATUS),
        stored(R2, range(50), "cpu"),
        removed(R1, range(90, 100)),
        stored(POOL_STREAM, range(20), "pool"),
    ]

    assert await store.write(deltas) == [OK] * 4
    assert await blocks(store, ALL) == {
        (R1, "gpu"): set(range(90)),
        (R2, "cpu"): set(range(50)),
        (POOL_STREAM, "pool"): set(range(20)),
    }
    assert await store.heads() == {
        R1: StreamHead(position=position, newest=newest, status=STATUS, writer="router-1"),
        R2: StreamHead(position=None, writer="router-1"),
    }
    assert await lookup(store, range(200), R1, R2) == {
        (R1, "gpu"): 90,
        (R1, "cpu"): 90,
        (R2, "gpu"): 0,
        (R2, "cpu"): 50,
    }
    assert store.num_garbage == 0
    await store.write([Delta(stream_id=R1, cleared=True)])
    assert (await store.heads())[R1].position is None


async def test_a_log_is_read_in_parts(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where a reader has read it to; from its start if it was begun again meanwhile."""
    monkeypatch.setattr(redis_log, "BYTES_A_CALL", 16)
    await store.write([stored(R1, [number]) for number in range(100)])
    reader = LogReader()
    (part,) = (await store.read_logs({R1: reader})).values()
    assert (part.first, part.is_end) == (0, False)
    reader.begin(part)
    for entry in part.entries:
        reader.apply(entry)
    (part,) = (await store.read_logs({R1: reader})).values()
    assert part.first == len(reader.blocks.copies["gpu"]) > 0
    await store.write([stored(R1, [7], cleared=True)])
    (part,) = (await store.read_logs({R1: reader})).values()
    reader.begin(part)
    for entry in part.entries:
        reader.apply(entry)

    assert part.is_end
    assert set(reader.blocks.copies["gpu"]) == {7}
    assert (reader.num_read, reader.num_keys) == (1, 1)


async def test_a_delta_may_have_several_tiers_and_copies(store: RedisStore) -> None:
    """Status and position come with it."""
    changes = (
        TierChange("gpu", pack(range(2_500)), pack(range(5_000, 6_500)), ((7, 3),)),  # type: ignore[arg-type]
        TierChange("cpu", pack(range(10))),
    )
    delta = Delta(
        stream_id=R1, cleared=True, changes=changes, position=Position(1, b"m"), status=STATUS
    )

    assert await store.write([delta, stored(R1, [9_999])]) == [OK, OK]
    head = (await store.heads())[R1]
    assert head.position == delta.position
    assert head.status == STATUS
    assert await blocks(store, [R1]) == {
        (R1, "gpu"): {*range(2_500), 9_999},
        (R1, "cpu"): set(range(10)),
    }
    (log,) = (await read(store, R1)).values()
    assert {key: count for key, count in log.blocks.copies["gpu"].items() if count > 1} == {7: 3}


async def test_copies_are_remembered_where_there_are_several(store: RedisStore) -> None:
    """One copy again, removed or cleared: none is left."""
    await store.write(
        [
            Delta(stream_id=R1, changes=(TierChange("gpu", copies=((1, 2), (2, 3), (3, 9))),)),  # type: ignore[arg-type]
            Delta(stream_id=R1, changes=(TierChange("gpu", removed=pack([3]), copies=((2, 1),)),)),  # type: ignore[arg-type]
        ]
    )

    assert (await read(store, R1))[R1].blocks.copies == {"gpu": {1: 2, 2: 1}, "cpu": {}}
    await store.write([Delta(stream_id=R1, cleared=True)])
    assert (await read(store, R1))[R1].blocks.num_blocks() == 0


@pytest.mark.parametrize("is_filled_again", [False, True])
async def test_a_pool_torn_by_a_flush_is_refused(
    store: RedisStore, shared_redis: RedisServer, namespace: str, is_filled_again: bool
) -> None:
    """What was read is a part of an index that is gone; no router may take it for the whole."""
    await store.write([stored(POOL_STREAM, range(5_000), "pool")])
    snapshot = await store.pool_snapshot(ALL)
    parts = aiter(snapshot.slices())
    await anext(parts)
    shared_redis.client.delete(*shared_redis.client.keys(f"{{wr:{namespace}}}:*"))
    if is_filled_again:
        await store.open()

    with pytest.raises(StoreUnavailable, match=EMPTIED):
        async for _ in parts:
            pass


async def test_a_pool_needs_no_lease(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """Every router writes what it learned of it."""
    await store.write([stored(POOL_STREAM, range(10), "pool")])
    async with opened(shared_redis.url, "router-2", namespace=namespace) as other:
        assert await other.write([removed(POOL_STREAM, [7, 8], "pool")]) == [OK]

    assert await blocks(store, ALL) == {(POOL_STREAM, "pool"): set(range(10)) - {7, 8}}
    assert set(await store.heads()) == set()


async def test_several_hundred_pools_share_a_block(store: RedisStore) -> None:
    """Each has its own bit, and only its own goes."""
    pools = [pool_stream("model", f"p{i}") for i in range(300)]
    await store.write([stored(pool, [1, i + 10], "pool") for i, pool in enumerate(pools)])
    await store.write([removed(pools[7], [1], "pool"), Delta(stream_id=pools[8], cleared=True)])

    held = await blocks(store, pools)

    assert [pool for pool in pools if 1 not in held.get((pool, "pool"), ())] == pools[7:9]
    assert len(held) == 299


async def test_a_look_up_finds_holes_before_an_end(store: RedisStore) -> None:
    """Closure can break: the blocks right before an end are looked at, and the rest bisected."""
    await store.write([stored(R1, set(range(100)) - {97, 40}), stored(R2, range(64))])

    counts = await lookup(store, range(100), R1, R2)

    assert counts[R1, "gpu"] in (40, 97)
    assert counts[R2, "gpu"] == 64
    assert (await lookup(store, [500], R1))[R1, "gpu"] == 0
    assert (await lookup(store, [], R1))[R1, "gpu"] == 0
    assert await lookup(store, [1]) == {}


async def test_a_later_look_up_finds_what_was_added(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long log that takes longer than a look-up may is read further by the next one."""
    monkeypatch.setattr(redis_log, "BYTES_A_CALL", 16)
    tails = LogTails(store, timeout_s=10.0)
    chain = [BlockKey(key) for key in range(200)]
    for end in (50, 150):
        await store.write([stored(R1, [key]) for key in range(end)])
        assert (await tails.lookup(chain, [R1]))[R1, "gpu"] == end
    await store.write([removed(R1, [149]), stored(R1, [5], cleared=True)])
    assert (await tails.lookup(chain[5:], [R1]))[R1, "gpu"] == 1


# -- who may write -------------------------------------------------------------------------------


async def test_only_the_lease_holder_writes(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """The others are fenced, and nothing of theirs is there, not even the first piece."""
    async with opened(shared_redis.url, "router-2", namespace=namespace) as other:
        assert await other.write([stored(R1, range(2_000), cleared=True)]) == [FENCED]
        assert await other.hold([R1]) == frozenset()
        await store.leave([R1])
        assert await other.hold([R1, R2]) == {R1}
        assert await other.write([stored(R1, [5])]) == [OK]

    assert await store.write([stored(R1, [6])]) == [FENCED]
    assert await blocks(store, ALL) == {(R1, "gpu"): {5}}


# -- notes ---------------------------------------------------------------------------------------


async def test_notes_come_in_order(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """Our own as well; those of another namespace do not."""
    notes = await store.subscribe()
    async with (
        opened(shared_redis.url, "router-2", namespace=namespace) as other,
        opened(shared_redis.url, "router-3", namespace=namespace + "-2") as stranger,
    ):
        await stranger.publish([Ended(9, True)])
        await other.publish([Ended(3, True)])
        await store.publish([Alive((1, 2))])
        async with asyncio.timeout(30.0):
            found = [await notes.next() for _ in range(2)]
    await notes.close()

    assert found == [
        encode(Notes("router-2", (Ended(3, True),))),
        encode(Notes("router-1", (Alive((1, 2)),))),
    ]


async def test_notes_of_another_database_do_not_come(start_redis: Start) -> None:
    """Redis has its channels in common for all of them."""
    server = start_redis()
    async with opened(server.url) as store, opened(server.url[:-1] + "1") as other:
        notes = await store.subscribe()
        await other.publish([Ended(1, True)])
        await store.publish([Ended(2, True)])
        async with asyncio.timeout(30.0):
            assert await notes.next() == encode(Notes("router-1", (Ended(2, True),)))
        await notes.close()


async def test_a_silent_server_ends_the_subscription(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has nothing to say answers when it is asked; one that hangs does not."""
    monkeypatch.setattr(redis_connection, "SILENCE_S", 0.05)
    server = start_redis()
    async with opened(server.url, timeout_s=0.5) as store:
        notes = await store.subscribe()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(notes.next())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await notes.watch()
            server.pause()
            with pytest.raises(StoreUnavailable, match="did not answer"):
                await notes.watch()
            server.resume()
            reading.cancel()
        await notes.close()


# -- emptied, restarted, hung --------------------------------------------------------------------


async def test_a_flush_is_seen(start_redis: Start) -> None:
    """By the writer and by the heartbeat, which creates the namespace again."""
    server = start_redis()
    async with opened(server.url) as store:
        await store.hold([R1])
        await store.write([stored(R1, [1])])
        before = await store.beat(b"")
        server.client.flushall()
        server.client.script_flush()

        with pytest.raises(StoreUnavailable, match=EMPTIED):
            await store.write([stored(R1, [2])])
        assert (await store.beat(b"")).incarnation != before.incarnation
        await store.hold([R1])
        assert await store.write([stored(R1, [2])]) == [OK]
        assert await blocks(store, ALL) == {(R1, "gpu"): {2}}


async def test_a_hung_server_costs_no_more_than_the_deadline(start_redis: Start) -> None:
    """Whatever is asked; and when it goes on, so do we, each reply where it belongs."""
    server = start_redis()
    async with opened(server.url) as store:
        await store.hold([R1])
        await store.write([stored(R1, [1])])
    async with opened(server.url, timeout_s=0.5, lookup_timeout_s=0.05) as store:
        server.pause()
        with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
            await LogTails(store, timeout_s=0.05).lookup([BlockKey(1)], [R1])
        for question in (
            store.beat(b""),
            store.hold([R1]),
            store.write([stored(R1, [2])]),
            store.subscribe(),
            store.open(),
        ):
            with pytest.raises(StoreUnavailable, match="did not answer"):
                await question
        server.resume()
    async with opened(server.url) as store:
        assert await lookup(store, [1], R1) == {(R1, "gpu"): 1, (R1, "cpu"): 1}


async def test_a_cancelled_question_leaves_no_reply_to_the_next(start_redis: Start) -> None:
    """Its connection is cut."""
    server = start_redis()
    async with opened(server.url) as store:
        async with asyncio.TaskGroup() as group:
            server.pause()
            waiting = [group.create_task(store.heads()) for _ in range(8)]
            await asyncio.sleep(0.05)
            for task in waiting:
                task.cancel()
            server.resume()

        for _ in range(20):
            assert (await store.beat(b"")).routers == {"router-1"}
            assert await store.heads() == {}


# -- load, sessions, replicas --------------------------------------------------------------------


async def test_living_routers_know_each_other_and_their_load(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """One that leaves is gone at once, one that dies when its lease is over."""
    async with opened(shared_redis.url, "router-2", namespace=namespace) as other:
        await other.beat(b"much")
        beat = await store.beat(b"little")

        assert beat.routers == {"router-1", "router-2"}
        assert await store.loads() == {"router-2": b"much"}
        assert await other.loads() == {"router-1": b"little"}
        await other.hold([R2, type(R1)("r9#0")])
        await other.leave([R2, type(R1)("r9#0")])
        assert (await store.beat(b"")).routers == {"router-1"}
        assert await store.loads() == {}
        assert await store.hold([R2, type(R1)("r9#0")]) == {R2, "r9#0"}


async def test_sessions_are_shared_and_expire(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """The latest counts; what cannot be read is counted and skipped."""
    state = SessionState(R1, 3, 1.5)
    await store.records.put_sessions(dict.fromkeys(range(1200), state), 3600)
    await store.records.put_sessions({5: SessionState(R2, 4, None), 2**63: state}, 3600)
    await store.records.put_sessions({}, 3600)
    key = f"{{wr:{namespace}}}:sessions"
    shared_redis.client.hset(key, "77", b"\x00\x00\x00\x00" + encode(state))  # long over
    shared_redis.client.hset(key, "78", b"\xff\xff\xff\xffgarbage")
    shared_redis.client.hset(key, "x", b"\xff\xff\xff\xff" + encode(state))

    found = dict([pair async for pair in store.records.sessions()])

    assert found.keys() == {*range(1_200), 2**63} - {77, 78}
    assert found[5] == SessionState(R2, 4, None)
    assert found[6] == state
    assert store.num_garbage == 2
    assert not shared_redis.client.hexists(key, "77")


async def test_replicas_are_registered(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """Added, changed; what cannot be read is counted and skipped."""
    record = ReplicaRecord(url="http://127.0.0.1:1", draining=True)
    await store.records.put_order("a", ReplicaRecord(url="http://127.0.0.1:1"))
    await store.records.put_order("a", record)
    shared_redis.client.hset(f"{{wr:{namespace}}}:replicas", "c", "garbage")

    assert await store.records.orders() == {"a": record}
    assert store.num_garbage == 1


# -- sweeping ------------------------------------------------------------------------------------


async def test_a_sweep_takes_out_what_has_no_holder(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """Dead bits of pools are cleared and freed; what others hold stays."""
    one, two = pool_stream("one"), pool_stream("two")
    await store.write(
        [
            stored(one, range(3_000), "pool"),
            stored(two, range(2_900, 3_100), "pool"),
            Delta(stream_id=one, cleared=True),
            stored(one, [1], "pool"),
        ]
    )
    swept = await store.sweep(pause_s=0)

    assert swept == Swept(is_ours=True, num_changed=101, num_dropped=2_899, num_bits=1)
    assert await blocks(store, [one, two]) == {
        (one, "pool"): {1},
        (two, "pool"): set(range(2_900, 3_100)),
    }
    buckets = shared_redis.client.keys(f"{{wr:{namespace}}}:b:*")
    assert sum(shared_redis.client.hlen(bucket) for bucket in buckets) == 201
    three = pool_stream("three")
    await store.write([stored(three, [2], "pool")])  # takes the bit that was freed
    assert await blocks(store, [three]) == {(three, "pool"): {2}}
    assert await store.sweep(pause_s=0) == Swept(is_ours=True)


async def test_one_router_sweeps_at_a_time(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """One that lost the lease in between stops."""
    key = f"{{wr:{namespace}}}:sweeper"
    shared_redis.client.set(key, "router-2")
    assert await store.sweep() == Swept(is_ours=False)
    shared_redis.client.delete(key)
    await store.write(
        [stored(POOL_STREAM, range(3_000), "pool"), Delta(stream_id=POOL_STREAM, cleared=True)]
    )

    async with asyncio.TaskGroup() as group:
        sweeping = group.create_task(store.sweep(pause_s=0.05))
        while not shared_redis.client.exists(key):  # noqa: ASYNC110 - a key in Redis
            await asyncio.sleep(0)
        shared_redis.client.set(key, "router-2")

    assert not sweeping.result().is_ours
    assert sweeping.result().num_dropped < 3_000


async def test_a_stream_that_nobody_writes_is_forgotten(store: RedisStore) -> None:
    """After a while, with its blocks; unless a router writes it again."""
    await store.write([stored(R1, [1, 2]), stored(R2, [2, 3])])
    await store.leave([R1, R2])
    assert (await store.sweep(forget_after_s=0)).num_streams == 0
    await store.hold([R2])
    await store.sweep(forget_after_s=0)
    await store.leave([R2])

    swept = await store.sweep(pause_s=0, forget_after_s=0)

    assert swept.num_streams == 0
    assert set(await store.heads()) == {R2}
    assert await blocks(store, ALL) == {(R2, "gpu"): {2, 3}}


# -- what may be wrong ---------------------------------------------------------------------------


async def test_keys_of_others_are_left_alone(shared_redis: RedisServer, namespace: str) -> None:
    """Other programs', and other namespaces'."""
    shared_redis.client.set(f"{{wr:{namespace}}}other", "x")
    async with (
        opened(shared_redis.url, namespace=namespace) as one,
        opened(shared_redis.url, namespace=namespace + "-2") as two,
    ):
        await one.hold([R1])
        await two.hold([R1])
        await one.write([stored(R1, [1])])
        await two.write([stored(R1, [2])])
        await one.sweep()

        assert await blocks(one, ALL) == {(R1, "gpu"): {1}}
        assert await blocks(two, ALL) == {(R1, "gpu"): {2}}
    assert shared_redis.client.get(f"{{wr:{namespace}}}other") == b"x"


async def test_garbage_under_our_keys_is_counted_and_skipped(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """Other types, odd fields, entries that say nothing."""
    base = f"{{wr:{namespace}}}:"
    client = shared_redis.client
    client.set(f"{base}b:".encode() + pack([0x0101])[:2], "not a hash")
    client.hset(f"{base}b:".encode() + pack([0x0202])[:2], mapping={"x": "y", b"\0" * 6: "z" * 99})
    client.hset(f"{base}holders", mapping={"400": "nonsense", "401": "gpu "})
    client.hset(f"{base}feeds", mapping={b"w\xff": "x", "wr9": "1", "pr9": "garbage", "zz": "1"})

    assert await store.write([stored(POOL_STREAM, [0x0101, 0x0202, 5], "pool")]) == [OK]
    assert store.num_garbage == 1
    assert await store.write([removed(POOL_STREAM, [0x0101], "pool")]) == [OK]
    assert store.num_garbage == 2
    assert {0x0202, 5} <= (await blocks(store, ALL))[POOL_STREAM, "pool"]
    await store.write([stored(R1, [1])])
    num_garbage = store.num_garbage
    odd = TierChange("gpu", b"seven b")
    for entry in (b"\xc1", DEEP_MSGPACK, encode((odd,)), encode((TierChange("pool", pack([1])),))):
        client.rpush(f"{base}log:{R1}", entry)
    await store.write([stored(R1, [2])])
    assert (await blocks(store, [R1]))[R1, "gpu"] == {1, 2}
    assert store.num_garbage == num_garbage + 4
    assert set(await store.heads()) == {R1}
    assert (await store.sweep(pause_s=0)).is_ours


async def test_something_else_under_a_key_is_refused(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """With what to do about it."""
    shared_redis.client.set(f"{{wr:{namespace}}}:feeds", "x")
    with pytest.raises(StoreRefused, match=r"redis\.namespace"):
        await store.write([stored(R1, [1])])
    shared_redis.client.set(f"{{wr:{namespace}}}:log:{R2}", "x")
    shared_redis.client.set(f"{{wr:{namespace}}}:replicas", "x")
    with pytest.raises(StoreRefused, match=r"redis\.namespace"):
        await store.records.orders()
    with pytest.raises(StoreRefused, match=r"redis\.namespace"):
        await read(store, R2)


@pytest.mark.parametrize("version", ["6.2", "7"])
async def test_a_full_redis_is_read_and_relieved(start_redis: Start, version: str) -> None:
    """Stores have no room; removals, leases, heartbeats and notes go through."""
    server = start_redis(version)
    async with opened(server.url) as store:
        await store.hold([R1])
        await store.write([stored(R1, range(5_000))])
        server.client.config_set("maxmemory-policy", "noeviction")
        server.client.config_set("maxmemory", "1mb")

        assert await store.write([stored(R1, [1, 2])]) == [NO_ROOM]
        assert await store.write([stored(R1, range(9_000, 12_000))]) == [NO_ROOM]
        assert len((await blocks(store, ALL))[R1, "gpu"]) == 5_000
        assert await store.hold([R1]) == {R1}
        assert (await store.beat(b"")).routers == {"router-1"}
        await store.publish([Alive()])
        assert await store.write([removed(R1, range(4_000))]) == [OK]
        assert len((await blocks(store, ALL))[R1, "gpu"]) == 1_000
        with pytest.raises(StoreRefused, match="raise maxmemory"):
            await store.records.put_sessions({1: SessionState(R1, 1, None)}, 60)
        assert await store.write([Delta(stream_id=R1, cleared=True)]) == [OK]
        assert await blocks(store, ALL) == {}


async def test_a_redis_that_evicts_blocks_is_refused(start_redis: Start) -> None:
    """Evicting holders would credit blocks to others; evicting leases only costs."""
    server = start_redis(maxmemory="100mb", maxmemory_policy="volatile-lru")
    async with opened(server.url) as store:
        server.client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(StoreRefused, match="allkeys-lru may evict"):
            await store.open()


async def test_buckets_stay_compact(
    store: RedisStore, shared_redis: RedisServer, namespace: str
) -> None:
    """One encoding for hashes of few short fields, before Redis 7 and since."""
    await store.write([stored(POOL_STREAM, range(0, 300 << 16, 1 << 16), "pool")])

    (bucket,) = shared_redis.client.keys(f"{{wr:{namespace}}}:b:*")

    assert shared_redis.client.hlen(bucket) == 300
    assert shared_redis.client.object("encoding", bucket) in (b"ziplist", b"listpack")
