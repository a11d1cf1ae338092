"""One answer: new tokens are sent as they come, or all at once at the end.

    AnswerWriter    the bytes of an answer in one API's shapes: chunks.ChunkAnswer,
                    messages.MessageWriter, responses.ResponseWriter
    send_stream     the events, each time something new is computed
    send_whole      the answer, once all of it is computed

What must not live here: the JSON shapes, what the model says (replies).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Final, Protocol

from aiohttp import web

from loadtest.emulator.chunks import ChunkAnswer
from loadtest.emulator.faults import Fault, generation_error, hang_up
from loadtest.emulator.generation import Generation
from loadtest.emulator.messages import MessageWriter
from loadtest.emulator.replies import Reply
from loadtest.emulator.responses import Asked, ResponseWriter
from loadtest.emulator.tokens import Prompt
from loadtest.emulator.wire import Api, ApiError, GenerationParams, Head, Usage

KEEP_ALIVE: Final = b": keep-alive\n\n"
# Source: vLLM 0.32 entrypoints/serve/utils/sse_keep_alive.py


class Choice:
    """One reply: how much of it the engine has computed, and how much was sent."""

    __slots__ = ("generation", "num_sent", "prompt", "reply")

    def __init__(self, prompt: Prompt, reply: Reply, generation: Generation) -> None:
        self.prompt = prompt
        self.reply = reply
        self.generation = generation
        self.num_sent = 0

    @property
    def num_ready(self) -> int:
        return min(self.generation.num_output_tokens, len(self.reply.ids))

    @property
    def is_done(self) -> bool:
        return self.num_sent == len(self.reply.ids)


class AnswerWriter(Protocol):
    """Writes one answer, whole or as the events of a stream."""

    def start(self) -> bytes:
        """Write the beginning of a stream, before anything is computed."""

    def failure(self, error: ApiError) -> bytes | None:
        """Write the end of a stream that the engine cannot compute; None: it breaks off."""

    def tokens(self, index: int, start: int, stop: int, usage: Usage | None) -> bytes:
        """Write tokens [start, stop) of a choice, and its usage so far if it is given."""

    def end(self, usage: Usage) -> bytes:
        """Write the end of a stream."""

    def whole(self, usage: Usage) -> bytes:
        """Write an answer that is not streamed."""


def writer_of(
    head: Head, params: GenerationParams, choices: Sequence[Choice], asked: Asked | None
) -> AnswerWriter:
    """Choose the writer of an answer."""
    first = choices[0]
    if asked is not None:
        return ResponseWriter(head, asked, first.reply)
    if head.api == "messages":
        return MessageWriter(head, first.reply, len(first.prompt.ids))
    replies = [choice.reply for choice in choices]
    return ChunkAnswer(head, params, replies, [choice.prompt.ids for choice in choices])


async def send_stream(
    request: web.BaseRequest,
    writer: AnswerWriter,
    choices: Sequence[Choice],
    api: Api,
    fault: Fault | None,
    *,
    has_usage: bool,
    keep_alive_s: float,
) -> web.StreamResponse:
    """Send new tokens as they come.

    Args:
        has_usage: Whether events have the usage so far.
        keep_alive_s: A comment is sent after each silence of this length; 0.0: never.

    Raises:
        ApiError: The engine failed.
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
    dies = fault if fault is not None and fault.kind == "die_after" else None
    while not all(choice.is_done for choice in choices):
        while not await _has_more(choices, keep_alive_s):
            await response.write(KEEP_ALIVE)
        events: list[bytes] = []
        for index, choice in enumerate(choices):
            sent, now = choice.num_sent, choice.num_ready
            if now > sent:
                choice.num_sent = now
                usage = usage_of(api, [choice]) if has_usage else None
                events.append(writer.tokens(index, sent, now, usage))
        if unsent := b"".join(events):
            await response.write(unsent)
        if dies is not None and choices[0].num_sent >= dies.after_tokens:
            await hang_up(request)
    await response.write(writer.end(usage_of(api, choices)))
    await response.write_eof()
    return response


async def send_whole(
    request: web.BaseRequest,
    writer: AnswerWriter,
    choices: Sequence[Choice],
    api: Api,
    fault: Fault | None,
) -> web.StreamResponse:
    """Send the answer once all of it is computed.

    Raises:
        ApiError: The engine failed, or `fault` says so.
    """
    if fault is not None and fault.kind == "first_event_error":
        raise generation_error(fault)
    dies = fault if fault is not None and fault.kind == "die_after" else None
    while not all(choice.is_done for choice in choices):
        await _has_more(choices, 0.0)
        for choice in choices:
            choice.num_sent = choice.num_ready
        if dies is not None and choices[0].num_sent >= dies.after_tokens:
            await hang_up(request)
    return web.Response(body=writer.whole(usage_of(api, choices)), content_type="application/json")


async def _has_more(choices: Sequence[Choice], silence_s: float) -> bool:
    """Wait until there is something to send; False after a silence of `silence_s` (0.0: never).

    Raises:
        ApiError: The engine failed.
    """
    ready = choices[0].generation.ready
    try:
        async with asyncio.timeout(silence_s or None):
            while not any(choice.num_ready > choice.num_sent for choice in choices):
                if any(choice.generation.failed for choice in choices):
                    text = "EngineCore encountered an issue."
                    raise ApiError(500, text, type="InternalServerError")
                ready.clear()
                await ready.wait()
    except TimeoutError:
        return False
    return True


def event_stream(request: web.BaseRequest) -> web.StreamResponse:
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex,
    }
    return web.StreamResponse(headers=headers)


def usage_of(api: Api, choices: Sequence[Choice]) -> Usage:
    """Add up the counts of all choices; a prompt asked for several replies counts once."""
    prompts = {id(choice.prompt): choice for choice in choices}.values()
    requests = [choice.generation for choice in prompts]
    return Usage(
        num_prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        num_completion_tokens=sum(choice.num_sent for choice in choices),
        num_cached_tokens=sum(request.num_cached_tokens for request in requests),
        num_created_tokens=(
            sum(request.num_created_tokens for request in requests) if api != "completion" else None
        ),
    )
