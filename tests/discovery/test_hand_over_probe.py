"""router.discovery.hand_over_probe: what a replica shows of token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest
from aiohttp import web

from loadtest.tiny_model import MODEL_DIR
from router.api.openai import parse_chat
from router.base.errors import UpstreamBroken
from router.discovery.engine_api import EngineApi
from router.discovery.hand_over_probe import WrongIds, takes_ids
from router.tokens import Prompter, load_prompter
from router.tokens.id_probe import ALL_TEXTS
from tests.faults.fake_engine import FakeEngine

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PROMPTER: Prompter = load_prompter(str(MODEL_DIR))


@pytest.fixture
async def api() -> AsyncIterator[EngineApi]:
    async with EngineApi(timeout_s=5.0) as engine_api:
        yield engine_api


class Engine(FakeEngine):
    """Counts as an engine does, in each API's own fields; `ignores` ids, `refuses` them.

    `statuses`: Are answered first. `text_ids`: What it makes of a text; None: it says nothing.
    """

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.ignores = self.refuses = False
        self.statuses: list[int] = []
        messages = [
            {"role": "user", "content": ALL_TEXTS},
            {"role": "assistant", "content": "Its title."},
            {"role": "user", "content": "And on the second one?"},
        ]
        plan = PROMPTER.plan_chat(parse_chat({"messages": messages}))
        self.text_ids: list[int] | None = PROMPTER.commit(plan, plan.encode()).ids()
        self.num_text_tokens = len(self.text_ids)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.statuses:
            return web.json_response({"error": {}}, status=self.statuses.pop())
        body = orjson.loads(await request.read())
        assert body.get("max_tokens", body.get("max_output_tokens")) == 1
        ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if ids is not None and self.refuses:
            return web.json_response({"error": {}}, status=400)
        num_tokens = self.num_text_tokens if ids is None or self.ignores else len(ids)
        usage = {
            CHAT: {"prompt_tokens": num_tokens},
            MESSAGES: {
                "input_tokens": 3,
                "cache_read_input_tokens": 2,
                "cache_creation_input_tokens": num_tokens - 5,
            },
            RESPONSES: {"input_tokens": num_tokens},
        }[request.path]
        shown = self.text_ids if body.get("return_token_ids") else None
        return web.json_response({"usage": usage, "prompt_token_ids": shown})


async def ask(api: EngineApi, engine: Engine, path: str = CHAT) -> bool:
    return await takes_ids(api, "r1", engine.url, model="tiny", path=path, prompter=PROMPTER)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_it_is_seen_from_the_counts(api: EngineApi, path: str) -> None:
    async with Engine() as engine:
        assert await ask(api, engine, path)
        assert [received.target for received in engine.received] == [CHAT, path, path]
        engine.ignores = True
        assert not await ask(api, engine, path)
        engine.refuses = True
        assert not await ask(api, engine, path)


async def test_ids_that_are_not_ours_are_an_error(api: EngineApi) -> None:
    async with Engine() as engine:
        assert engine.text_ids is not None
        engine.text_ids[3] += 1
        with pytest.raises(WrongIds):
            await ask(api, engine)
        engine.text_ids = None
        assert not await ask(api, engine)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_failure_says_nothing(api: EngineApi, status: int) -> None:
    async with Engine() as engine:
        engine.statuses = [status]
        with pytest.raises(UpstreamBroken):
            await ask(api, engine)


@pytest.mark.parametrize("status", [400, 404])
async def test_a_route_it_does_not_have_takes_none(api: EngineApi, status: int) -> None:
    async with Engine() as engine:
        engine.statuses = [status]

        assert not await ask(api, engine)
        assert not await ask(api, engine, "/v1/completions")
