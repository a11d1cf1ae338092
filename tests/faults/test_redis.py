"""What is lost when Redis is: never a request. Each fault with two routers under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loadtest.emulator.emulator import Emulator
from router.base.backoff import Backoff
from router.base.errors import StoreUnavailable
from router.base.messages import SCHEMA, UPGRADED
from router.cluster import following
from router.cluster.sharing import Sharing
from tests.faults.several import exact, has_written, turns
from tests.faults.stage import (
    PATIENCE_S,
    SESSION,
    Engines,
    Json,
    Reply,
    Stage,
    chat,
    on_stage,
    on_stages,
    together,
    truth,
    words,
)
from tests.fuzz.samples import DEEP_MSGPACK
from tests.ports import free_port
from tests.redis_servers import RedisServer, Start, binary, start_sentinel

BASE = "{wr:default}:"
HASTY = {"redis__timeout_s": 0.5}
PATIENT = {"redis__timeout_s": 10.0, "redis__lease_s": 12.0}
"""A machine under load keeps these: what is lost was lost with Redis."""


class Load:
    """Requests all the while, at all routers in turn, and what became of them."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    async def run(self, stages: Sequence[Stage]) -> None:
        number = 0
        while True:
            stage = stages[number % len(stages)]
            session = {"X-Session-ID": f"{SESSION}-{number % 5}"}
            body = chat(words(number % 5), words(number % 23), words(number))
            self.replies.append(await stage.ask(body, headers=session))
            number += 1
            await asyncio.sleep(0.005)

    async def more(self, stage: Stage, number: int = 10) -> None:
        """Wait for some more answers."""
        wanted = len(self.replies) + number
        await stage.until(lambda: len(self.replies) >= wanted)


@asynccontextmanager
async def under_load(stages: Sequence[Stage]) -> AsyncIterator[Load]:
    """Keep the routers busy; at the end every request must have been answered."""
    load = Load()
    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(load.run(stages))
        await load.more(stages[0])
        yield load
        await load.more(stages[0])
        task.cancel()
    assert {reply.status for reply in load.replies} == {200}


def outages(stage: Stage) -> float:
    return stage.metric("warmroute_sharing_total", kind="outages")


async def attempts(stage: Stage, number: int) -> None:
    """Wait until Redis was tried so often."""
    sharing = stage.router.cluster.sharing
    assert sharing is not None
    await stage.until(lambda: sharing.num_attempts >= number)


async def both(stages: Sequence[Stage], is_so: Callable[[Stage], object]) -> None:
    for stage in stages:
        await stage.until(lambda stage=stage: is_so(stage))  # type: ignore[misc]


def is_on(stage: Stage, redis: RedisServer) -> bool:
    """Return whether a router shares through what Redis holds now, not through what it held."""
    sharing = stage.router.cluster.sharing
    assert sharing is not None
    stored = redis.client.hget(BASE + "meta", "incarnation")
    return sharing.facts is not None and sharing.facts.incarnation.encode() == stored


async def as_before(stages: Sequence[Stage], engines: Sequence[Emulator]) -> None:
    """See that all is shared again, known, and predicted to the token."""
    await together(stages, *engines)
    assert exact(await turns(stages, engines, num_turns=4, session=7))
    for stage in stages:
        for _ in range(400):
            if (await stage.sharing())["routers"] == len(stages):
                break
            await asyncio.sleep(0.05)
        state = await stage.sharing()
        assert (state["state"], state["reason"], state["routers"]) == ("shared", "", len(stages))


# -- it goes, and comes back ---------------------------------------------------------------------


@pytest.mark.parametrize("version", ["6.2", "7"])
async def test_redis_is_killed_and_comes_back_empty(start_redis: Start, version: str) -> None:
    """Predictions stay exact; then one router writes everything again."""
    redis = start_redis(version)
    async with Engines(2) as engines, on_stages(*engines, redis=redis, **PATIENT) as stages:
        async with under_load(stages) as load:
            redis.stop()
            await both(stages, lambda s: s.metric("warmroute_redis_up") == 0)
            await load.more(stages[0])
            await both(stages, lambda s: s.metric("warmroute_feeds", role="direct") == 2)
        for stage in stages:
            await stage.knows(*engines)
            state = await stage.sharing()
            assert state["state"] == "degraded"
            assert "127.0.0.1" in state["reason"]
            assert stage.metric("warmroute_routers") == 1
        assert exact(await turns(stages, engines, session=1))
        async with under_load(stages):
            redis.start()
            await both(stages, lambda s: s.metric("warmroute_redis_up") == 1)
        await as_before(stages, engines)
        assert stages[0].log.count("redis is unreachable: this router shares nothing") <= 8


async def test_a_hung_redis_is_left_alone(start_redis: Start) -> None:
    """Connected, and silent: no request waits. When it goes on, so does sharing, as it was."""
    redis = start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis, **HASTY) as stages:
        async with under_load(stages) as load:
            redis.pause()
            await both(stages, lambda s: s.metric("warmroute_redis_up") == 0)
            await load.more(stages[0])
        for stage in stages:
            await stage.knows(*engines)
            assert "did not answer" in (await stage.sharing())["reason"]
        redis.resume()
        await as_before(stages, engines)


async def test_a_router_that_starts_while_redis_hangs_serves(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readiness waits for Redis for some seconds (here 0.5 s), and not for longer."""
    monkeypatch.setattr(following, "SETTLE_S", 0.5)
    redis = start_redis()
    async with Engines(1) as (engine,):
        redis.pause()
        async with on_stage(engine, redis=redis, redis__timeout_s=60.0) as stage:
            assert (await stage.ask(chat(words(1)))).status == 200
            await stage.knows(engine)
            assert exact([await stage.ask(chat(words(1)))])
            assert (await stage.sharing())["reason"] == "not connected yet"
            redis.resume()
            await together([stage], engine)


async def test_a_router_that_ends_while_redis_hangs_leaves_nothing_open(
    start_redis: Start,
) -> None:
    """It cannot say goodbye, and does not wait for that."""
    redis = start_redis()
    async with Engines(1) as (engine,):
        async with on_stage(engine, redis=redis, redis__timeout_s=60.0) as stage:
            await together([stage], engine)
            redis.pause()
        store = stage.router.cluster.store
        assert store is not None
        assert store._connection._pool is None


async def test_a_router_that_ends_as_redis_fails_ends(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment of its end Redis goes; it does not try again for ever."""
    waits = iter([True])

    async def fails_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if next(waits, False):  # once: a router that goes on must end with this test
                raise StoreUnavailable("gone")

    share = Sharing._share

    async def until_then(sharing: Sharing, backoff: Backoff) -> None:
        async with asyncio.TaskGroup() as tg:
            tg.create_task(fails_at_the_end())
            await share(sharing, backoff)

    monkeypatch.setattr(Sharing, "_share", until_then)
    redis = start_redis()
    async with Engines(1) as (engine,), asyncio.timeout(PATIENCE_S):
        async with on_stage(engine, redis=redis) as stage:
            await together([stage], engine)

        assert "redis is unreachable" in stage.log


async def test_a_flushed_redis_is_filled_again(start_redis: Start) -> None:
    """FLUSHALL is noticed, and what the routers know goes back into it."""
    redis = start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        async with under_load(stages):
            redis.client.flushall()
            await both(stages, lambda s: outages(s) >= 1)
        await as_before(stages, engines)
        assert "Redis was emptied or replaced" in stages[0].log


def num_positions(redis: RedisServer) -> int:
    """Count the streams whose log in Redis is complete up to a position."""
    heads: Any = redis.client.hkeys("{wr:default}:feeds")
    return sum(name.startswith(b"p") for name in heads)


async def test_connections_cut_are_opened_again(start_redis: Start) -> None:
    """A proxy, a firewall, CLIENT KILL: no block is written again for it."""
    redis = start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis, **PATIENT) as stages:
        for session in range(4):  # both engines: a log without a position is begun again
            await turns(stages, engines, 2, session)
        await stages[0].until(lambda: num_positions(redis) == len(engines))
        rewrites = [s.metric("warmroute_sharing_total", kind="rewrites") for s in stages]
        async with under_load(stages) as load:
            for _ in range(5):
                redis.cut_connections()
                await load.more(stages[0], 5)
        await as_before(stages, engines)
        after = [s.metric("warmroute_sharing_total", kind="rewrites") for s in stages]
        assert after == rewrites


async def test_a_slow_redis_delays_no_request(start_redis: Start) -> None:
    """Half a second for everything, within its deadline: routers go on, a bit behind."""
    redis = start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        async with under_load(stages) as load:
            redis.client.execute_command("CLIENT", "PAUSE", "400", "ALL")
            num_before = len(load.replies)
            await load.more(stages[0], 20)
            assert len(load.replies) - num_before >= 20
        await as_before(stages, engines)


async def test_redis_comes_later(start_redis: Start) -> None:
    """Routers that started without it are on their own until then."""
    redis = start_redis()
    redis.stop()
    async with Engines(2) as engines, on_stage(*engines, redis=redis) as one:
        async with on_stage(*engines, redis=redis) as other:
            stages = [one, other]
            assert exact(await turns(stages, engines))
            for stage in stages:
                assert (await stage.sharing())["state"] == "degraded"
            async with under_load(stages):
                redis.start()
                await both(stages, lambda s: s.metric("warmroute_redis_up") == 1)
            await as_before(stages, engines)


async def test_a_redis_that_becomes_a_replica_is_named(start_redis: Start) -> None:
    """Read-only: each router is on its own until it is a master again."""
    redis, master = start_redis(), start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        async with under_load(stages):
            redis.client.replicaof("127.0.0.1", master.port)
            await both(stages, lambda s: "is a replica" in s.log)
            await both(stages, lambda s: s.metric("warmroute_redis_up") == 0)
        for stage in stages:
            await stage.knows(*engines)
            assert "name its master in redis.url" in (await stage.sharing())["reason"]
        redis.client.replicaof("NO", "ONE")
        await as_before(stages, engines)


@pytest.mark.parametrize("version", ["6.2", "7"])
async def test_a_sentinel_fails_over(
    start_redis: Start, tmp_path_factory: pytest.TempPathFactory, version: str
) -> None:
    """The master is killed; routers find the new one and share through it. One Sentinel is gone."""
    master, replica = start_redis(version), start_redis(version)
    replica.client.replicaof("127.0.0.1", master.port)
    sentinel = start_sentinel(binary(version), tmp_path_factory.mktemp("s") / "s", master, "wr")
    try:
        settings = {
            "redis__url": None,
            "redis__sentinels": (f"127.0.0.1:{free_port()}", f"127.0.0.1:{sentinel.port}"),
            "redis__sentinel_service": "wr",
        }
        async with Engines(2) as engines, on_stages(*engines, redis=replica, **settings) as stages:
            async with under_load(stages):
                await stages[0].until(
                    lambda: sentinel.client.sentinel_master("wr")["num-slaves"] == 1
                )
                master.stop()
                await both(stages, lambda s: outages(s) >= 1)
                await both(stages, lambda s: s.metric("warmroute_redis_up") == 1)
            await as_before(stages, engines)
            assert str(replica.port) in (await stages[0].sharing())["redis"]
    finally:
        sentinel.stop()


# -- it will not do ------------------------------------------------------------------------------


def meta(**fields: object) -> Callable[[RedisServer], None]:
    return lambda redis: redis.client.hset(BASE + "meta", mapping=fields)  # type: ignore[arg-type, return-value]


REFUSED = {
    "no password given": ({"requirepass": "x"}, {}, None, "it requires a password"),
    "wrong password": (
        {"requirepass": "x"},
        {"redis_password": "y"},
        None,
        "wrong password, or user",
    ),
    "no such database": ({"databases": "1"}, {"db": 1}, None, "no such database: see redis.url"),
    "an older schema": (
        {},
        {},
        meta(schema=0, incarnation="x"),
        "stop the older routers and delete the keys {wr:default}:*",
    ),
    "a newer schema": ({}, {}, meta(schema=SCHEMA + 1, incarnation="x"), "update this router"),
    "no schema of ours": ({}, {}, meta(schema="abc"), "another program uses the key"),
    "evicts": (
        {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"},
        {},
        None,
        "set it to noeviction",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_redis_that_will_not_do_is_named(start_redis: Start, case: str) -> None:
    """The router serves on its own; log and admin API say what to do about it, once."""
    options, settings, prepare, reason = REFUSED[case]
    redis = start_redis(**options)
    settings = dict(settings)
    if prepare is not None:
        prepare(redis)
    if "db" in settings:
        settings["redis__url"] = redis.url[:-1] + str(settings.pop("db"))
    async with Engines(1) as (engine,), on_stage(engine, redis=redis, **settings) as stage:
        assert (await stage.ask(chat(words(1)))).status == 200
        await stage.knows(engine)
        assert exact([await stage.ask(chat(words(1)))])
        await attempts(stage, 4)
        state = await stage.sharing()

        assert state["state"] == "degraded"
        assert reason in state["reason"]
        assert stage.log.count("redis refused: this router shares nothing") == 2  # text and JSON
        assert stage.metric("warmroute_redis_up") == 0
        assert stage.state("r1") == "exact"


async def test_a_password_is_used_and_shown_nowhere(start_redis: Start) -> None:
    """Right from the start; and changed while routers run: they are on their own until it fits."""
    redis = start_redis(requirepass="pw-wr-s3cret")
    async with (
        Engines(1) as (engine,),
        on_stages(engine, redis=redis, redis_password="pw-wr-s3cret") as stages,
    ):
        redis.client.config_set("requirepass", "another")
        redis.cut_connections()
        await both(stages, lambda s: "wrong password" in s.log)
        assert exact(await turns(stages, [engine]))
        redis.client.config_set("requirepass", "pw-wr-s3cret")
        await as_before(stages, [engine])


class NotRedis:
    """A server that accepts, and says the same to everything."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self.url = ""

    async def __aenter__(self) -> NotRedis:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                if self._answer is not None:
                    writer.write(self._answer)
                    if not self._answer:
                        break
        writer.transport.abort()


ANSWERS = {
    "nonsense": (b"\x00\xff\x00" * 30, "is not Redis"),
    "nil": (b"$-1\r\n" * 8, ""),
    "silence": (None, "did not answer"),
    "hangs up": (b"", ""),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_what_is_no_redis_is_named(case: str) -> None:
    """Whatever it answers: the router serves."""
    answer, reason = ANSWERS[case]
    async with (
        NotRedis(answer) as server,
        Engines(1) as (engine,),
        on_stage(engine, redis__url=server.url, **HASTY) as stage,
    ):
        assert (await stage.ask(chat(words(1)))).status == 200
        await stage.knows(engine)
        await attempts(stage, 3)
        state = await stage.sharing()

        assert state["state"] == "degraded"
        assert reason in state["reason"]
        assert "internal error" not in stage.log


KEYS = {
    "the head": ["meta"],
    "all others": ["sweeper", "holders", "feeds", "routers", "sessions", "replicas"],
}


@pytest.mark.parametrize("case", KEYS)
async def test_foreign_keys_are_named(start_redis: Start, case: str) -> None:
    """Something else lies under our names: said once, served without; when it is gone, shared."""
    redis = start_redis()
    for key in KEYS[case]:
        redis.client.rpush(BASE + key, "not", "ours")
    async with Engines(1) as (engine,), on_stage(engine, redis=redis) as stage:
        assert (await stage.ask(chat(words(1)))).status == 200
        await stage.knows(engine)
        await attempts(stage, 4)
        assert stage.log.count("a key of the namespace has other contents") == 2  # text and JSON
        assert stage.log.count("redis is connected") <= 2
        for key in KEYS[case]:
            redis.client.delete(BASE + key)
        await together([stage], engine)


async def test_garbage_in_our_own_keys_does_no_harm(start_redis: Start) -> None:
    """Whatever was written into them: counted, survived, and put right where it is ours."""
    redis = start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        client = redis.client
        async with under_load(stages):
            for key in ("holders", "feeds", "sessions", "replicas"):
                for field in ("", "x", "n", "nx", "7", "n\xff"):
                    client.hset(BASE + key, field, b"\xc1garbage")
                    client.hset(BASE + key, "deep" + field, DEEP_MSGPACK)
            client.hset(BASE + "feeds", mapping={b"w\xff": "x", "wy": "x", "py": DEEP_MSGPACK})
            client.hset(BASE + "feeds", mapping={"wv": b"\xff", "sv": DEEP_MSGPACK})
            client.hset(BASE + "holders", mapping={"9" * 5_000: "gpu x", "8": DEEP_MSGPACK})
            for entry in (b"", b"\xc1", b"\xff", DEEP_MSGPACK):
                client.publish(f"{BASE}notes:{SCHEMA}:0", entry)
            client.zadd(BASE + "routers", {b"\xff": 1e18, "y": 1e18})
            client.set(b"{wr:default}:load:\xff", b"\xc1")
            client.set(BASE + "load:y", DEEP_MSGPACK)
            for bucket in range(0, 65536, 1001):
                client.hset(b"{wr:default}:b:" + bucket.to_bytes(2, "little"), "odd", "x")
            await both(stages, lambda s: s.metric("warmroute_routers") == 4)
        client.zrem(BASE + "routers", b"\xff", "y")
        await as_before(stages, engines)
        assert stages[0].metric("warmroute_sharing_total", kind="garbage") > 0
        assert "internal error" not in stages[0].log


@pytest.mark.parametrize("field", ["incarnation", "schema"])
async def test_a_spoilt_head_does_no_harm(start_redis: Start, field: str) -> None:
    """What everything hangs on is overwritten: noticed, and served without."""
    redis = start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        async with under_load(stages):
            redis.client.hset(BASE + "meta", field, "abc")
            await both(stages, lambda s: outages(s) >= 1)
        redis.client.flushall()
        await both(stages, lambda s: is_on(s, redis))
        await as_before(stages, engines)


# -- it has no room, or lost some ----------------------------------------------------------------


async def test_a_full_redis_is_named_and_survived(start_redis: Start) -> None:
    """What is new is not published, what is gone is: no wrong credit. With room again: all is."""
    redis = start_redis(**{"maxmemory-policy": "noeviction"})
    small = {"num_gpu_blocks": 150}
    async with Engines(2, **small) as engines, on_stages(*engines, redis=redis) as stages:
        async with under_load(stages) as load:
            redis.client.config_set("maxmemory", 1)
            await stages[0].until(
                lambda: (
                    sum(s.metric("warmroute_sharing_total", kind="deltas_refused") for s in stages)
                    >= 2
                )
            )
            await load.more(stages[0])
        for stage in stages:
            await stage.until(lambda stage=stage: nothing_too_much(stage, engines))  # type: ignore[misc]
            assert "redis refused" not in stage.log
        assert 2 <= stages[0].log.count("redis is full") <= 2 * len(stages)
        redis.client.config_set("maxmemory", 0)
        await as_before(stages, engines)
        await stages[0].until(lambda: "redis accepts writes again" in stages[0].log)


def nothing_too_much(stage: Stage, engines: Sequence[Emulator]) -> bool:
    return all(
        known <= true
        for engine in engines
        for known, true in zip(stage.held(engine), truth(engine), strict=True)
    )


async def test_a_router_without_the_lease_does_not_write(start_redis: Start) -> None:
    """A router whose lease is gone stops; when it has the lease again, it writes everything."""
    redis = start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        async with under_load(stages):
            for key in redis.client.keys("*:lease:*"):
                redis.client.set(key, "a router that is not there", px=500)
            await stages[0].until(
                lambda: sum(s.metric("warmroute_feeds", role="leading") for s in stages) == 0
            )
        await as_before(stages, engines)


@pytest.mark.parametrize("schema", UPGRADED)
async def test_contents_of_an_older_schema_are_upgraded(start_redis: Start, schema: str) -> None:
    """Its blocks and notes go, what operators ordered stays."""
    redis = start_redis()
    async with Engines(2) as (one, two):
        async with on_stage(one, redis=redis) as stage:
            await stage.admin("/admin/replicas", {"url": two.url})
            await stage.until(lambda: redis.client.hlen(BASE + "replicas"))
        redis.client.hset(BASE + "meta", mapping={"schema": schema, "incarnation": "old"})
        redis.client.xadd(BASE + "work", {"r": "x", "d": b""})
        redis.client.hset(BASE + "holders", mapping={"0": "gpu r1#0", "gpu r1#0": "0"})
        redis.client.hset(BASE + "b:xx", "field1", b"\x01")
        redis.client.hset(BASE + "feeds", mapping={"wr1#0": "old", "pr1#0": b"\x92\x07\xa1m"})
        async with on_stage(one, redis=redis) as stage:
            await together([stage], one, two)

            assert redis.client.hget(BASE + "meta", "schema") == str(SCHEMA).encode()
            assert redis.client.hget(BASE + "meta", "incarnation") != b"old"
            assert not redis.client.exists(BASE + "work")
            await stage.until(lambda: not redis.client.exists(BASE + "b:xx", BASE + "holders"))


# -- looked up in Redis --------------------------------------------------------------------------

LOOKED_UP = {"index__mode": "redis", "redis__lookup_timeout_s": 5.0}


def unreachable(engine: Emulator, port: int) -> Json:
    """Configure an engine whose events come from a port where nothing listens."""
    return {"url": engine.url, "name": "far", "events": (f"tcp://127.0.0.1:{port}",)}


@pytest.mark.parametrize("version", ["6.2", "7"])
async def test_blocks_of_an_unreachable_event_port_are_looked_up(
    start_redis: Start, version: str
) -> None:
    """One router reaches the engine and writes its blocks; the other asks Redis, once a request."""
    redis = start_redis(version)
    port = free_port()
    async with Engines(1) as (engine,):
        near = {"replicas": [{"url": engine.url, "name": "far"}]}
        far = {"replicas": [unreachable(engine, port)]}
        async with on_stage(redis=redis, **near) as writer:
            await together([writer], engine)
            async with on_stage(redis=redis, ready=False, **far, **LOOKED_UP) as stage:
                await stage.until(lambda: len(stage.router.fleet.members.replicas) == 1)
                replies = []
                texts = [words(1)]
                for _ in range(5):
                    replies.append(await stage.ask(chat(*texts)))
                    texts += [replies[-1].text, words(2)]
                    await writer.knows(engine)
                    await writer.until(lambda: has_written(writer))

                assert stage.roles() == {"far": "direct"}
                assert stage.state("far") == "blind"
                assert exact(replies)
                assert replies[-1].reported > 0
                assert stage.metric("warmroute_redis_lookups_total", result="ok") == 5


async def test_no_look_up_where_everything_is_known(start_redis: Start) -> None:
    """A router that follows the engine asks Redis nothing."""
    redis = start_redis()
    async with Engines(1) as (engine,), on_stage(engine, redis=redis, **LOOKED_UP) as stage:
        await stage.ask(chat(words(1)))
        await stage.knows(engine)
        await stage.until(lambda: stage.state("r1") == "exact")
        before = stage.metric("warmroute_redis_lookups_total")
        assert exact([await stage.ask(chat(words(1)))])
        assert stage.metric("warmroute_redis_lookups_total") == before


async def test_a_late_look_up_is_not_waited_for(start_redis: Start) -> None:
    """The local view counts; what the client gets is the same."""
    redis = start_redis()
    settings = LOOKED_UP | {"redis__lookup_timeout_s": 0.01, "redis__timeout_s": PATIENCE_S}
    async with Engines(1) as (engine,):
        far = {"replicas": [unreachable(engine, free_port())]}
        async with on_stage(redis=redis, ready=False, **far, **settings) as stage:
            await stage.until(lambda: stage.metric("warmroute_redis_up") == 1)
            await stage.until(lambda: len(stage.router.fleet.members.replicas) == 1)
            redis.pause()
            late = await stage.ask(chat(words(1)))
            redis.resume()

            assert late.status == 200
            assert stage.metric("warmroute_redis_lookups_total", result="store_unavailable") == 1
