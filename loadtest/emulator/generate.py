"""The routes that generate: one request from its body to the last byte of the answer.

What must not live here: reading prompts (prompts), sending answers (answers), the cache and the
clock (replica).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson
from aiohttp import web

from loadtest.emulator import messages
from loadtest.emulator.answers import Choice, send_stream, send_whole, writer_of
from loadtest.emulator.faults import Fault, poisoned, suffer
from loadtest.emulator.prompts import PromptReader
from loadtest.emulator.replica import Rank, Replica
from loadtest.emulator.request_log import RequestLog
from loadtest.emulator.responses import Asked, read_asked
from loadtest.emulator.tokens import Prompt
from loadtest.emulator.wire import (
    Api,
    ApiError,
    GenerationParams,
    Head,
    answer_id,
    parse_body,
    parse_generation,
)
from router.base.engines import V0_33, is_at_least


class _Asked(msgspec.Struct, frozen=True):
    """A request as it was read."""

    body: Mapping[str, Any]  # of the chat or completion that the engine makes of it
    params: GenerationParams
    head: Head
    lora: str | None
    response: Asked | None  # of the Responses route
    transfer: Mapping[str, Any] | None  # of KV, from or for another replica


class Generate:
    """Handlers of the routes that generate."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._reader = PromptReader(replica)
        path = replica.options.request_log
        self._log = RequestLog(path) if path is not None else None

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def completion(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, "completion")

    async def messages(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._generate(request, "messages")
        except ApiError as error:
            return web.Response(
                body=messages.error_body(error),
                status=error.status,
                content_type="application/json",
            )

    async def responses(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, "responses")

    async def _generate(self, request: web.BaseRequest, api: Api) -> web.StreamResponse:
        replica = self._replica
        raw = await request.read()
        fault = replica.faults.next(raw)
        if fault is not None:
            await suffer(request, fault)
        asked = self._read(request, raw, api)
        fault = await poisoned(request, asked.params.extension) or fault
        rank = self._rank(request, api)
        prompts = await self._reader.prompts(asked.body, api)
        for prompt in prompts:
            self._reader.check_length(prompt, asked.params)
        choices: list[Choice] = []
        start_s = replica.clock()
        is_whole = False
        kept: str | None = None  # id of the prompt that it computes for another replica
        if asked.transfer is not None and asked.transfer.get("do_remote_decode"):
            kept = replica.transfers.begin(asked.transfer, asked.head.id)
        replica.num_in_flight += 1
        request_id = request.headers.get("X-Request-Id", "")
        if self._log is not None:
            self._log.started(request_id)
        try:
            pooled = await self._fetch(rank, asked, prompts, is_kept=kept is not None)
            if fault is None and any(pooled):
                fault = replica.faults.next(raw, is_pooled=True)
                if fault is not None:
                    await suffer(request, fault)
            num_kept: int | None = None
            if fault is not None and fault.kind == "abort":
                num_kept, fault = fault.after_tokens, None
            self._submit(rank, asked, prompts, pooled, choices, num_kept)
            answered = await self._answer(request, asked, choices, fault)
            is_whole = True
            if kept is not None:
                assert isinstance(answered, web.Response)
                self._keep(kept, request, choices[0], answered)
            return answered
        finally:
            if kept is not None and not is_whole:
                replica.transfers.end(kept, None)
            if self._log is not None:
                self._log.ended(request_id, [c.generation for c in choices], is_whole)
            replica.num_in_flight -= 1
            for choice in choices:
                rank.engine.scheduler.abort(choice.generation)
                _count(rank, choice, start_s, replica.clock())

    def _read(self, request: web.BaseRequest, raw: bytes, api: Api) -> _Asked:
        body = parse_body(raw, request.headers.get("Content-Type", ""))
        transfer = self._replica.transfers.check(body)
        response: Asked | None = None
        if api == "messages":
            body = messages.chat_body(body)
        elif api == "responses":
            response = read_asked(body)
            body = response.chat
        model, lora = self._reader.model(body)
        id = answer_id(request.headers.get("X-Request-Id"), api)
        head = Head(id=id, created=int(time.time()), model=model, api=api)
        return _Asked(body, parse_generation(body, api), head, lora, response, transfer)

    def _rank(self, request: web.BaseRequest, api: Api) -> Rank:
        """Choose the rank; vLLM's Responses route ignores the header until 0.33."""
        reads_header = api != "responses" or is_at_least(self._replica.options.version, V0_33)
        header = request.headers.get("X-data-parallel-rank") if reads_header else None
        return self._replica.choose(header)

    async def _fetch(
        self, rank: Rank, asked: _Asked, prompts: Sequence[Prompt], *, is_kept: bool
    ) -> list[int]:
        """Fetch KV from the pool or the prefill replica; return the leading tokens of prompts."""
        salt = asked.params.cache_salt
        pooled = [
            await self._replica.fetch(rank, prompt, lora=asked.lora, cache_salt=salt)
            for prompt in prompts
        ]
        if asked.transfer is None or is_kept:
            return pooled
        await self._replica.transfers.read(asked.transfer, list(prompts[0].ids), asked.head.id)
        size = self._replica.options.block_size
        return [(len(prompt.ids) - 1) // size * size for prompt in prompts]

    def _submit(
        self,
        rank: Rank,
        asked: _Asked,
        prompts: Sequence[Prompt],
        pooled: Sequence[int],
        choices: list[Choice],
        num_kept: int | None,
    ) -> None:
        """Queue all replies on a rank; each is in `choices` from then on.

        `num_kept`: give each up after so many tokens; None: never.
        """
        replica, body = self._replica, asked.body
        ready = asyncio.Event()
        for prompt, num_pooled_tokens in zip(prompts, pooled, strict=True):
            for index in range(asked.params.n):
                computed = reply = replica.reply(prompt.ids, asked.params, body, index=index)
                if num_kept is not None:
                    computed, reply = reply.aborted(max(1, num_kept)), reply.aborted(num_kept)
                generation = replica.generation(
                    prompt,
                    computed,
                    ready,
                    lora=asked.lora,
                    cache_salt=asked.params.cache_salt,
                )
                generation.num_given_tokens = num_pooled_tokens
                rank.engine.submit(generation)
                if body.get("echo") is True:
                    first, *rest = reply.texts
                    first = replica.tokenizer.decode(prompt.ids) + first
                    reply = msgspec.structs.replace(reply, texts=[first, *rest])
                choices.append(Choice(prompt, reply, generation))

    async def _answer(
        self,
        request: web.BaseRequest,
        asked: _Asked,
        choices: Sequence[Choice],
        fault: Fault | None,
    ) -> web.StreamResponse:
        writer = writer_of(asked.head, asked.params, choices, asked.response)
        if not asked.params.stream:
            return await send_whole(request, writer, choices, asked.head.api, fault)
        is_plain = asked.head.api in ("chat", "completion")
        interval_s = self._replica.options.sse_keep_alive_interval
        return await send_stream(
            request,
            writer,
            choices,
            asked.head.api,
            fault,
            has_usage=asked.params.continuous_usage and is_plain,
            keep_alive_s=interval_s if is_plain else 0.0,
        )

    def _keep(
        self, id: str, request: web.BaseRequest, choice: Choice, answered: web.Response
    ) -> None:
        """Store the KV of a prompt for another replica, if the answer ended for its length."""
        transfers = self._replica.transfers
        if choice.reply.finish_reason != "length":
            transfers.end(id, None)
            return
        transfers.end(id, list(choice.prompt.ids))
        params = transfers.answer(id, f"http://{request.host}", choice.generation.num_cached_tokens)
        if params is not None:
            body = orjson.loads(answered.body or b"{}")  # type: ignore[arg-type]
            answered.body = orjson.dumps(body | {"kv_transfer_params": params})


def _count(rank: Rank, choice: Choice, start_s: float, now_s: float) -> None:
    generation, stats = choice.generation, rank.stats
    if generation.failed:
        stats.finished["error"] += 1
    elif (
        choice.reply.finish_reason == "abort"
        or generation.num_output_tokens < generation.num_reply_tokens
    ):
        stats.finished["abort"] += 1
    else:
        stats.finished["length" if choice.reply.finish_reason == "length" else "stop"] += 1
        stats.e2e_s.observe(now_s - start_s)
    if generation.first_token_s is not None:
        stats.queue_and_prefill_s.observe(generation.first_token_s - start_s)
