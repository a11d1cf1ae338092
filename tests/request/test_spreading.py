"""Requests whose prompts nothing caches go by load, and a batch weighs as all of its prompts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest
from aiohttp import web

from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SESSION, SLOW, Engines, Json, on_stage, words

NUM_ENGINES = 4
PER_ENGINE = 10
ROUTES = {
    "/v1/embeddings": {"model": "tiny", "input": words(1)},
    "/v1/rerank": {"model": "tiny", "query": words(1), "documents": [words(2)]},
    "/v1/score": {"model": "tiny", "text_1": words(1), "text_2": words(2)},
    "/pooling": {"model": "tiny", "input": words(1)},
}
NO_SESSION: Json = {}
HEADER: Json = {"X-Session-Id": SESSION}
CACHE_KEY: Json = {"prompt_cache_key": SESSION}


@pytest.mark.parametrize(
    ("path", "fields", "headers"),
    [
        ("/v1/embeddings", {}, NO_SESSION),
        ("/v1/rerank", {}, HEADER),
        ("/v1/score", CACHE_KEY, NO_SESSION),
        ("/pooling", {}, HEADER),
    ],
)
@pytest.mark.parametrize("policy", ["kv_aware", "session_sticky", "prefix_hash"])
async def test_requests_without_a_cached_prompt_spread_evenly(
    path: str, fields: Json, headers: Json, policy: str
) -> None:
    """Forty at once on four idle replicas are about ten each, whatever the session or policy."""
    release = asyncio.Event()

    async def hold(_: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({"object": "list", "data": []})

    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(hold)) for _ in range(NUM_ENGINES)]
        stage = await stack.enter_async_context(on_stage(*engines, policy__name=policy))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_ENGINES * PER_ENGINE):
                tasks.create_task(stage.ask(ROUTES[path] | fields, path, headers=headers))
            await stage.until(
                lambda: sum(len(each.received) for each in engines) == NUM_ENGINES * PER_ENGINE
            )
            release.set()

    counts = [len(engine.received) for engine in engines]
    assert max(counts) <= PER_ENGINE + 2, counts


async def test_a_request_without_a_prompt_does_not_move_its_sessions_chat() -> None:
    """An embedding with a chat's session id leaves the chat's home where it is."""
    async with Engines(2) as engines, on_stage(*engines, policy__name="session_sticky") as stage:
        headers = {"X-Session-Id": SESSION}
        chat: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": words(3)}],
        }
        home = (await stage.ask(chat | {"max_tokens": 2}, headers=headers)).replica
        for _ in range(6):
            await stage.ask(ROUTES["/v1/embeddings"], "/v1/embeddings", headers=headers)
        again = await stage.ask(chat | {"max_tokens": 2}, headers=headers)

    assert again.replica == home


@pytest.mark.parametrize("kind", ["ids", "texts"])
async def test_a_batch_is_booked_as_all_of_its_prompts(kind: str) -> None:
    """Sixty-four prompts of 200 tokens book about 12,800 tokens while they are computed."""
    prompt: Any = list(range(1000, 1200)) if kind == "ids" else "word " * 160
    body = {"model": "tiny", "prompt": [prompt] * 64, "max_tokens": 2}
    async with Engines(1, time_model=SLOW) as engines, on_stage(*engines) as stage:

        def num_queued() -> int:
            return stage.router.fleet.load.status(monotonic())[0].num_queued_tokens

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stage.ask(body, "/v1/completions"))
            await stage.until(num_queued)
            num_tokens = num_queued()

    assert 8_000 <= num_tokens <= 16_000
