"""Several routers with one Redis are as good as one. Page: docs/operate/failures.md."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtest.emulator.emulator import Emulator
from router.cluster import following
from router.kv_events.subscriber import EngineEvents, Replies
from tests.faults.several import exact, has_written, others_requests, turns
from tests.faults.stage import (
    LEASE_S,
    PATIENCE_S,
    SESSION,
    SLOW,
    STUCK,
    Engines,
    Json,
    Reply,
    Stage,
    arm,
    chat,
    num_running,
    on_stage,
    on_stages,
    together,
    words,
)
from tests.redis_servers import RedisServer, Start
from tests.waiting import until, until_ready

VERSIONS = pytest.mark.parametrize("version", ["6.2", "7"])
LISTENS = re.compile(r"listens on (http://\S+) \(admin: (http://\S+)\)")
QUICK = {"health__interval_s": 0.05, "health__timeout_s": 0.2}


@VERSIONS
async def test_a_conversation_that_changes_routers_stays_exact(
    start_redis: Start, version: str
) -> None:
    """Each turn at another router: on the replica that has the rest, predicted to the token."""
    redis = start_redis(version)
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        several = [await turns(stages, engines, session=n, is_calm=True) for n in range(3)]

        for replies in several:
            assert exact(replies)
            assert all(reply.reported > 0 for reply in replies[1:])
        by_url = {
            tuple(
                stages[i % 2].router.fleet.members.replica(r.replica).url
                for i, r in enumerate(replies)
            )
            for replies in several
        }
        assert all(len(set(urls)) == 1 for urls in by_url)


@VERSIONS
async def test_a_router_that_joins_is_warm(start_redis: Start, version: str) -> None:
    """It loads what Redis has, also what engines cannot replay; its first prediction is exact."""
    redis = start_redis(version)
    async with Engines(2) as engines, on_stage(*engines, redis=redis) as first:
        for number in range(20):
            await first.ask(chat(words(number)))
        await first.knows(*engines)
        await together([first], *engines)
        async with on_stage(*engines, redis=redis) as second:
            replies = [await second.ask(chat(words(number))) for number in range(20)]
            assert exact(replies)
            assert all(reply.reported > 0 for reply in replies)
            assert second.metric("warmroute_sharing_total", kind="snapshots") >= 1
            assert set(second.roles().values()) == {"direct"}
            assert second.log.count("replay failed") == 0


async def test_what_no_router_followed_is_read_before_routers_are_ready(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last router ended, and the engines forgot all; Redis did not, and replays are slow."""
    redis = start_redis()
    async with Engines(2) as engines:
        async with on_stage(*engines, redis=redis) as last:
            await asyncio.gather(*(last.ask(chat(words(number))) for number in range(6)))
            await together([last], *engines)
            await last.until(lambda: has_written(last))
        for engine in engines:
            engine.replica.reset_prefix_cache(preempt=False)
            await compute(engine, [1, 2, 3])  # engines publish in steps
        read = EngineEvents.replay

        @asynccontextmanager
        async def slow(events: EngineEvents, start: int) -> AsyncIterator[Replies]:
            await asyncio.sleep(0.5)
            async with read(events, start) as replies:
                yield replies

        monkeypatch.setattr(EngineEvents, "replay", slow)
        # On a busy machine a router may not wait long enough for Redis, and start without it.
        monkeypatch.setattr(following, "SETTLE_S", PATIENCE_S)
        patient = {"redis__lease_s": PATIENCE_S / 6, "redis__timeout_s": PATIENCE_S}
        async with (
            on_stage(*engines, redis=redis, ready=False, **patient) as one,
            on_stage(*engines, redis=redis, ready=False, **patient) as other,
        ):
            for stage in (one, other):
                await stage.ready()
                assert stage.held(engines[0]) == stage.held(engines[1]) == [set()]
            replies = [await stage.ask(chat(words(n))) for n, stage in enumerate((one, other))]

            assert [(reply.predicted, reply.reported) for reply in replies] == [(0, 0)] * 2
            for stage in (one, other):
                assert stage.metric("warmroute_sharing_total", kind="rewrites") == 0, stage.log


async def compute(engine: Emulator, prompt: Sequence[int]) -> None:
    """Have a replica itself complete a prompt, past all routers."""
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1}
    async with aiohttp.ClientSession(raise_for_status=True) as client:
        async with client.post(f"{engine.url}/v1/completions", json=body) as answer:
            await answer.read()


async def test_siblings_at_two_routers_go_where_the_first_went(start_redis: Start) -> None:
    """What a request is computing there counts at every router, from when it was sent."""
    async with (
        Engines(2, time_model=STUCK) as engines,
        on_stages(*engines, redis=start_redis()) as stages,
    ):
        prompt = words(1, num_words=2000)
        async with under_way() as ask:
            ask(stages[0].ask(chat(prompt, words(2, num_words=4))))
            await stages[1].until(lambda: others_requests(stages[1]) == 1)
            for number in range(3, 5):
                body = chat(prompt, words(number, num_words=4))
                ask(stages[1].ask(body, headers=session(number)))
                await stages[0].until(lambda n=number: others_requests(stages[0]) == n - 2)  # type: ignore[misc]
            await stages[0].until(lambda: sum(map(num_running, engines)) == 3)

            assert sorted(map(num_running, engines)) == [0, 3]


async def test_two_routers_balance_as_one(start_redis: Start) -> None:
    """Each counts what the other has sent: prompts without anything in common spread evenly."""
    async with (
        Engines(2, time_model=STUCK) as engines,
        on_stages(*engines, redis=start_redis()) as stages,
    ):
        async with under_way() as ask:
            for number in range(8):
                one, other = stages[number % 2], stages[1 - number % 2]
                before = others_requests(other)
                ask(one.ask(chat(words(number)), headers=session(number)))
                await other.until(lambda s=other, n=before: others_requests(s) == n + 1)  # type: ignore[misc]
            await stages[0].until(lambda: sum(map(num_running, engines)) == 8)

            assert list(map(num_running, engines)) == [4, 4]


async def test_a_router_killed_leaves_nothing_behind(start_redis: Start, tmp_path: Path) -> None:
    """kill -9: the other one writes its streams; its load and claims are gone within its lease."""
    redis = start_redis()
    async with Engines(2, time_model=SLOW) as engines, serving(redis, engines, tmp_path) as process:
        async with on_stage(*engines, redis=redis) as stage:
            await stage.until(lambda: stage.metric("warmroute_routers") == 2)
            await stage.until(lambda: list(stage.roles().values()) == ["direct", "direct"])
            async with asyncio.TaskGroup() as tg:
                for number in range(20, 26):
                    tg.create_task(stage.ask(chat(words(number)), headers=session(number)))
            await stage.knows(*engines)
            assert all(held for engine in engines for held in stage.held(engine))
            for engine in engines:
                arm(engine, "slow", factor=25.0)  # until all are there
            async with asyncio.TaskGroup() as tg:
                lost = [tg.create_task(process.ask(words(n))) for n in range(1, 4)]
                await stage.until(lambda: others_requests(stage) == 3)
                kept = [tg.create_task(stage.ask(long(words(n)))) for n in range(4, 7)]
                await stage.until(lambda: sum(map(num_running, engines)) == 6)
                process.kill()
                for engine in engines:
                    arm(engine, "slow", factor=1.0)
                await stage.until(lambda: others_requests(stage) == 0)
                await stage.until(lambda: stage.metric("warmroute_routers") == 1)
                await together([stage], *engines)

            assert [task.result() for task in lost] == [None] * 3
            assert [task.result().status for task in kept] == [200] * 3
            assert stage.metric("warmroute_feeds", role="leading") == 2
            assert stage.log.count("router removed: it is silent") == 2  # text and JSON
            assert exact([await stage.ask(chat(words(n))) for n in range(4, 7)])
            assert not [key for key in redis.client.keys("*:load:*") if process.pid in key]


async def test_a_router_that_ends_gives_its_leases_back(start_redis: Start) -> None:
    """The other one writes from its next beat on; no router waits for a lease to expire."""
    redis = start_redis()
    async with Engines(2) as engines, AsyncExitStack() as stack:
        leader = await stack.enter_async_context(on_stage(*engines, redis=redis, redis__lease_s=9))
        await together([leader], *engines)
        async with on_stage(*engines, redis=redis, redis__lease_s=9) as other:
            await other.until(lambda: list(other.roles().values()) == ["direct", "direct"])
            await stack.aclose()
            leases = redis.client.mget(redis.client.keys("*:lease:*"))
            assert leader.router.cluster.peers.name.encode() not in leases  # type: ignore[union-attr]
            await other.until(lambda: set(other.roles().values()) == {"leading"})
            await other.ask(chat(words(1)))
            await other.knows(*engines)

            assert other.metric("warmroute_routers") == 1
            assert exact([await other.ask(chat(words(1)))])
            await other.until(lambda: "router left" in other.log)
            assert other.metric("warmroute_peers_forgotten_total") == 0
            assert "router removed" not in other.log


@pytest.mark.parametrize("down_s", [0.0, 0.3])
async def test_a_restarted_engine_gets_no_credit_at_any_router(
    start_redis: Start, down_s: float
) -> None:
    """Neither for its own past, nor for what Redis has of it."""
    async with Engines(1) as (engine,), on_stages(engine, redis=start_redis(), **QUICK) as stages:
        for number in range(6):
            await stages[number % 2].ask(chat(words(number)))
        for stage in stages:
            await stage.knows(engine)
        engine.changed.clear()
        arm(engine, "restart", down_s=down_s)
        await engine.changed.wait()
        for stage in stages:
            await stage.until(lambda stage=stage: stage.metric("warmroute_index_blocks") == 0)  # type: ignore[misc]
            await stage.until(lambda stage=stage: stage.metric("warmroute_replica_healthy") == 1)  # type: ignore[misc]
        replies = [await stages[number % 2].ask(chat(words(number))) for number in range(6)]

        assert all(reply.status == 200 for reply in replies)
        assert exact(replies)
        await together(stages, engine)
        for stage in stages:
            await stage.until(lambda stage=stage: stage.state("r1") == "exact")  # type: ignore[misc]
        assert exact([await stages[1 - n % 2].ask(chat(words(n))) for n in range(6)])


async def test_orders_at_one_router_are_followed_by_the_other(start_redis: Start) -> None:
    """Drain, back, add, remove; a router that starts later knows them, too."""
    redis = start_redis()
    async with (
        Engines(2) as (one, two),
        Engines(1) as (new,),
        on_stages(one, two, redis=redis) as stages,
    ):
        first, second = stages
        await first.admin("/admin/replicas/r1/drain", {"draining": True})
        await second.until(lambda: not offered(second, one))
        for number in range(4):
            assert (await second.ask(chat(words(number)))).replica == "r2"
        await second.admin("/admin/replicas/r1/drain", {"draining": False})
        await first.until(lambda: offered(first, one))

        added = await second.admin("/admin/replicas", {"url": new.url})
        assert added.status == 201
        await first.until(lambda: offered(first, new))
        await together(stages, one, two, new)
        await remove(first, "r2")
        for stage in stages:
            await stage.until(lambda stage=stage: not known(stage, two))

        async with on_stage(one, two, redis=redis) as late:
            await late.until(lambda: known(late, new) and not known(late, two))
            assert (await late.ask(chat(words(9)))).status == 200


async def test_orders_survive_a_redis_that_lost_them(start_redis: Start) -> None:
    """The router that knows them stores them again."""
    redis = start_redis()
    async with Engines(2) as (one, two), on_stages(one, redis=redis) as stages:
        await stages[0].admin("/admin/replicas", {"url": two.url})
        await stages[1].until(lambda: known(stages[1], two))
        redis.client.flushall()
        for stage in stages:
            await stage.until(
                lambda stage=stage: stage.metric("warmroute_sharing_total", kind="outages") == 1  # type: ignore[misc]
            )
        await together(stages, one, two)
        async with on_stage(one, redis=redis) as late:
            await late.until(lambda: known(late, two))


@asynccontextmanager
async def under_way() -> AsyncIterator[Callable[[Coroutine[Any, Any, Reply]], None]]:
    """Have requests under way; at the end of the block their clients are gone."""
    async with asyncio.TaskGroup() as tg:
        tasks: list[asyncio.Task[Reply]] = []
        yield lambda asked: tasks.append(tg.create_task(asked))
        for task in tasks:
            task.cancel()


def session(number: int) -> dict[str, str]:
    """Say who asks: each time another session."""
    return {"X-Session-ID": f"{SESSION}-{number}"}


def long(text: str) -> Json:
    return chat(text, max_tokens=40, ignore_eos=True)


def known(stage: Stage, engine: Emulator) -> bool:
    return any(replica.url == engine.url for replica in stage.router.fleet.members.replicas)


def offered(stage: Stage, engine: Emulator) -> bool:
    return any(r.url == engine.url and not r.draining for r in stage.router.fleet.members.replicas)


async def remove(stage: Stage, name: str) -> None:
    async with aiohttp.ClientSession() as client:
        async with client.delete(f"{stage.admin_url}/admin/replicas/{name}") as answer:
            assert answer.status == 202


class Process:
    """A router that is a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url

    @property
    def pid(self) -> bytes:
        return f"-{self._process.pid}-".encode()

    def kill(self) -> None:
        self._process.kill()

    async def ask(self, text: str) -> int | None:
        """Give the status of an answer, None where it broke off."""
        try:
            async with aiohttp.ClientSession() as client:
                path = self.url + "/v1/chat/completions"
                async with client.post(path, json=long(text) | {"max_tokens": 2000}) as answer:
                    await answer.read()
                    return answer.status
        except aiohttp.ClientError:
            return None


@asynccontextmanager
async def serving(
    redis: RedisServer, engines: Sequence[Emulator], folder: Path
) -> AsyncIterator[Process]:
    """Run `warmroute serve`, ready; it writes what all engines hold."""
    flags = [word for engine in engines for word in ("--replica", engine.url)]
    flags += ["--redis", redis.url, "--set", f"redis.lease_s={LEASE_S}"]
    flags += ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--set", "admin.open=true"]
    flags += ["--set", "listen.drain_grace_s=0"]
    output = folder / "router"
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router.cli", "serve", *flags), stderr=file
        )
    try:
        async with aiohttp.ClientSession() as client:
            await until(lambda: LISTENS.search(output.read_text()))
            found = LISTENS.search(output.read_text())
            assert found is not None
            await until_ready(client, found[1])
            leading = f'role="leading"}} {len(engines)}.0'

            async def leads() -> bool:
                return leading in await metrics(client, found[1])

            await until(leads)
        yield Process(process, found[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def metrics(client: aiohttp.ClientSession, url: str) -> str:
    async with client.get(url + "/metrics") as answer:
        return await answer.text()
