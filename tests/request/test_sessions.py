"""Sessions where tokens are not known: 16 replicas of a model without a tokenizer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import orjson
from aiohttp import web

from tests.faults.fake_engine import FakeEngine, Handler
from tests.faults.stage import Json, Stage, chat, on_stage, streamed, words

NAMELESS: Json = {"X-Session-ID": ""}
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "root": "/nowhere"}]}


@asynccontextmanager
async def sixteen(
    on_request: Handler | None = None,
) -> AsyncIterator[tuple[list[FakeEngine], Stage]]:
    """Run a router before engines whose model has no tokenizer here, and none of their own."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                FakeEngine(on_request, **{"v1/models": MODELS, "tokenize": (404, "")})
            )
            for _ in range(16)
        ]
        yield engines, await stack.enter_async_context(on_stage(*engines))


async def test_turns_stay_where_the_first_one_was() -> None:
    """Conversations without an id, in any order: each has one replica, and they spread."""
    dice = random.Random(7)
    texts = {number: [words(number)] for number in range(20)}
    places: dict[int, set[str]] = {number: set() for number in texts}
    async with sixteen() as (_, stage):
        for turn in range(120):
            number = dice.choice(list(texts))
            reply = await stage.ask(chat(*texts[number]), headers=NAMELESS)
            places[number].add(reply.replica)
            texts[number] += ["ok", words(1000 + turn, 20)]

    assert all(len(replicas) <= 1 for replicas in places.values())
    assert len(set().union(*places.values())) > 6


async def test_a_session_leaves_a_replica_that_is_gone() -> None:
    """It then stays at its new replica."""
    texts = [words(1)]
    async with sixteen() as (engines, stage):
        replicas = []
        for turn in range(6):
            replicas.append((await stage.ask(chat(*texts), headers=NAMELESS)).replica)
            texts += ["ok", words(100 + turn, 20)]
            if turn == 2:
                await engines[int(replicas[0][1:]) - 1].__aexit__(None)

        assert len(set(replicas[:3])) == len(set(replicas[3:])) == 1
        assert replicas[0] != replicas[3]


async def test_a_session_leaves_a_replica_that_is_overloaded() -> None:
    """It moves where the queue takes longer than computing the whole prompt elsewhere."""
    go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if orjson.loads(await request.read()).get("stream"):
            await go_on.wait()
        return web.json_response({"object": "chat.completion", "choices": []})

    async with sixteen(answer) as (engines, stage):
        first = await stage.ask(chat(words(1)), headers=NAMELESS)
        home = engines[int(first.replica[1:]) - 1]
        body = streamed(chat(words(1), "ok", "more " * 20_000))
        async with asyncio.TaskGroup() as tg:
            for number in range(1, 9):
                tg.create_task(stage.ask(body, headers=NAMELESS))
                await stage.until(lambda n=number: sum(len(e.received) for e in engines) == 1 + n)  # type: ignore[misc]
            go_on.set()

        assert 2 <= len(home.received) < 9


async def test_a_guess_is_no_prediction() -> None:
    """What a session's last turn may have left there is not reported as cached tokens."""
    async with sixteen() as (_, stage):
        for _ in range(2):
            reply = await stage.ask(chat(words(1)), headers=NAMELESS)

            assert "x-warmroute-cached" not in reply.headers
        assert stage.metric("warmroute_tokens_total", kind="predicted_cached") == 0
