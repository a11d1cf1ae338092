"""Routers with one Redis have one ledger: causes and totals are the same at each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.faults.several import turns as across
from tests.faults.stage import SESSION, Engines, Stage, chat, on_stage, on_stages, streamed, words
from tests.redis_servers import Start


async def session_at(stage: Stage, name: str = f"{SESSION}-0") -> dict[str, Any]:
    reply = await stage.admin(f"/admin/sessions/{name}")
    assert reply.status == 200, reply.json()
    found: dict[str, Any] = reply.json()
    return found


async def same_at(stages: list[Stage], num_turns: int, name: str = f"{SESSION}-0") -> list[Any]:
    """What each router tells of a session, once each knows that many turns."""
    key = int((await session_at(stages[0], name))["session"], 16)
    for stage in stages:
        await stage.until(lambda: num_turns_at(stage, key) == num_turns)  # noqa: B023
    return [await session_at(stage, name) for stage in stages]


def num_turns_at(stage: Stage, key: int) -> int:
    session = stage.ledger.get(key)
    return session.totals.num_turns if session is not None else 0


@asynccontextmanager
async def turn_published(stage: Stage) -> AsyncIterator[None]:
    """Wait until the other routers have been sent a turn that a router has in the block."""
    store, peers = stage.router.cluster.store, stage.router.cluster.peers
    assert store is not None
    assert peers is not None
    notes = await store.subscribe()
    yield
    kinds: set[str] = set()
    while "turn" not in kinds:
        entry = peers.notes.decode(await notes.next())
        kinds = {str(note.__struct_config__.tag) for note in entry.notes}
    await notes.close()


async def test_a_conversation_that_changes_routers_has_right_causes(start_redis: Start) -> None:
    """Each turn at another router: only what is new was computed, and both tell the same."""
    redis = start_redis()
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        await across(stages, engines, is_calm=True)
        one, other = await same_at(list(stages), 6)

    assert one == other
    for turn in one["turns_shown"]:
        causes = turn["computed"]["tokens"]
        assert sum(causes.values()) == turn["num_tokens"] - turn["num_cached"]
        assert set(causes) <= {"new", "last_block"}
    assert one["causes"]["cached"] > 0


async def test_what_was_lost_in_between_is_named_at_the_other_router(start_redis: Start) -> None:
    """The cache was emptied after a turn at one router; the next turn comes to the other one."""
    redis = start_redis()
    async with Engines(1) as engines, on_stages(*engines, redis=redis) as stages:
        first, second = stages
        await first.ask(streamed(chat(words(1))))
        await same_at(list(stages), 1, SESSION)
        for stage in stages:
            await stage.knows(*engines)
        engines[0].replica.reset_prefix_cache(preempt=False)
        await second.ask(streamed(chat(words(1), "yes", words(2))))
        await second.settled(*engines)
        one, other = await same_at(list(stages), 2, SESSION)

    assert one == other
    computed = one["turns_shown"][1]["computed"]
    assert computed["tokens"]["cleared"] >= 64
    assert computed["loss"]["replica"] == "r1"


async def test_a_router_that_starts_knows_sessions_from_then_on(start_redis: Start) -> None:
    """It counts the turns that it learns of. What the conversation had before is unknown to it."""
    redis = start_redis()
    async with Engines(1) as engines, on_stage(*engines, redis=redis) as first:
        async with turn_published(first):
            await first.ask(streamed(chat(words(1))))
            await first.knows(*engines)
        async with on_stage(*engines, redis=redis) as late:
            await first.until(
                lambda: (
                    first.router.cluster.peers is not None and first.router.cluster.peers.routers
                )
            )
            assert len(late.ledger) == 0
            await late.ask(streamed(chat(words(1), "yes", words(2))))
            key = next(iter(first.ledger)).key
            late.router.story.steps.settling.close()
            await first.until(lambda: num_turns_at(first, key) == 2)
            turn = (await session_at(late, SESSION))["turns_shown"][0]

    assert "unknown" in turn["computed"]["tokens"]
