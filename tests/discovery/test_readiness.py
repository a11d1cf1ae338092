"""When /readyz changes, and when it does not: docs/reference/admin.md."""

from __future__ import annotations

import asyncio

from tests.faults.stage import Engines, Stage, chat, on_stage, words

QUICK = {"health__interval_s": 0.02, "health__load_interval_s": 0.02}


async def readyz(stage: Stage) -> int:
    return (await stage.ask(None, "/readyz", method="GET")).status


async def test_a_router_that_was_ready_stays_so_without_a_replica_that_answers() -> None:
    """Dead or drained: another router would have none either. The clients' 503 says why."""
    async with Engines(2) as engines, on_stage(*engines, **QUICK) as stage:
        await stage.admin("/admin/replicas/r1/drain", {"draining": True})
        await engines[1].__aexit__(None, None, None)
        await stage.until(lambda: stage.router.fleet.members.is_down("r2"))
        reply = await stage.ask(chat(words(1)))

        assert await readyz(stage) == 200
        assert reply.status == 503
        assert "r1: draining, r2: down" in reply.error["message"]


async def test_a_router_is_not_ready_once_its_last_replica_was_removed() -> None:
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        before = await readyz(stage)
        await stage.admin("/admin/replicas/r1?now=1", method="DELETE")
        await stage.until(lambda: not stage.router.fleet.members.replicas)
        removed = await readyz(stage)
        await stage.admin("/admin/replicas", {"url": engine.url})
        await stage.ready()

        assert (before, removed, await readyz(stage)) == (200, 503, 200)


async def test_what_is_found_later_leaves_a_router_ready() -> None:
    """A restarted engine, whose history is read; another model, whose tokenizer is loaded."""
    answers: list[int] = []
    async with Engines(1) as (one,), Engines(1, served_model_names=("other",)) as (other,):
        async with on_stage(one, **QUICK) as stage:
            assert await readyz(stage) == 200
            stage.router.prompters.start_loading("other")  # and never finishes
            await stage.admin("/admin/replicas", {"url": other.url})
            await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)
            for _ in range(20):
                answers.append(await readyz(stage))
                await asyncio.sleep(0.01)
            reply = await stage.ask(chat(words(1)) | {"model": "other"})

    assert set(answers) == {200}
    assert reply.status == 200
