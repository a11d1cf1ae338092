"""The routes that generate: the way of one request, from body to last byte.

What must not live here: reading prompts (prompts), sending answers (answers), the cache and the
clock (replica).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from aiohttp import web

from loadtest.emulator import messages
from loadtest.emulator.answers import (
    AnswerWriter,
    Choice,
    ChunkAnswer,
    send_instantly,
    send_stream,
    send_whole,
    writer_of,
)
from loadtest.emulator.prompts import PromptReader
from loadtest.emulator.replica import Rank, Replica
from loadtest.emulator.replies import Reply
from loadtest.emulator.request_faults import poisoned, suffer
from loadtest.emulator.request_log import RequestLog
from loadtest.emulator.responses import Asked, Kept, ResponseStore, ResponseWriter, read_asked
from loadtest.emulator.tokens import Prompt
from loadtest.emulator.wire import (
    Api,
    ApiError,
    GenerationParams,
    Head,
    Usage,
    answer_id,
    parse_body,
    parse_generation,
)
from router.releases import V0_33, is_at_least


class Generate:
    """Handlers of the routes that generate."""

    def __init__(self, replica: Replica, kept_responses: ResponseStore) -> None:
        self._kept_responses = kept_responses
        self._replica = replica
        self._reader = PromptReader(replica)
        self._instant_reply: dict[int, Reply] = {}
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
        body = parse_body(raw, request.headers.get("Content-Type", ""))
        transfers = replica.transfers
        transfer = transfers.check(body)
        asked: Asked | None = None
        if api == "messages":
            body = messages.chat_body(body)
        elif api == "responses":
            asked = read_asked(body, self._kept_responses)
            body = asked.chat
        model, lora = self._reader.model(body)
        params = parse_generation(body, api)
        fault = fault or await poisoned(request, params)
        id = answer_id(request.headers.get("X-Request-Id"), api)
        head = Head(id=id, created=int(time.time()), model=model, api=api)
        if not replica.options.tokenize:
            return await self._answer_instantly(request, head, params, len(raw), asked)
        # As in vLLM until 0.32, the Responses route does not heed the header.
        heeds_rank = asked is None or is_at_least(replica.options.version, V0_33)
        named_rank = request.headers.get("X-data-parallel-rank") if heeds_rank else None
        rank = replica.choose(named_rank)
        prompts = await self._reader.prompts(body, api)
        for prompt in prompts:
            self._reader.check_length(prompt, params, body)
        ready = asyncio.Event()
        choices: list[Choice] = []
        session_id = body.get("session_id") or request.headers.get("X-Session-ID")
        replica.num_in_flight += 1
        start_s = replica.clock()
        is_whole = False
        kept: str | None = None  # what it computes for another replica is called
        if transfer is not None and transfer.get("do_remote_decode"):
            kept = transfers.begin(transfer, head.id)
        if self._log is not None:
            self._log.started(head.id)
        try:
            pooled = [
                await replica.fetch(rank, prompt, lora=lora, cache_salt=params.cache_salt)
                for prompt in prompts
            ]
            if transfer is not None and kept is None:
                await transfers.read(transfer, list(prompts[0].ids), head.id)
                size = replica.options.block_size
                pooled = [(len(prompt.ids) - 1) // size * size for prompt in prompts]
            if fault is None and any(pooled):
                fault = replica.faults.next(raw, is_pooled=True)
                if fault is not None:
                    await suffer(request, fault)
            choices += (
                self._submit(
                    rank, prompt, params, body, lora, ready, index, num_pooled_tokens, session_id
                )
                for prompt, num_pooled_tokens in zip(prompts, pooled, strict=True)
                for index in range(params.n)
            )
            writer = writer_of(head, params, choices, asked)
            if params.stream:
                has_usage = params.continuous_usage and api in ("chat", "completion")
                has_comments = api in ("chat", "completion")
                answered = await send_stream(
                    request,
                    writer,
                    choices,
                    ready,
                    api=api,
                    has_usage=has_usage,
                    fault=fault,
                    keep_alive_s=replica.options.sse_keep_alive_interval if has_comments else 0.0,
                )
            else:
                answered = await send_whole(request, writer, choices, ready, api=api, fault=fault)
            if asked is not None and asked.is_kept:
                assert isinstance(writer, ResponseWriter)
                self._kept_responses.put(Kept(writer.response, asked.chat["messages"]))
            is_whole = True
            if kept is not None:
                assert isinstance(answered, web.Response)
                self._keep(kept, request, choices[0], answered)
            return answered
        finally:
            if kept is not None and not is_whole:
                transfers.end(kept, None)
            if self._log is not None:
                self._log.ended(head.id, [c.generation.request for c in choices], is_whole)
            replica.num_in_flight -= 1
            for choice in choices:
                rank.engine.abort(choice.generation)
                _count(rank, choice, start_s, replica.clock())

    def _keep(
        self, id: str, request: web.BaseRequest, choice: Choice, answered: web.Response
    ) -> None:
        """Keep what was computed for another replica, if it ended for its length."""
        transfers = self._replica.transfers
        if choice.reply.finish_reason != "length":
            transfers.end(id, None)
            return
        transfers.end(id, list(choice.prompt.ids))
        params = transfers.answer(
            id, f"http://{request.host}", choice.generation.request.num_cached_tokens
        )
        if params is not None:
            body = orjson.loads(answered.body or b"{}")  # type: ignore[arg-type]
            answered.body = orjson.dumps(body | {"kv_transfer_params": params})

    def _submit(
        self,
        rank: Rank,
        prompt: Prompt,
        params: GenerationParams,
        body: Mapping[str, Any],
        lora: str | None,
        ready: asyncio.Event,
        index: int,
        num_pooled_tokens: int,
        session_id: str | None,
    ) -> Choice:
        reply = self._replica.reply(prompt.ids, params, body, index=index)
        generation = self._replica.generate(
            rank,
            prompt,
            reply,
            lora=lora,
            cache_salt=params.cache_salt,
            ready=ready,
            num_pooled_tokens=num_pooled_tokens,
            session_id=session_id,
        )
        if body.get("echo") is True:
            before = self._replica.tokenizer.decode(prompt.ids)
            reply = msgspec.structs.replace(
                reply, texts=[before + reply.texts[0], *reply.texts[1:]]
            )
        holds_call = self._replica.options.hold_tool_calls
        return Choice(prompt, reply, generation, holds_call=holds_call)

    async def _answer_instantly(
        self,
        request: web.BaseRequest,
        head: Head,
        params: GenerationParams,
        num_bytes: int,
        asked: Asked | None,
    ) -> web.StreamResponse:
        """Answer at once, without tokens or cache."""
        max_tokens = params.max_tokens or self._replica.options.reply_tokens
        reply = self._instant_reply.get(max_tokens)
        if reply is None:
            reply = self._replica.reply([0], params, {})
            self._instant_reply[max_tokens] = reply
        usage = Usage(
            num_prompt_tokens=num_bytes // 4,
            num_completion_tokens=len(reply.ids),
            num_cached_tokens=0,
            num_created_tokens=0,
        )
        writer: AnswerWriter
        if asked is not None:
            writer = ResponseWriter(head, asked, reply)
        elif head.api == "messages":
            writer = messages.MessageWriter(head, reply, usage.num_prompt_tokens)
        else:
            writer = ChunkAnswer(head, params, [reply], None)
        return await send_instantly(request, writer, reply, usage, is_stream=params.stream)


def _count(rank: Rank, choice: Choice, start_s: float, now_s: float) -> None:
    request = choice.generation.request
    stats = rank.stats
    if choice.generation.failed:
        stats.finished["error"] += 1
    elif request.num_output_tokens < len(choice.reply.ids):
        stats.finished["abort"] += 1
    else:
        stats.finished["length" if choice.reply.finish_reason == "length" else "stop"] += 1
        stats.e2e_s.observe(now_s - start_s)
    if request.first_token_s is not None:
        stats.queue_and_prefill_s.observe(request.first_token_s - start_s)
