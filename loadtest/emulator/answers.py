"""One answer on its way: what is computed goes out as it comes, or all at once at the end.

    AnswerWriter    the bytes of an answer in one API's shapes; chats and completions: ChunkAnswer,
                    the others: messages.MessageWriter, responses.ResponseWriter
    send_stream     the events, each time something new is computed
    send_whole      the answer, once all of it is
    send_instantly  either, of a reply that nothing is computed for

What must not live here: the JSON shapes (wire, messages, responses), what the model says (replies).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Final, Protocol

from aiohttp import web

from loadtest.emulator.engine import Generation
from loadtest.emulator.faults import Fault
from loadtest.emulator.messages import MessageWriter
from loadtest.emulator.replies import Reply
from loadtest.emulator.request_faults import generation_error, hang_up
from loadtest.emulator.responses import Asked, ResponseWriter
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
    usage_chunk,
)

KEEP_ALIVE: Final = b": keep-alive\n\n"
# Source: vLLM 0.32 entrypoints/serve/utils/sse_keep_alive.py


class Choice:
    """One reply on its way: how much the engine has made of it, how much was sent.

    Args:
        holds_call: A tool call's arguments are sent once all of them are there.
    """

    __slots__ = ("_holds_call", "generation", "num_sent", "prompt", "reply")

    def __init__(
        self, prompt: Prompt, reply: Reply, generation: Generation, *, holds_call: bool = False
    ) -> None:
        self._holds_call = holds_call and reply.tool_call is not None
        self.prompt = prompt
        self.reply = reply
        self.generation = generation
        self.num_sent = 0

    @property
    def num_ready(self) -> int:
        num_made = self.generation.request.num_output_tokens
        call = self.reply.tool_call
        if call is None or not self._holds_call or num_made == len(self.reply.ids):
            return num_made
        return min(num_made, call.start)

    @property
    def is_done(self) -> bool:
        return self.num_sent == len(self.reply.ids)


class AnswerWriter(Protocol):
    """Writes one answer, whole or as the events of a stream."""

    def start(self) -> bytes:
        """Write what a stream begins with before anything is computed."""

    def failure(self, error: ApiError) -> bytes | None:
        """Write the end of a stream of which nothing can be computed; None: it breaks off."""

    def tokens(self, index: int, start: int, stop: int, usage: Usage | None) -> bytes:
        """Write tokens [start, stop) of a choice, and its usage so far if that is given."""

    def end(self, usage: Usage) -> bytes:
        """Write the end of a stream."""

    def whole(self, usage: Usage) -> bytes:
        """Write an answer that is not streamed."""


class ChunkAnswer:
    """An answer of the chat or the completion route: one or more choices.

    Args:
        prompts: The ids of each choice's prompt; None: they are not asked for.
    """

    def __init__(
        self,
        head: Head,
        params: GenerationParams,
        replies: Sequence[Reply],
        prompts: Sequence[list[int]] | None,
    ) -> None:
        self._head = head
        self._has_usage = params.include_usage
        self._replies = list(replies)
        self._prompts = prompts
        self._chunks = [
            ChunkWriter(
                head,
                index,
                reply,
                return_token_ids=params.return_token_ids,
                usage_follows=params.include_usage,
            )
            for index, reply in enumerate(replies)
        ]

    def start(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        # As vLLM does it: the role first, then the error, and the end as ever.
        opening = self._chunks[0].role(None, None) if self._head.api == "chat" else b""
        return opening + b"data: " + error.body + b"\n\n" + DONE

    def tokens(self, index: int, start: int, stop: int, usage: Usage | None) -> bytes:
        chunks = self._chunks[index]
        prompt_ids = self._prompts[index] if self._prompts is not None and start == 0 else None
        opening = b""
        if self._head.api == "chat" and start == 0:
            opening = chunks.role(usage.before_any() if usage is not None else None, prompt_ids)
        return opening + chunks.tokens(start, stop, usage, prompt_ids)

    def end(self, usage: Usage) -> bytes:
        return usage_chunk(self._head, usage) + DONE if self._has_usage else DONE

    def whole(self, usage: Usage) -> bytes:
        prompt_ids = self._prompts[0] if self._prompts is not None else None
        return answer(self._head, self._replies, usage, prompt_ids=prompt_ids)


def writer_of(
    head: Head, params: GenerationParams, choices: Sequence[Choice], asked: Asked | None
) -> AnswerWriter:
    """Choose the writer of an answer."""
    first = choices[0]
    if asked is not None:
        return ResponseWriter(head, asked, first.reply)
    if head.api == "messages":
        return MessageWriter(head, first.reply, len(first.prompt.ids))
    prompts = [choice.prompt.ids for choice in choices] if params.return_token_ids else None
    return ChunkAnswer(head, params, [choice.reply for choice in choices], prompts)


async def send_stream(
    request: web.BaseRequest,
    writer: AnswerWriter,
    choices: Sequence[Choice],
    ready: asyncio.Event,
    *,
    api: Api,
    has_usage: bool,
    fault: Fault | None,
    keep_alive_s: float = 0.0,
) -> web.StreamResponse:
    """Send what is new each time `ready` is set; `has_usage`: with the usage so far.

    `keep_alive_s`: After so long a silence a comment is sent; 0.0: never.

    Raises:
        ApiError: the engine failed.
    """
    response = event_stream(request)
    await response.prepare(request)
    if opening := writer.start():
        await response.write(opening)
    if fault is not None and fault.kind == "first_event_error":
        failure = writer.failure(generation_error(fault))
        if failure is None:
            await hang_up(request)
        else:
            await response.write(failure)
        await response.write_eof()
        return response
    while not all(choice.is_done for choice in choices):
        ready.clear()
        if not any(choice.num_ready > choice.num_sent for choice in choices):
            await _wait(ready, response, choices, keep_alive_s)
            _raise_if_failed(choices)
        events: list[bytes] = []
        for index, choice in enumerate(choices):
            sent, now = choice.num_sent, choice.num_ready
            if now > sent:
                choice.num_sent = now
                usage = usage_of(api, [choice]) if has_usage else None
                events.append(writer.tokens(index, sent, now, usage))
        if unsent := b"".join(events):
            await response.write(unsent)
        if fault is not None and choices[0].num_sent >= fault.after_tokens:
            await hang_up(request)
    await response.write(writer.end(usage_of(api, choices)))
    await response.write_eof()
    return response


async def _wait(
    ready: asyncio.Event,
    response: web.StreamResponse,
    choices: Sequence[Choice],
    keep_alive_s: float,
) -> None:
    """Wait until there is something to send; after each silence of `keep_alive_s` comment."""
    while True:
        try:
            async with asyncio.timeout(keep_alive_s or None):
                while True:
                    await ready.wait()
                    if any(c.num_ready > c.num_sent or c.generation.failed for c in choices):
                        return
                    ready.clear()
        except TimeoutError:
            await response.write(KEEP_ALIVE)


async def send_whole(
    request: web.BaseRequest,
    writer: AnswerWriter,
    choices: Sequence[Choice],
    ready: asyncio.Event,
    *,
    api: Api,
    fault: Fault | None,
) -> web.StreamResponse:
    """Send the answer once all of it is computed.

    Raises:
        ApiError: the engine failed, or `fault` says so.
    """
    if fault is not None and fault.kind == "first_event_error":
        raise generation_error(fault)
    while not all(choice.is_done for choice in choices):
        ready.clear()
        if not any(choice.num_ready > choice.num_sent for choice in choices):
            await ready.wait()
            _raise_if_failed(choices)
        for choice in choices:
            choice.num_sent = choice.num_ready
        if fault is not None and choices[0].num_sent >= fault.after_tokens:
            await hang_up(request)
    return _whole(writer, usage_of(api, choices))


async def send_instantly(
    request: web.BaseRequest,
    writer: AnswerWriter,
    reply: Reply,
    usage: Usage,
    *,
    is_stream: bool,
) -> web.StreamResponse:
    """Send a reply for which nothing is computed: what is left is the cost of HTTP."""
    if not is_stream:
        return _whole(writer, usage)
    parts = [writer.start()]
    parts += [writer.tokens(0, i, i + 1, None) for i in range(len(reply.ids))]
    parts.append(writer.end(usage))
    response = event_stream(request)
    await response.prepare(request)
    await response.write(b"".join(parts))
    await response.write_eof()
    return response


def event_stream(request: web.BaseRequest) -> web.StreamResponse:
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex,
    }
    return web.StreamResponse(headers=headers)


def usage_of(api: Api, choices: Sequence[Choice]) -> Usage:
    """Add up the counts of all choices; a prompt asked for several replies counts once."""
    prompts = {id(choice.prompt): choice for choice in choices}.values()
    requests = [choice.generation.request for choice in prompts]
    return Usage(
        num_prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        num_completion_tokens=sum(choice.num_sent for choice in choices),
        num_cached_tokens=sum(request.num_cached_tokens for request in requests),
        num_created_tokens=(
            sum(request.num_created_tokens for request in requests) if api != "completion" else None
        ),
    )


def _whole(writer: AnswerWriter, usage: Usage) -> web.Response:
    return web.Response(body=writer.whole(usage), content_type="application/json")


def _raise_if_failed(choices: Sequence[Choice]) -> None:
    if any(choice.generation.failed for choice in choices):
        raise ApiError(500, "EngineCore encountered an issue.", type="InternalServerError")
