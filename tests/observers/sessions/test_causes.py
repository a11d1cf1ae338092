"""Causes of computed tokens: they add up, and each is where it belongs.

Causes where replicas share a pool: what it lost, and what could not be read from it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.emulator.emulator import Emulator
from router.observers.sessions.bookkeeper import KnownPrompt, causes_of, sharable
from router.records.record import CAUSES
from tests.faults.stage import SECRET, Stage, arm, chat, streamed, words
from tests.request.pooled import ask, listed, named, pooled

figures = st.integers(0, 500)
knowns = st.builds(
    KnownPrompt,
    num_tokens=figures,
    num_cached=figures,
    num_common=figures,
    num_before=figures,
    has_changed=st.booleans(),
    is_apart=st.booleans(),
    is_unknown=st.booleans(),
    step=st.sampled_from([1, 16, 64]),
    num_dropped=st.sampled_from([0, 16]),
    fetch_until=figures,
    moved_until=figures,
    pool_until=figures,
    fate=st.sampled_from(["evicted", "cleared", "unknown"]),
)


@given(knowns)
def test_causes_add_up_to_what_the_engine_computed(known: KnownPrompt) -> None:
    """Whatever is known, and however little of it fits together."""
    causes = causes_of(known)

    assert sum(causes.values()) == max(0, known.num_tokens - known.num_cached)
    assert all(num_tokens > 0 for num_tokens in causes.values())
    assert causes.keys() <= set(CAUSES)


@given(knowns)
def test_no_more_can_be_shared_than_is_common(known: KnownPrompt) -> None:
    """Engines share whole blocks, and compute the last token."""
    shared = sharable(known)

    assert 0 <= shared <= known.num_common
    assert shared < max(1, known.num_tokens)


def test_what_was_there_is_told_by_position() -> None:
    """First what the pool did not give, then what another replica has, then what was evicted."""
    known = KnownPrompt(
        num_tokens=200,
        num_cached=16,
        num_common=160,
        num_before=170,
        step=16,
        fetch_until=32,
        moved_until=64,
        pool_until=96,
        fate="evicted",
    )

    assert causes_of(known) == {
        "fetch_failed": 16,
        "moved": 32,
        "pool_lost": 32,
        "evicted": 64,
        "last_block": 10,
        "new": 30,
    }


def test_behind_a_change_all_is_changed_up_to_the_old_end() -> None:
    known = KnownPrompt(
        num_tokens=200, num_cached=48, num_common=48, num_before=150, has_changed=True, step=16
    )

    assert causes_of(known) == {"changed": 102, "new": 50}


def test_a_dropped_last_block_is_no_eviction() -> None:
    """Engines that speculate compute the last block of a hit again."""
    known = KnownPrompt(
        num_tokens=100, num_cached=64, num_common=96, num_before=96, step=16, num_dropped=16
    )

    assert causes_of(known) == {"unknown": 16, "last_block": 16, "new": 4}
    known = KnownPrompt(
        num_tokens=100, num_cached=80, num_common=96, num_before=96, step=16, num_dropped=16
    )
    assert causes_of(known) == {"last_block": 16, "new": 4}


def test_other_salts_share_nothing() -> None:
    known = KnownPrompt(num_tokens=100, num_cached=0, num_before=80, is_apart=True)

    assert causes_of(known) == {"salt_or_model": 80, "new": 20}


def test_what_is_not_known_is_unknown() -> None:
    """All of it, or as much as the conversation is known to have had."""
    assert causes_of(KnownPrompt(num_tokens=9, num_cached=4, is_unknown=True)) == {"unknown": 5}
    known = KnownPrompt(num_tokens=9, num_cached=4, num_before=6, is_unknown=True)
    assert causes_of(known) == {"unknown": 2, "new": 3}


@pytest.mark.parametrize(
    "lost",
    [
        {"is_unknown": True},
        {"is_apart": True, "num_before": 13},
        {"has_changed": True, "num_before": 90},
        {"num_before": 13},
    ],
)
def test_a_prompt_below_one_block_is_a_last_block(lost: dict[str, Any]) -> None:
    """No cache can have it, so nothing of it was lost: 13 tokens, blocks of 16."""
    known = KnownPrompt(num_tokens=13, num_cached=0, step=16, **lost)

    assert causes_of(known) == {"last_block": 13}


@pytest.mark.parametrize("lost", [{"is_unknown": True}, {"is_apart": True}, {}])
def test_what_an_earlier_prompt_had_below_one_block_is_no_loss(lost: dict[str, Any]) -> None:
    known = KnownPrompt(num_tokens=60, num_cached=0, num_before=13, step=16, **lost)

    assert causes_of(known) == {"last_block": 13, "new": 47}


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
