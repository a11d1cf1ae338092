"""Several routers in front of two real replicas: one index, one load, whichever dies.

Two replicas without a pool (`replicas`), then two with a Mooncake pool (`pooled`) whose memory is
a process of its own: what is in the pool outlives a replica. Redis and the master are real, too.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from loadtest.agents import Session, make_sessions
from loadtest.results import TurnResult
from tests.engines.harness import (
    ENGINE_READY_S,
    MASTER_READY_S,
    ROUTER_READY_S,
    Engine,
    EventTap,
    Master,
    Router,
    all_up,
    answers,
    num_removed,
    until,
    wait_until,
)
from tests.engines.load import Load, failures
from tests.engines.turns import (
    MIN_EXACT_RATIO,
    MIN_POOLED_RATIO,
    PROFILE,
    mixed_sessions,
    num_pooled,
    settled,
    take_turns,
    wrong_predictions,
)
from tests.ports import free_port
from tests.redis_servers import RedisServer, binary

BUFFER_STEPS = 200  # batches an engine can replay: some seconds of load, not a session's history

StartRouters = Callable[..., Any]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests; every test has a namespace of its own."""
    running = RedisServer(binary("7"), tmp_path_factory.mktemp("redis"))
    yield running.start(free_port())
    running.stop()


@pytest.fixture(scope="module")
def master(log_dir: Path) -> Iterator[Master]:
    """A master that evicts from 900 blocks on."""
    running = Master(log_dir, watermark=0.9)
    with all_up([running], timeout_s=MASTER_READY_S):
        yield running


@pytest.fixture(scope="module")
def both(master: Master, log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two replicas with small caches and short memories, and a pool beside them."""
    memory = master.memory(log_dir)
    engines = (
        master.engine("q1", log_dir, segment_bytes=0, buffer_steps=BUFFER_STEPS),
        master.engine("q2", log_dir, segment_bytes=0, buffer_steps=BUFFER_STEPS),
    )
    with all_up([memory, *engines]):
        yield engines


@pytest.fixture
def pooled(both: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Both alive, their own caches cold; what the pool has, it has."""
    for engine in both:
        if not answers(f"{engine.url}/health"):
            engine.kill()
            engine.start().wait_ready("/health", ENGINE_READY_S)
        engine.reset_prefix_cache()
    return both


@pytest.fixture
def start_routers(redis: RedisServer, master: Master, log_dir: Path) -> StartRouters:
    """Make routers of one namespace; all of them are ready, and see one another."""
    namespace = f"engines-{uuid.uuid4().hex[:8]}"

    @contextmanager
    def start(
        replicas: Sequence[Engine], num_routers: int = 2, *flags: str, **options: Any
    ) -> Iterator[list[Router]]:
        flags = ("--redis", redis.url, "--set", f"redis.namespace={namespace}", *flags)
        routers = [Router(replicas, log_dir, options=flags, **options) for _ in range(num_routers)]
        with all_up(routers, "/readyz", ROUTER_READY_S):
            wait_until(lambda: all(sees(r) >= num_routers for r in routers), 60, "one another")
            yield routers

    return start


def sees(router: Router) -> float:
    """Count the routers it knows of, itself included."""
    return router.metric("warmroute_routers")


def with_pool(master: Master) -> tuple[str, ...]:
    """Flags of a router that knows the pool."""
    return master.options


# ------------------------------------------------------------------------- without a pool


async def test_two_routers_are_as_good_as_one(
    replicas: tuple[Engine, Engine],
    start_routers: StartRouters,
    taps: tuple[EventTap, EventTap],
) -> None:
    """Sessions go from one to the other and back, caches overrun: predicted, and kept warm.

    What overrun caches lose depends on timing: 0.99 to 1.4 times what one router had computed.
    """
    with start_routers(replicas, 1) as [alone]:
        single = await take_turns(alone.url, some_sessions(), scripted=True)
    for engine in replicas:
        engine.reset_prefix_cache()
    num_before = num_removed(taps)
    with start_routers(replicas) as routers:
        for router in routers:  # the blocks in Redis count until the engine has replayed
            wait_until(lambda r=router: r.metric("warmroute_index_blocks") == 0, 60, "cold caches")  # type: ignore[misc]
        turns = await take_turns([r.url for r in routers], some_sessions(), scripted=True)
        states = [router.state(name) for router in routers for name in ("r1", "r2")]

    wrong = wrong_predictions(result for _, result in turns)
    assert len(turns) >= 60
    assert num_removed(taps) > num_before + 50, "the caches were not overrun"
    assert len(wrong) <= (1 - MIN_EXACT_RATIO) * len(turns), "\n".join(wrong)
    assert states == ["exact"] * 4
    assert computed(turns) <= 2 * computed(single)


def some_sessions() -> list[Session]:
    return mixed_sessions(num_turns=6, num_sessions=5, scale_tokens=0.18, num_output_tokens=100)


async def test_looked_up_in_redis(
    replicas: tuple[Engine, Engine], start_routers: StartRouters
) -> None:
    """A router without events asks Redis, and its predictions are right."""
    # Of a busy machine's Redis each answer counts, however late.
    mode = (
        "--set",
        "index.mode=redis",
        "--set",
        "redis.lookup_timeout_s=5",
        "--set",
        "events.enabled=false",
    )
    with start_routers(replicas, 1) as [first], start_routers(replicas, 1, *mode) as [later]:
        await until(lambda: first.metric("warmroute_feeds", role="leading") == 2, "both feeds")
        sessions = mixed_sessions(num_turns=4, num_sessions=2, num_output_tokens=150)
        # Redis has the last blocks a moment later, and nothing but a pause shows that it does.
        turns = await take_turns([first.url, later.url], sessions, settle_s=0.25)
        num_found = later.metric("warmroute_redis_lookups_total", result="ok")
        num_late = later.metric("warmroute_redis_lookups_total") - num_found

    results = [result for _, result in turns]
    assert sum(r.num_cached_tokens or 0 for r in results) > 10_000
    wrong = wrong_predictions(results)
    assert len(wrong) <= num_late, "\n".join(wrong)
    assert num_found + num_late >= len(results) // 2 - 1  # of the first no one knew the contract
    assert num_late <= 2


async def test_siblings_join_across_routers(
    replicas: tuple[Engine, Engine], start_routers: StartRouters
) -> None:
    """What starts at once from one long new prefix, at both routers, computes it once or twice."""
    num_siblings, num_shared_tokens = 8, 7_680
    prefix = [1_000 + position % 5_000 for position in range(num_shared_tokens)]

    async def ask(client: httpx.AsyncClient, url: str, number: int) -> int:
        prompt = [*prefix, *[200 + number] * 40]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": False}
        usage = (await client.post(f"{url}/v1/completions", json=body)).json()["usage"]
        return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])

    with start_routers(replicas) as routers:
        async with httpx.AsyncClient(timeout=60) as client:
            asked = [ask(client, routers[number % 2].url, number) for number in range(num_siblings)]
            num_computed = sum(await asyncio.gather(*asked))

    own = num_siblings * (40 + 32)  # what is theirs alone, and a block that is not full
    assert num_shared_tokens <= num_computed <= 2 * num_shared_tokens + own


# ------------------------------------------------------------------------- with a pool


async def test_two_routers_share_what_they_know_of_the_pool(
    pooled: tuple[Engine, Engine], start_routers: StartRouters, master: Master
) -> None:
    """Sessions at once, thrown to and fro between replicas and routers, while the pool evicts."""
    num_evicted = master.metric("master_evicted_key_count")
    sessions = mixed_sessions(num_turns=6, num_sessions=5, num_output_tokens=150, scale_time=0.1)
    with start_routers(pooled, 2, *with_pool(master), policy="random") as routers:
        load = Load(routers)
        await load.run(sessions, concurrency=2)
        chosen = settled(load.results)
        states = [router.state(name) for router in routers for name in ("r1", "r2")]

    wrong = wrong_predictions(chosen)
    assert failures(load.results) == []
    assert len(chosen) >= 30, f"only {len(chosen)} of {len(load.results)} were settled"
    assert num_pooled(chosen) >= 5, "hardly anything was fetched: nothing was proved"
    assert master.metric("master_evicted_key_count") > num_evicted + 100
    assert len(wrong) <= max(1, (1 - MIN_POOLED_RATIO) * len(chosen)), "\n".join(wrong)
    assert states == ["exact"] * 4


async def test_a_session_leaves_a_busy_replica(
    pooled: tuple[Engine, Engine], start_routers: StartRouters, master: Master
) -> None:
    """One router sent long prefills there; the other one knows, and the rest is in the pool."""
    with start_routers(pooled, 2, *with_pool(master)) as (one, other):
        [session] = make_sessions(replace(PROFILE, num_sessions=1, seed=81))
        _, (_, second) = await take_turns([one.url, other.url], [session], max_rounds=2)
        owner, away = second.replica, "r2" if second.replica == "r1" else "r1"
        engine = pooled[0] if owner == "r1" else pooled[1]
        one.drain(away)
        async with busy(one, engine, num_requests=24):
            one.drain(away, draining=False)
            await until(lambda: offers(other, session_body(81)) == {"r1", "r2"}, "both again")
            await until(other.knows_pool, "the pool's layout")
            ((_, third),) = await take_turns(other.url, [session], max_rounds=1)

    assert third.replica == away
    assert_fetched(third, second)


async def test_a_late_router_is_warm(
    pooled: tuple[Engine, Engine], start_routers: StartRouters, master: Master
) -> None:
    """It knows from Redis what the engines themselves published long ago and no longer replay."""
    [session] = make_sessions(replace(PROFILE, num_sessions=1, seed=82))
    with start_routers(pooled, 1, *with_pool(master)) as [early]:
        turns = await take_turns(early.url, [session], max_rounds=3)
        published = [engine.replayable()[-1] for engine in pooled]
        forget(pooled)
        assert all(e.replayable()[0] > t for e, t in zip(pooled, published, strict=True))

        with start_routers(pooled, 1, *with_pool(master)) as [late]:
            ((_, result),) = await take_turns(late.url, [session], max_rounds=1)
            states = [late.state(name) for name in ("r1", "r2")]

    assert result.replica == turns[-1][1].replica
    assert result.predicted is not None
    assert result.predicted.gpu == result.num_cached_tokens
    assert result.predicted.gpu >= (turns[-1][1].num_prompt_tokens or 0) // 32 * 32
    assert states == ["exact"] * 2


@pytest.mark.timeout(600)
async def test_each_dies_during_load(
    pooled: tuple[Engine, Engine],
    start_routers: StartRouters,
    master: Master,
    redis: RedisServer,
) -> None:
    """Routers, Redis, the master, an engine, one after the other: no client sees an error."""
    with start_routers(pooled, 2, *with_pool(master)) as routers:
        load = Load(routers)
        supply = make_sessions(replace(PROFILE, num_sessions=200, seed=84, scale_time=0.05))
        async with asyncio.TaskGroup() as tg:
            tg.create_task(load.run(supply, concurrency=3))
            await load.more(6)
            for dying, left in ((0, routers[1]), (1, routers[0])):
                await kill_router(load, dying, left)
            await kill_redis(load, redis)
            await kill_master(load, master)
            await kill_engine(load, pooled[1])
            load.stop()
        assert failures(load.results) == []
        assert load.num_retried > 0, "no router was missed"
        assert load.num_broken_off <= 3, "more broke off than there were at once"
        sessions = mixed_sessions(num_sessions=2, num_turns=4)
        turns = await take_turns([r.url for r in routers], sessions)
        states = [router.state(name) for router in routers for name in ("r1", "r2")]

    assert wrong_predictions(result for _, result in turns) == []
    assert states == ["exact"] * 4


async def kill_router(load: Load, dying: int, left: Router) -> None:
    """Clients go to the other one, which goes on without; it comes back and joins."""
    router = load.routers[dying]
    with load.down(dying):
        await asyncio.to_thread(router.kill)
        await until(lambda: sees(left) == 1)
        await until(lambda: left.metric("warmroute_feeds", role="leading") == 2)
        await load.more(4)
        router.start()
        await asyncio.to_thread(router.wait_ready, "/readyz", ROUTER_READY_S)
    await until(lambda: sees(left) == 2)
    await load.more(4)

    assert left.metric("warmroute_peers_forgotten_total") >= 1
    assert "this router writes the replica's cache contents to redis" in left.log_path.read_text()


async def kill_redis(load: Load, redis: RedisServer) -> None:
    """Each goes on alone, and they find together again; the new Redis has nothing."""
    await asyncio.to_thread(redis.stop)
    await until(lambda: all(r.metric("warmroute_redis_up") == 0 for r in load.routers))
    await load.more(6)
    await asyncio.to_thread(redis.start)
    await until(lambda: all(sees(r) == 2 for r in load.routers))
    await load.more(6)

    for router in load.routers:
        assert router.metric("warmroute_sharing_total", kind="outages") >= 1
        log = router.log_path.read_text()
        assert "redis is unreachable: this router shares nothing" in log
        assert log.count("redis is connected: state is shared") >= 2


async def kill_master(load: Load, master: Master) -> None:
    """Nothing is counted on in the pool until the master is back."""
    await asyncio.to_thread(master.kill)
    await until(lambda: all(r.metric("warmroute_pool_up") == 0 for r in load.routers))
    await load.more(6)
    master.start()
    await asyncio.to_thread(master.wait_ready, "/health", MASTER_READY_S)
    await until(lambda: all(r.metric("warmroute_pool_up") == 1 for r in load.routers))
    await load.more(4)

    for router in load.routers:
        assert router.metric("warmroute_pool_failures_total", code="pool_gone") > 0
        assert "pool lost: its contents are not used" in router.log_path.read_text()


async def kill_engine(load: Load, engine: Engine) -> None:
    """The other replica serves alone; both routers see it go and come."""
    load.killed_replica = "r2"
    await asyncio.to_thread(engine.kill)
    await until(lambda: all(not is_up(r, "r2") for r in load.routers))
    await load.more(6)
    load.pause_s = 1.0  # starting takes both cores for half a minute as it is
    engine.start()
    await asyncio.to_thread(engine.wait_ready, "/health", ENGINE_READY_S)
    await until(lambda: all(is_up(r, "r2") for r in load.routers))
    load.pause_s = 0.0
    for router in load.routers:  # three sessions have room at the other one, and would stay there
        router.drain("r1")
    await until(lambda: any(r.replica == "r2" for r in load.results[-8:]))
    for router in load.routers:
        router.drain("r1", draining=False)

    for router in load.routers:
        log = router.log_path.read_text()
        assert "replica down" in log
        assert "replica restarted" in log


async def test_a_session_survives_its_replica(
    pooled: tuple[Engine, Engine], start_routers: StartRouters, master: Master
) -> None:
    """Killed, not drained: the next turn, at the other router, fetches what the pool has."""
    with start_routers(pooled, 2, *with_pool(master)) as (one, other):
        [session] = make_sessions(replace(PROFILE, num_sessions=1, seed=83))
        _, (_, second) = await take_turns([other.url, one.url], [session], max_rounds=2)
        engine = pooled[0] if second.replica == "r1" else pooled[1]
        await until(other.knows_pool, "the pool's layout")
        await asyncio.to_thread(engine.kill)
        ((_, third),) = await take_turns(other.url, [session], max_rounds=1)

    assert third.replica != second.replica
    assert_fetched(third, second)


# ------------------------------------------------------------------------- tools


@asynccontextmanager
async def busy(router: Router, engine: Engine, *, num_requests: int) -> AsyncIterator[None]:
    """Have long prefills computed where the router sends them; inside, they have begun.

    Those that are not done by the end are called off.
    """

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        prompt = [300 + (number + 1) * position % 7_789 for position in range(12_000)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        answer = await client.post(f"{router.url}/v1/completions", json=body)
        answer.raise_for_status()

    async with httpx.AsyncClient(timeout=600) as client, asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(client, n), name=f"{n}") for n in range(num_requests)]
        # Half of them: the first may be done before the last is there.
        half = num_requests // 2
        await until(lambda: router.metric("warmroute_inflight_requests") >= half, "work")
        yield
        # Between two prompts none is running.
        await until(lambda: engine.metric("vllm:num_requests_running") > 0, "the engine at work")
        assert not all(task.done() for task in asked), "it was busy for too short a time"
        for task in asked:
            task.cancel()


def forget(engines: Sequence[Engine]) -> None:
    """Have each engine publish more batches than it can replay."""

    def publish(engine: Engine) -> None:
        with httpx.Client(timeout=60) as client:
            for number in range(BUFFER_STEPS + 20):
                prompt = [100 + number, *range(200, 240)]  # one full block: one batch at least
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
                client.post(f"{engine.url}/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=publish, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def session_body(seed: int) -> dict[str, Any]:
    """Build the first request of a session."""
    turn = make_sessions(replace(PROFILE, num_sessions=1, seed=seed))[0].next_turn()
    assert turn is not None
    return turn.body


def offers(router: Router, body: dict[str, Any]) -> set[str]:
    """Name the replicas a router would choose from."""
    return {candidate["view"]["id"] for candidate in router.explain(body)["candidates"]}


def is_up(router: Router, replica: str) -> bool:
    return router.metric("warmroute_replica_healthy", replica=replica) == 1


def assert_fetched(result: TurnResult, before: TurnResult) -> None:
    """Hold a turn that ran elsewhere than the one before against what was said of it."""
    assert result.predicted is not None
    assert result.predicted.pool > 0
    assert result.predicted.total == result.num_cached_tokens
    assert result.predicted.total >= (before.num_prompt_tokens or 0) // 32 * 32


def computed(turns: Sequence[tuple[Any, TurnResult]]) -> int:
    return sum(result.num_computed_tokens for _, result in turns)
