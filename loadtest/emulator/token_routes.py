"""The routes that show a prompt's tokens and compute nothing."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from loadtest.emulator import messages
from loadtest.emulator.prompts import PromptReader
from loadtest.emulator.replica import Replica
from loadtest.emulator.wire import (
    Api,
    answer_id,
    invalid_field,
    parse_body,
    parse_generation,
)


class TokenRoutes:
    """Handlers of the routes that render, tokenize and detokenize."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._reader = PromptReader(replica)

    async def count_message_tokens(self, request: web.BaseRequest) -> web.StreamResponse:
        body = messages.chat_body(await _body(request))
        self._reader.model(body)
        prompt = await self._reader.chat(body)
        counted = len(prompt.ids)
        context = {"original_input_tokens": counted}
        return _json({"input_tokens": counted, "context_management": context})

    async def render_chat(self, request: web.BaseRequest) -> web.StreamResponse:
        [rendered] = await self._rendered(request, "chat")
        return _json(rendered)

    async def render_completion(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json(await self._rendered(request, "completion"))

    async def tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        self._reader.model(body)
        if isinstance(body.get("messages"), list):
            prompt = await self._reader.chat(body)
        elif isinstance(body.get("prompt"), str):
            prompt = await self._reader.text(body, str(body["prompt"]))
        else:
            raise invalid_field("prompt", "Field required")
        strings = self._replica.tokenizer.token_strings(prompt.ids)
        return _json(
            {
                "count": len(prompt.ids),
                "max_model_len": self._replica.max_model_len,
                "tokens": prompt.ids,
                "token_strs": strings if body.get("return_token_strs") is True else None,
            }
        )

    async def detokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise invalid_field("tokens", "Field required")
        return _json({"prompt": self._replica.tokenizer.decode(tokens)})

    async def _rendered(self, request: web.BaseRequest, api: Api) -> list[dict[str, Any]]:
        """Render prompts; of the sampling parameters only those that the emulator reads."""
        body = await _body(request)
        model, _ = self._reader.model(body)
        params = parse_generation(body, api)
        id = answer_id(request.headers.get("X-Request-Id"), api)
        return [
            {
                "request_id": id,
                "token_ids": prompt.ids,
                "sampling_params": {"stop": params.stop, "max_tokens": params.max_tokens},
                "model": model,
                "stream": params.stream,
                "stream_options": body.get("stream_options"),
                "cache_salt": params.cache_salt,
            }
            for prompt in await self._reader.prompts(body, api)
        ]


async def _body(request: web.BaseRequest) -> dict[str, Any]:
    return parse_body(await request.read(), request.headers.get("Content-Type", ""))


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
