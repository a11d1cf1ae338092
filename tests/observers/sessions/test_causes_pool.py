"""Causes where replicas share a pool: what it lost, and what could not be read from it."""

from __future__ import annotations

from typing import Any

from loadtest.emulator.emulator import Emulator
from tests.faults.stage import SECRET, Stage, arm, chat, streamed, words
from tests.request.pooled import ask, listed, named, pooled

BLOCK = 16


async def last_turn(stage: Stage) -> dict[str, Any]:
    """The last turn of the stage's session; its causes are the engine's own count."""
    stage.router.story.steps.settling.close()
    turns = (await stage.admin(f"/admin/sessions/session-{SECRET}")).json()["turns_shown"]
    turn: dict[str, Any] = turns[-1]
    assert sum(turn["computed"]["tokens"].values()) == turn["num_tokens"] - turn["num_cached"]
    return turn


async def evict(stage: Stage, engines: tuple[Emulator, Emulator]) -> None:
    """Have others take all room at both replicas."""
    for number in range(4):
        body = streamed(chat(words(50 + number, 120)))
        await stage.ask(body, headers={"X-Session-ID": f"other-{SECRET}"})
        await stage.saved(*engines)


async def test_what_the_other_replica_reads_is_not_computed() -> None:
    async with pooled() as (stage, _, engines):
        await ask(stage, engines, words(1))
        await named(stage)
        await ask(stage, engines, words(1), "ok", words(2))
        turn = await last_turn(stage)

    assert set(turn["computed"]["tokens"]) <= {"new", "last_block"}
    assert turn["num_pool"] > 4 * BLOCK


async def test_what_the_pool_has_lost_is_named() -> None:
    """Its replica has evicted it, too."""
    async with pooled(engine={"num_gpu_blocks": 48}) as (stage, master, engines):
        await ask(stage, engines, words(1))
        await named(stage)
        stored = master.pool.keys()
        await evict(stage, engines)
        master.pool.remove(stored)
        await ask(stage, engines, words(1), "ok", words(2, 10))
        turn = await last_turn(stage)

    assert turn["computed"]["tokens"]["pool_lost"] >= 4 * BLOCK
    assert set(turn["computed"]["tokens"]) <= {"pool_lost", "new", "last_block"}
    assert "the shared pool no longer has them" in turn["text"][0]


async def test_what_an_engine_did_not_read_is_named() -> None:
    """The pool has it, and the engine computed it all the same."""
    async with pooled() as (stage, _, engines):
        await ask(stage, engines, words(1))
        await named(stage)
        for engine in engines:
            assert engine.replica.pool is not None
            engine.replica.pool.url = "http://127.0.0.1:9"
        await ask(stage, engines, words(1), "ok", words(2))
        await listed(stage)
        turn = await last_turn(stage)

    assert turn["computed"]["tokens"]["fetch_failed"] >= 4 * BLOCK
    assert "the read from the shared pool failed" in turn["text"][0]


async def test_a_read_that_fails_the_request_is_named_and_soon_over() -> None:
    """It is sent again under a salt of its own. The next turn goes on from the turn before."""
    async with pooled() as (stage, _, engines):
        first = await ask(stage, engines, words(1))
        await named(stage)
        for engine in engines:
            arm(engine, "first_event_error", count=1, pooled=True)
        await stage.admin(f"/admin/replicas/{first.replica}/drain", {"draining": True})
        await ask(stage, engines, words(1), "ok", words(2))
        failed = await last_turn(stage)
        await stage.admin(f"/admin/replicas/{first.replica}/drain", {"draining": False})
        await ask(stage, engines, words(1), "ok", words(2), "ok", words(3))
        after = await last_turn(stage)

    assert failed["computed"]["tokens"]["fetch_failed"] >= 4 * BLOCK
    assert "salt_or_model" not in failed["computed"]["tokens"]
    assert set(after["computed"]["tokens"]) <= {"new", "last_block"}
