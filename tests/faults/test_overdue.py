"""First tokens that do not come in their time. Page: docs/operate/failures.md."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from router.request import fetch, retry
from tests.faults.pooled import Pooled, pooled
from tests.faults.stage import (
    SLOW,
    Engines,
    Reply,
    Stage,
    arm,
    chat,
    num_running,
    on_stage,
    streamed,
    words,
)

ROUND = {"policy__name": "round_robin"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge as soon as a busy machine allows: a replica that is well answers in less."""
    monkeypatch.setattr(retry, "OVERDUE_FLOOR_S", 2.0)


async def learned(stage: Stage) -> None:
    """Have the router know how fast its engines are."""
    await asyncio.gather(*(stage.ask(streamed(chat(f"{number}"))) for number in range(40)))


async def reads(stage: Stage) -> dict[str, bool]:
    """Ask which candidates are counted on to read from the pool."""
    explained = (await stage.admin("/admin/explain", chat(words(0)))).json()
    return {c["view"]["id"]: c["view"]["reads_pool"] for c in explained["candidates"]}


async def suspected(it: Pooled, first: Reply) -> str:
    """Have a read of what another replica gave the pool hang, until it is suspect; name who read.

    One read: the next ones succeed.
    """
    await it.known()
    stage, name = it.stage, "r2" if first.replica == "r1" else "r1"
    arm(it.engines[int(name[1]) - 1], "hang", count=1, pooled=True)
    async with asyncio.TaskGroup() as tg:
        asked = [tg.create_task(stage.ask(streamed(chat(words(0))))) for _ in range(2)]
        await stage.until(lambda: stage.metric("warmroute_pool_suspected_total", replica=name) == 1)
        for task in asked:
            task.cancel()
    return name


async def test_a_request_leaves_a_replica_that_hangs_with_it() -> None:
    """Once: its client gets another one's answer, and the replica is not blamed for one."""
    async with Engines(2) as engines, on_stage(*engines, **ROUND) as stage:
        await learned(stage)
        arm(engines[0], "hang", count=1)
        async with asyncio.timeout(60):
            replies = [await stage.ask(streamed(chat(words(number)))) for number in range(2)]

        assert [reply.status for reply in replies] == [200, 200]
        assert stage.metric("warmroute_failovers_total", reason="overdue") == 1
        assert stage.metric("warmroute_overdue_total", result="left") == 1
        assert stage.metric("warmroute_replica_healthy") == 2


async def test_a_replica_that_hangs_with_all_is_left() -> None:
    """Overdue three times, and no first token between: others are asked, one tries it later."""
    async with Engines(2) as engines, on_stage(*engines, **ROUND) as stage:
        await learned(stage)
        arm(engines[0], "hang")
        async with asyncio.timeout(120):
            for number in range(8):
                assert (await stage.ask(streamed(chat(words(number))))).status == 200
                if not stage.metric("warmroute_replica_healthy", replica="r1"):
                    break

        assert stage.metric("warmroute_failovers_total", reason="overdue") == 3
        assert not stage.metric("warmroute_replica_healthy", replica="r1")


async def test_overload_moves_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are late alike: what left would only lose its place."""
    monkeypatch.setattr(retry, "OVERDUE_FLOOR_S", 4.0)  # all have been sent in half of it
    async with Engines(2, time_model=SLOW) as engines, on_stage(*engines, **ROUND) as stage:
        await learned(stage)
        for state in stage.router.fleet.members.states.values():  # a busy machine waits, too
            state.speed.fit.model = replace(state.speed.fit.model, base_ms=20.0, error_ms=0.0)
        ranks = [engine.replica.ranks[0].engine for engine in engines]
        for rank in ranks:
            rank.speed = 1e-9
        async with asyncio.TaskGroup() as tg:
            asked = [
                tg.create_task(stage.ask(streamed(chat(words(number))))) for number in range(6)
            ]
            await stage.until(lambda: sum(map(num_running, engines)) == 6)
            await stage.until(
                lambda: stage.metric("warmroute_overdue_total", result="late_elsewhere") >= 3
            )
            for task in asked:
                task.cancel()

        assert stage.metric("warmroute_failovers_total") == 0
        assert stage.metric("warmroute_replica_healthy") == 2


async def test_a_pool_read_that_hangs_is_left_and_not_counted_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After seconds, whatever others are given: it goes on with what it holds; others fetch."""
    monkeypatch.setattr(retry, "OVERDUE_FLOOR_S", 1000.0)
    async with pooled(**ROUND) as it:
        stage = it.stage
        await learned(stage)
        first = await it.ask(0)
        await it.known()
        other = next(
            e for e, name in zip(it.engines, ("r1", "r2"), strict=True) if name != first.replica
        )
        arm(other, "hang", pooled=True)
        async with asyncio.timeout(60):
            for _ in range(4):  # until the round comes to it
                assert (await stage.ask(streamed(chat(words(0))))).status == 200
                if stage.metric("warmroute_pool_suspected_total"):
                    break
        # At once: the first suspicion lasts ten seconds, of which a busy machine may need some.
        assert await reads(stage) == {
            first.replica: True,
            "r2" if first.replica == "r1" else "r1": False,
        }
        assert stage.metric("warmroute_failovers_total", reason="overdue") == 1
        assert stage.metric("warmroute_replica_healthy") == 2


async def test_a_read_that_succeeds_is_counted_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads what was not counted on, and says so: the next reads are."""
    monkeypatch.setattr(fetch, "SUSPECT_S", (1000.0, 1000.0))
    monkeypatch.setattr(retry, "OVERDUE_FLOOR_S", 1000.0)
    async with pooled(forward__max_tries=1, **ROUND) as it:
        await learned(it.stage)
        first = await it.ask(0)
        name = await suspected(it, first)  # by a request that was sent as often as it may be
        assert it.stage.metric("warmroute_failovers_total") == 0
        assert not (await reads(it.stage))[name]
        moved = await it.move(0, first)

        assert (moved.replica, moved.predicted) == (name, 0)
        assert moved.reported > 0
        assert (await reads(it.stage))[name]
