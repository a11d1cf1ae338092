"""The routes that read a prompt: generate from it, or show its tokens.

What must live here: the way of one such request, from body to last byte. What must not: the JSON
shapes (wire), what the model says (replies), the cache and the clock (replica).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from aiohttp import web

from loadtest.emulator import messages
from loadtest.emulator.engine import Generation
from loadtest.emulator.faults import REQUEST_FAULTS, Fault
from loadtest.emulator.replica import Rank, Replica
from loadtest.emulator.replies import Reply
from loadtest.emulator.request_log import RequestLog
from loadtest.emulator.responses import Asked, Kept, ResponseStore, ResponseWriter, read_asked
from loadtest.emulator.tokens import Prompt
from loadtest.emulator.wire import (
    DONE,
    Api,
    ApiError,
    ChunkWriter,
    GenerationParams,
    Head,
    Usage,
    answer,
    invalid_type,
    invalid_value,
    missing_fields,
    parse_body,
    parse_generation,
    unknown_model,
    usage_chunk,
)

_EMPTY_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."


class _Choice:
    """One reply on its way: how much the engine has made of it, how much was sent."""

    __slots__ = ("chunks", "generation", "num_sent", "prompt", "reply")

    def __init__(self, prompt: Prompt, reply: Reply, generation: Generation) -> None:
        self.prompt = prompt
        self.reply = reply
        self.generation = generation
        self.num_sent = 0
        self.chunks: ChunkWriter

    @property
    def num_ready(self) -> int:
        return self.generation.request.num_output_tokens

    @property
    def is_done(self) -> bool:
        return self.num_sent == len(self.reply.ids)


class Generate:
    """Handlers of the routes with prompts."""

    def __init__(self, replica: Replica, kept_responses: ResponseStore) -> None:
        self._kept_responses = kept_responses
        self._replica = replica
        self._prefix = replica.tokenizer.special_prefix()
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

    async def count_message_tokens(self, request: web.BaseRequest) -> web.StreamResponse:
        body = messages.chat_body(await _body(request))
        self._model(body)
        (prompt,) = await self._chat_prompts(body)
        counted = len(prompt.ids)
        context = {"original_input_tokens": counted}
        return _json({"input_tokens": counted, "context_management": context})

    async def render_chat(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        model, _ = self._model(body)
        params = parse_generation(body, "chat")
        (prompt,) = await self._chat_prompts(body)
        return _json(_rendered(_head_id(request, "chat"), model, prompt, params, body))

    async def render_completion(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        model, _ = self._model(body)
        params = parse_generation(body, "completion")
        prompts = await self._completion_prompts(body)
        id = _head_id(request, "completion")
        return _json([_rendered(id, model, prompt, params, body) for prompt in prompts])

    async def tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _body(request)
        self._model(body)
        if isinstance(body.get("messages"), list):
            (prompt,) = await self._chat_prompts(body)
        elif isinstance(body.get("prompt"), str):
            prompt = await self._text_prompt(body, str(body["prompt"]))
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

    async def _generate(self, request: web.BaseRequest, api: Api) -> web.StreamResponse:
        replica = self._replica
        raw = await request.read()
        fault = replica.faults.next(raw)
        if fault is not None:
            await _suffer(request, fault)
        body = parse_body(raw, request.headers.get("Content-Type", ""))
        asked: Asked | None = None
        if api == "messages":
            body = messages.chat_body(body)
        elif api == "responses":
            asked = read_asked(body, self._kept_responses)
            body = asked.chat
        model, lora = self._model(body)
        params = parse_generation(body, api)
        fault = fault or await _poisoned(request, params)
        head = Head(id=_head_id(request, api), created=int(time.time()), model=model, api=api)
        if not replica.options.tokenize:
            return await self._answer_untokenized(request, head, params, len(raw), asked)
        # As in vLLM, the Responses route does not heed the header.
        named_rank = request.headers.get("X-data-parallel-rank") if asked is None else None
        rank = replica.choose(named_rank)
        prompts = await (
            self._completion_prompts(body) if api == "completion" else self._chat_prompts(body)
        )
        for prompt in prompts:
            self._check_length(prompt, params, body)
        ready = asyncio.Event()
        choices: list[_Choice] = []
        replica.num_in_flight += 1
        start_s = replica.clock()
        is_whole = False
        if self._log is not None:
            self._log.started(head.id)
        try:
            pooled = [
                await replica.fetch(rank, prompt, lora=lora, cache_salt=params.cache_salt)
                for prompt in prompts
            ]
            if fault is None and any(pooled):
                fault = replica.faults.next(raw, is_pooled=True)
                if fault is not None:
                    await _suffer(request, fault)
            choices += (
                self._submit(rank, prompt, params, body, lora, ready, index, num_pooled_tokens)
                for prompt, num_pooled_tokens in zip(prompts, pooled, strict=True)
                for index in range(params.n)
            )
            if asked is not None:
                writer = ResponseWriter(head, asked, choices[0].reply)
                answered = await self._respond(request, writer, params, choices[0], ready, fault)
                if asked.is_kept:
                    kept = Kept(writer.response, asked.chat["messages"])
                    self._kept_responses.put(kept)
            else:
                way = self._stream if params.stream else self._whole
                answered = await way(request, head, params, choices, ready, fault)
            is_whole = True
            return answered
        finally:
            if self._log is not None:
                self._log.ended(head.id, [c.generation.request for c in choices], is_whole)
            replica.num_in_flight -= 1
            for choice in choices:
                rank.engine.abort(choice.generation)
                _count(rank, choice, start_s, replica.clock())

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
    ) -> _Choice:
        reply = self._replica.reply(prompt.ids, params, body, index=index)
        generation = self._replica.generate(
            rank,
            prompt,
            reply,
            lora=lora,
            cache_salt=params.cache_salt,
            ready=ready,
            num_pooled_tokens=num_pooled_tokens,
        )
        if body.get("echo") is True:
            before = self._replica.tokenizer.decode(prompt.ids)
            reply = msgspec.structs.replace(
                reply, texts=[before + reply.texts[0], *reply.texts[1:]]
            )
        return _Choice(prompt, reply, generation)

    async def _whole(
        self,
        request: web.BaseRequest,
        head: Head,
        params: GenerationParams,
        choices: list[_Choice],
        ready: asyncio.Event,
        fault: Fault | None,
    ) -> web.StreamResponse:
        if fault is not None and fault.kind == "first_event_error":
            raise _generation_error(fault)
        while any(choice.num_ready < len(choice.reply.ids) for choice in choices):
            ready.clear()
            await ready.wait()
            _raise_if_failed(choices)
            if fault is not None and choices[0].num_ready >= fault.after_tokens:
                await _hang_up(request)
        usage = _usage(head.api, choices, [len(choice.reply.ids) for choice in choices])
        if head.api == "messages":
            body = messages.message(head, choices[0].reply, usage)
            return web.Response(body=body, content_type="application/json")
        return web.Response(
            body=answer(
                head,
                [choice.reply for choice in choices],
                usage,
                prompt_ids=choices[0].prompt.ids if params.return_token_ids else None,
            ),
            content_type="application/json",
        )

    async def _stream(
        self,
        request: web.BaseRequest,
        head: Head,
        params: GenerationParams,
        choices: list[_Choice],
        ready: asyncio.Event,
        fault: Fault | None,
    ) -> web.StreamResponse:
        if head.api == "messages":
            return await self._stream_message(request, head, choices[0], ready, fault)
        response = _event_stream(request)
        for index, choice in enumerate(choices):
            choice.chunks = ChunkWriter(
                head,
                index,
                choice.reply,
                return_token_ids=params.return_token_ids,
                usage_follows=params.include_usage,
            )
        await response.prepare(request)
        if fault is not None and fault.kind == "first_event_error":
            # As vLLM does it: the role first, then the error, and the end as ever.
            opening = choices[0].chunks.role(None, None) if head.api == "chat" else b""
            error = b"data: " + _generation_error(fault).body + b"\n\n"
            await response.write(opening)
            await response.write(error + DONE)
            await response.write_eof()
            return response
        while not all(choice.is_done for choice in choices):
            ready.clear()
            if not any(choice.num_ready > choice.num_sent for choice in choices):
                await ready.wait()
                _raise_if_failed(choices)
            unsent = b"".join(_unsent(head, params, choice) for choice in choices)
            if unsent:
                await response.write(unsent)
            if fault is not None and choices[0].num_sent >= fault.after_tokens:
                await _hang_up(request)
        tail = DONE
        if params.include_usage:
            usage = _usage(head.api, choices, [choice.num_sent for choice in choices])
            tail = usage_chunk(head, usage) + DONE
        await response.write(tail)
        await response.write_eof()
        return response

    async def _stream_message(
        self,
        request: web.BaseRequest,
        head: Head,
        choice: _Choice,
        ready: asyncio.Event,
        fault: Fault | None,
    ) -> web.StreamResponse:
        response = _event_stream(request)
        writer = messages.MessageWriter(head, choice.reply)
        await response.prepare(request)
        if fault is not None and fault.kind == "first_event_error":
            await response.write(messages.error_event("emulated: generation failed"))
            await response.write_eof()
            return response
        while not choice.is_done:
            ready.clear()
            if choice.num_ready == choice.num_sent:
                await ready.wait()
                _raise_if_failed([choice])
            sent, now = choice.num_sent, choice.num_ready
            choice.num_sent = now
            opening = writer.start(len(choice.prompt.ids)) if sent == 0 and now else b""
            unsent = opening + writer.tokens(sent, now)
            if unsent:
                await response.write(unsent)
            if fault is not None and now >= fault.after_tokens:
                await _hang_up(request)
        await response.write(writer.end(_usage(head.api, [choice], [choice.num_sent])))
        await response.write_eof()
        return response

    async def _respond(
        self,
        request: web.BaseRequest,
        writer: ResponseWriter,
        params: GenerationParams,
        choice: _Choice,
        ready: asyncio.Event,
        fault: Fault | None,
    ) -> web.StreamResponse:
        """Answer a request of the Responses API; its stream begins before anything is computed."""
        response = _event_stream(request) if params.stream else None
        fails_first = fault is not None and fault.kind == "first_event_error"
        if response is not None:
            await response.prepare(request)
            await response.write(writer.start())
            if fails_first:  # as vLLM: writing the error raises
                await _hang_up(request)
        elif fails_first:
            assert fault is not None
            raise _generation_error(fault)
        while not choice.is_done:
            ready.clear()
            if choice.num_ready == choice.num_sent:
                await ready.wait()
                _raise_if_failed([choice])
            sent, now = choice.num_sent, choice.num_ready
            choice.num_sent = now
            unsent = writer.tokens(sent, now) if response is not None else b""
            if unsent and response is not None:
                await response.write(unsent)
            if fault is not None and now >= fault.after_tokens:
                await _hang_up(request)
        usage = _usage("responses", [choice], [choice.num_sent])
        if response is None:
            return web.Response(body=writer.finish(usage), content_type="application/json")
        await response.write(writer.end(usage))
        await response.write_eof()
        return response

    async def _answer_untokenized(
        self,
        request: web.BaseRequest,
        head: Head,
        params: GenerationParams,
        num_bytes: int,
        asked: Asked | None,
    ) -> web.StreamResponse:
        """Answer at once, without tokens or cache: what is left is the cost of HTTP."""
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
        responder = ResponseWriter(head, asked, reply) if asked is not None else None
        if not params.stream:
            if responder is not None:
                body = responder.finish(usage)
            elif head.api == "messages":
                body = messages.message(head, reply, usage)
            else:
                body = answer(head, [reply], usage)
            return web.Response(body=body, content_type="application/json")
        if responder is not None:
            parts = [responder.start()]
            parts += [responder.tokens(i, i + 1) for i in range(len(reply.ids))]
            parts.append(responder.end(usage))
        elif head.api == "messages":
            writer = messages.MessageWriter(head, reply)
            parts = [writer.start(usage.num_prompt_tokens)]
            parts += [writer.tokens(i, i + 1) for i in range(len(reply.ids))]
            parts.append(writer.end(usage))
        else:
            chunks = ChunkWriter(head, 0, reply, usage_follows=params.include_usage)
            parts = [chunks.role(None, None)] if head.api == "chat" else []
            parts += [chunks.tokens(i, i + 1, None) for i in range(len(reply.ids))]
            if params.include_usage:
                parts.append(usage_chunk(head, usage))
            parts.append(DONE)
        response = _event_stream(request)
        await response.prepare(request)
        await response.write(b"".join(parts))
        await response.write_eof()
        return response

    def _model(self, body: Mapping[str, Any]) -> tuple[str, str | None]:
        """Settle the model a body names: its name, and the adapter's if it is one."""
        replica = self._replica
        name = body.get("model")
        if name is None:
            return replica.options.served_model_names[0], None
        if name not in replica.models:
            raise unknown_model(str(name), list(replica.options.served_model_names))
        return str(name), str(name) if name in replica.loras else None

    async def _chat_prompts(self, body: Mapping[str, Any]) -> list[Prompt]:
        messages = body.get("messages")
        if messages is None:
            raise invalid_type("missing", "messages", "Field required", body)
        if not isinstance(messages, list):
            raise invalid_type("list_type", "messages", "Input should be a valid list", messages)
        reused = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if reused is not None:
            return [self._ids_prompt(reused)]
        continues = body.get("continue_final_message") is True
        kwargs = body.get("chat_template_kwargs")
        text = self._replica.tokenizer.render(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", not continues) is True,
            continue_final_message=continues,
            template=body.get("chat_template"),
            kwargs=kwargs if isinstance(kwargs, dict) else None,
        )
        prompt = await self._replica.encode(text)
        if self._prefix and body.get("add_special_tokens") is True:
            prompt = Prompt([*self._prefix, *prompt.ids])
        return [prompt]

    async def _completion_prompts(self, body: Mapping[str, Any]) -> list[Prompt]:
        """Read a completion's prompts: a text, token ids, or a list of either."""
        prompt = body.get("prompt")
        match prompt:
            case str() if prompt:
                return [await self._text_prompt(body, prompt)]
            case [int(), *_]:
                return [self._ids_prompt(prompt)]
            case [str(), *_]:
                return [await self._text_prompt(body, text) for text in prompt]
            case [list(), *_]:
                return [self._ids_prompt(ids) for ids in prompt]
        raise invalid_value(_EMPTY_PROMPT, "prompt")

    async def _text_prompt(self, body: Mapping[str, Any], text: str) -> Prompt:
        prompt = await self._replica.encode(text)
        if self._prefix and body.get("add_special_tokens", True) is True:
            return Prompt([*self._prefix, *prompt.ids])
        return prompt

    def _ids_prompt(self, ids: Any) -> Prompt:
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise invalid_value(_EMPTY_PROMPT, "prompt")
        largest = max(ids)
        if (
            len(ids) <= self._replica.max_model_len
            and largest >= self._replica.tokenizer.vocab_size
        ):
            raise ApiError(400, f"Token id {largest} is out of vocabulary")
        return Prompt(ids)

    def _check_length(
        self, prompt: Prompt, params: GenerationParams, body: Mapping[str, Any]
    ) -> None:
        longest = self._replica.max_model_len
        if params.max_tokens is not None and params.max_tokens > longest:
            raise invalid_value(
                f"max_tokens={params.max_tokens} cannot be greater than max_model_len={longest}. "
                "Please request fewer output tokens.",
                "max_tokens",
                params.max_tokens,
            )
        count = len(prompt.ids)
        if count > longest:
            # vLLM stops tokenizing a text one token beyond the limit and says so.
            is_text = bool(prompt.segments)
            count = longest + 1 if is_text else count
            qualifier = "at least " if count == longest + 1 else ""
            raise invalid_value(
                f"This model's maximum context length is {longest} tokens. However, your prompt "
                f"contains {qualifier}{count} input tokens, which exceeds this limit even without "
                "any output tokens. Please reduce the length of the input prompt.",
                "input_tokens",
                count,
            )
        if count == longest:
            raise invalid_value("max_tokens must be at least 1, got 0.", "max_tokens", 0)


async def _body(request: web.BaseRequest) -> dict[str, Any]:
    return parse_body(await request.read(), request.headers.get("Content-Type", ""))


def _head_id(request: web.BaseRequest, api: Api) -> str:
    if api == "responses":  # it heeds no header
        return f"resp_{uuid.uuid4().hex}"
    id = request.headers.get("X-Request-Id") or uuid.uuid4().hex[:16]
    return f"{'cmpl' if api == 'completion' else 'chatcmpl'}-{id}"


def _event_stream(request: web.BaseRequest) -> web.StreamResponse:
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex,
    }
    return web.StreamResponse(headers=headers)


def _unsent(head: Head, params: GenerationParams, choice: _Choice) -> bytes:
    """Write what is new of one choice."""
    ready = choice.num_ready
    sent = choice.num_sent
    if ready == sent:
        return b""
    choice.num_sent = ready
    prompt_ids = choice.prompt.ids if params.return_token_ids and sent == 0 else None
    opening = b""
    if head.api == "chat" and sent == 0:
        usage = _usage(head.api, [choice], [0]) if params.continuous_usage else None
        opening = choice.chunks.role(usage, prompt_ids)
    usage = _usage(head.api, [choice], [ready]) if params.continuous_usage else None
    return opening + choice.chunks.tokens(sent, ready, usage, prompt_ids)


def _usage(api: Api, choices: list[_Choice], num_completion_tokens: list[int]) -> Usage:
    """Add up the counts of all choices; a prompt asked for several replies counts once."""
    prompts = {id(choice.prompt): choice for choice in choices}.values()
    requests = [choice.generation.request for choice in prompts]
    return Usage(
        num_prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        num_completion_tokens=sum(num_completion_tokens),
        num_cached_tokens=sum(request.num_cached_tokens for request in requests),
        num_created_tokens=(
            sum(request.num_created_tokens for request in requests) if api != "completion" else None
        ),
    )


def _count(rank: Rank, choice: _Choice, start_s: float, now_s: float) -> None:
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


def _raise_if_failed(choices: list[_Choice]) -> None:
    if any(choice.generation.failed for choice in choices):
        raise ApiError(500, "EngineCore encountered an issue.", type="InternalServerError")


def _generation_error(fault: Fault) -> ApiError:
    kind = "InternalServerError" if fault.status >= 500 else "BadRequestError"
    return ApiError(fault.status, "emulated: generation failed", type=kind)


async def _suffer(request: web.BaseRequest, fault: Fault) -> None:
    """Do what a fault does before the request is read; `die_after` comes later."""
    match fault.kind:
        case "refuse":
            raise ApiError(503, "emulated: refused", type="ServiceUnavailableError")
        case "status":
            raise ApiError(fault.status, f"emulated: status {fault.status}", type="EmulatedError")
        case "die_before":
            await _hang_up(request)
        case "hang":
            await asyncio.Event().wait()
        case _:
            pass


async def _poisoned(request: web.BaseRequest, params: GenerationParams) -> Fault | None:
    """Fail a request wherever it goes: `"emulator": {"poison": KIND}`, a fault of requests."""
    kind = params.extension.get("poison")
    if kind not in REQUEST_FAULTS:
        return None
    fault = Fault(kind=kind)
    await _suffer(request, fault)
    return fault


async def _hang_up(request: web.BaseRequest) -> None:
    """Cut the connection; what follows is the cancellation that a lost connection brings."""
    if request.transport is not None:
        request.transport.abort()
    await asyncio.Event().wait()


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
