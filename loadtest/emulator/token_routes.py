"""The routes that show a prompt's tokens and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from loadtest.emulator import messages
from loadtest.emulator.prompts import PromptReader
from loadtest.emulator.replica import Replica
from loadtest.emulator.tokens import Prompt
from loadtest.emulator.wire import (
    Api,
    GenerationParams,
    answer_id,
    missing_fields,
    parse_body,
    parse_generation,
)


class TokenRoutes:
    """Handlers of the routes that render and tokenize."""

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
            raise missing_fields(["prompt", "messages"], body)
        strings = self._replica.tokenizer.token_strings(prompt.ids)
        return _json(
            {
                "count": len(prompt.ids),
                "max_model_len": self._replica.max_model_len,
                "tokens": prompt.ids,
                "token_strs": strings if body.get("return_token_strs") is True else None,
            }
        )

    async def _rendered(self, request: web.BaseRequest, api: Api) -> list[dict[str, Any]]:
        body = await _body(request)
        model, _ = self._reader.model(body)
        params = parse_generation(body, api)
        prompts = await self._reader.prompts(body, api)
        id = answer_id(request.headers.get("X-Request-Id"), api)
        return [_rendered(id, model, prompt, params, body) for prompt in prompts]


async def _body(request: web.BaseRequest) -> dict[str, Any]:
    return parse_body(await request.read(), request.headers.get("Content-Type", ""))


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _rendered(
    id: str, model: str, prompt: Prompt, params: GenerationParams, body: Mapping[str, Any]
) -> dict[str, Any]:
    temperature = _number(body, "temperature", 1.0)
    top_p, min_p = _number(body, "top_p", 1.0), _number(body, "min_p", 0.0)
    return {
        "request_id": id,
        "token_ids": prompt.ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": {
            "presence_penalty": _number(body, "presence_penalty", 0.0),
            "frequency_penalty": _number(body, "frequency_penalty", 0.0),
            "repetition_penalty": _number(body, "repetition_penalty", 1.0),
            "temperature": temperature,
            **({} if temperature == 0.0 else {"top_p": top_p, "min_p": min_p}),
            "stop": list(params.stop),
            "stop_token_ids": body.get("stop_token_ids", []),
            "max_tokens": params.max_tokens,
            "output_kind": 2,
            "skip_clone": True,
            "bad_words": [],
            "skip_reading_prefix_cache": False,
        },
        "model": model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": params.stream,
        "stream_options": body.get("stream_options"),
        "cache_salt": params.cache_salt,
        "priority": body.get("priority", 0),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    return float(value) if isinstance(value, int | float) else default
