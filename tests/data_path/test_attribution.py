"""Prompts whose tokens are not known: what the session's blocks, named by events, predict."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from loadtest.emulator.emulator import Emulator
from policies.view import CandidateId
from router.api.sessions import engine_name, session_hash
from tests.faults.stage import (
    Engines,
    Json,
    Reply,
    Stage,
    chat,
    holder,
    on_stage,
    on_stages,
    words,
)
from tests.redis_servers import RedisServer

BLIND: Json = {"tokens__tokenizer_modes": {"tiny": "harmony"}}
"""A mode that the model's templates are not of: chats have no tokens here."""

SYSTEM = words(0, 200)


async def turn(stage: Stage, engines: Any, texts: list[str], name: str, **fields: Any) -> Reply:
    """Take a session's next turn; afterwards all that it stored is known."""
    body = chat(*texts, **fields)
    body["messages"].insert(0, {"role": "system", "content": SYSTEM})
    reply = await stage.ask(body, headers={"X-Session-ID": name})
    assert reply.status == 200
    texts += [reply.text, words(len(texts), 30)]
    await stage.settled(*engines)
    return reply


async def test_turns_are_predicted() -> None:
    """From the second on: the first shows what its session's blocks are."""
    async with Engines() as engines, on_stage(*engines, **BLIND) as stage:
        texts = [words(1)]
        first = await turn(stage, engines, texts, "a")
        replies = [await turn(stage, engines, texts, "a") for _ in range(4)]

        assert "x-warmroute-cached" not in first.headers
        for reply in replies:
            assert reply.predicted == reply.reported > 0
            assert reply.replica == first.replica
        assert stage.metric("warmroute_audited_total", result="exact") == 4
        assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 5


async def test_a_beginning_that_another_session_stored_is_counted() -> None:
    """No event of this session names it: the engine's usage says how long it is."""
    async with Engines(1) as engines, on_stage(*engines, **BLIND) as stage:
        await turn(stage, engines, [words(1)], "a")
        texts = [words(2)]
        first = await turn(stage, engines, texts, "b")
        second = await turn(stage, engines, texts, "b")

        assert first.reported > 0
        assert second.predicted == second.reported > first.reported


async def test_a_session_goes_where_its_beginning_is_left() -> None:
    """Evicted at home by what this router did not send; its system prompt is elsewhere, too."""
    async with Engines(3, num_gpu_blocks=200) as engines, on_stage(*engines, **BLIND) as stage:
        texts = [words(1)]
        for _ in range(3):
            home = holder(stage, await turn(stage, engines, texts, "a"), engines)
        other = next(engine for engine in engines if engine is not home)
        system = {"role": "system", "content": SYSTEM}
        await past(other, {"messages": [system, {"role": "user", "content": words(5)}]})
        for number in range(100, 105):
            await past(home, chat(words(number, 150)))
        await stage.settled(*engines)
        reply = await turn(stage, engines, texts, "a")
        after = await turn(stage, engines, texts, "a")

        assert holder(stage, reply, engines) is other
        assert reply.predicted == reply.reported > 0
        assert after.replica == reply.replica
        assert after.predicted == after.reported > reply.reported


async def past(engine: Emulator, body: Json) -> None:
    """Have an engine answer a chat that did not come through the router."""
    async with aiohttp.ClientSession() as client:
        url = f"{engine.url}/v1/chat/completions"
        async with client.post(url, json={"model": "tiny", "max_tokens": 1} | body) as answer:
            assert answer.status == 200


async def test_replies_that_do_not_come_back_are_learned() -> None:
    """As reasoning does not: one turn is predicted to go on with it, the others are not."""
    async with Engines(1) as engines, on_stage(*engines, **BLIND) as stage:
        texts, replies = [words(1)], []
        for _ in range(4):
            replies.append(await turn(stage, engines, texts, "a", max_tokens=64))
            texts[-2] = "short"

        assert [r.predicted - r.reported > 0 for r in replies[1:]] == [True, False, False]
        assert replies[3].predicted == replies[3].reported
        assert stage.metric("warmroute_audited_total", result="exact") == 2
        assert stage.metric("warmroute_audited_total", result="partial") == 1
        assert stage.router.caches.trust(CandidateId("r1")) == 1.0


async def test_two_conversations_in_one_session_are_no_prediction_of_a_stream() -> None:
    """What is wrong is not held against the replica, and the next turn is right again."""
    async with Engines(1) as engines, on_stage(*engines, **BLIND) as stage:
        texts = [words(1)]
        for _ in range(2):
            await turn(stage, engines, texts, "a")
        await stage.ask(chat(words(7)), headers={"X-Session-ID": "a"})
        await stage.settled(*engines)
        await turn(stage, engines, texts, "a")
        last = await turn(stage, engines, texts, "a")

        assert last.predicted == last.reported > 0
        assert stage.router.caches.trust(CandidateId("r1")) == 1.0


@pytest.mark.parametrize("behind", ["", "-1"], ids=["digest", "digest and a number"])
async def test_a_session_that_clients_name_to_engines_is_guessed(behind: str) -> None:
    """Events then carry a name that is not ours, perhaps the digest of another's session."""
    async with Engines(1) as engines, on_stage(*engines, **BLIND) as stage:
        texts = [words(1)]
        before = [await turn(stage, engines, texts, "a") for _ in range(2)]
        digest = engine_name(session_hash("a", "tiny"))
        other = {
            "model": "tiny",
            "prompt": words(8),
            "max_tokens": 4,
            "session_id": digest + behind,
        }
        await stage.ask(other, "/v1/completions", headers={"X-Session-ID": "b"})
        is_known = stage.metric("warmroute_tokenized_requests_total", way="local") == 1
        after = [await turn(stage, engines, texts, "a") for _ in range(2)]
        own = [await turn(stage, engines, [words(9)], "c", session_id="mine") for _ in range(2)]

        assert is_known, "even so"
        assert before[1].predicted == before[1].reported > 0
        assert not any("x-warmroute-cached" in reply.headers for reply in (*after, *own))


@pytest.mark.parametrize(
    "options",
    [{"data_parallel_size": 2}, {"sliding_window": 64}],
    ids=["ranks", "windows"],
)
async def test_turns_are_predicted_by_each_engines_rules(options: Json) -> None:
    """Its ranks, its other KV groups."""
    async with Engines(1, **options) as engines, on_stage(*engines, **BLIND) as stage:
        texts = [words(1)]
        first = await turn(stage, engines, texts, "a")
        for _ in range(3):
            reply = await turn(stage, engines, texts, "a")

            assert reply.replica == first.replica
            assert reply.predicted == reply.reported > 0


async def test_engines_that_name_no_sessions_are_guessed_about() -> None:
    """As before vLLM 0.32: a session stays, and no figure is given."""
    options: Json = {"event_shape": "array"}
    async with Engines(2, **options) as engines, on_stage(*engines, **BLIND) as stage:
        texts = [words(1)]
        replies = [await turn(stage, engines, texts, "a") for _ in range(4)]

        assert len({reply.replica for reply in replies}) == 1
        assert all(reply.reported > 0 for reply in replies[1:])
        assert not any("x-warmroute-cached" in reply.headers for reply in replies)


async def test_several_prompts_of_one_request_are_guessed_about() -> None:
    """Their blocks are one session's, and of no one chain."""
    body = {"model": "tiny", "prompt": [words(1), words(2)], "max_tokens": 1, "suffix": "x"}
    async with Engines(1) as engines, on_stage(*engines, **BLIND) as stage:
        await stage.ask(body, "/v1/completions")
        await stage.settled(*engines)

        assert len(stage.router.caches.index.trails) == 0


async def test_a_router_that_follows_another_guesses(shared_redis: RedisServer) -> None:
    """Deltas say which blocks are held, not whose they are; the leader hears of every turn."""
    async with (
        Engines(1) as engines,
        on_stages(*engines, redis=shared_redis, **BLIND) as stages,
    ):
        leader, follower = sorted(stages, key=lambda stage: stage.roles() != {"r1": "leading"})
        texts = [words(1)]
        told = []
        for stage in (leader, follower, follower, leader):
            reply = await stage.ask(chat(*texts), headers={"X-Session-ID": "a"})
            texts += [reply.text, words(len(texts), 30)]
            for each in stages:
                await each.knows(*engines)
            told.append("x-warmroute-cached" in reply.headers)

        assert told == [False, False, False, True]
        assert reply.predicted == reply.reported > 0
