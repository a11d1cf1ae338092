"""Answers with status 200 that are none: aborts, errors inside streams, streams without an end.

What engines write here is what vLLM 0.32 writes. Page: docs/operate/failures.md.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

import orjson
import pytest
from aiohttp import web

from router.replicas.health import HealthRules
from tests.faults.fake_engine import FakeEngine, Handler, first_then, streams
from tests.faults.stage import Engines, Json, Stage, arm, chat, on_stage, words

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GENERATE = "/inference/v1/generate"
PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
DONE = b"data: [DONE]\n\n"
FAR = {"health__interval_s": 60.0}


def body_of(path: str, *, stream: bool, number: int = 1) -> Json:
    text = words(number)
    body: Json = chat(text)
    if path == COMPLETIONS:
        body = {"model": "tiny", "prompt": text, "max_tokens": 4}
    elif path == RESPONSES:
        body = {"model": "tiny", "input": text}
    return body | {"stream": stream}


def event(value: Json) -> bytes:
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + orjson.dumps(value) + b"\n\n"


def chunk(path: str, text: str = "", finish_reason: str | None = None, **delta: str) -> bytes:
    choice: Json = {"index": 0, "finish_reason": finish_reason}
    choice |= {"text": text} if path == COMPLETIONS else {"delta": {"content": text, **delta}}
    return event({"id": "x", "object": "chunk", "choices": [choice]})


def response(status: str, num_tokens: int, **fields: object) -> Json:
    usage = {"input_tokens": 9, "output_tokens": num_tokens, "total_tokens": 9 + num_tokens}
    return {"id": "resp_1", "object": "response", "output": [], "status": status, "text": {}} | {
        "usage": usage,
        **fields,
    }


BEGINNING = {
    CHAT: chunk(CHAT, role="assistant"),
    COMPLETIONS: b"",
    MESSAGES: event({"type": "message_start", "message": {"content": []}}),
    RESPONSES: event({"type": "response.created", "response": response("in_progress", 0)})
    + event({"type": "response.in_progress", "response": response("in_progress", 0)}),
}
TOKEN = {
    CHAT: chunk(CHAT, "a"),
    COMPLETIONS: chunk(COMPLETIONS, "a"),
    MESSAGES: event({"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}),
    RESPONSES: event({"type": "response.output_text.delta", "delta": "a"}),
}
USAGE = {"prompt_tokens": 9, "completion_tokens": 1}


def message_delta(reason: str | None) -> bytes:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return event({"type": "message_delta", "delta": delta, "usage": {"input_tokens": 9}})


STOP = event({"type": "message_stop"})
WELL = {
    CHAT: chunk(CHAT, finish_reason="stop") + DONE,
    COMPLETIONS: chunk(COMPLETIONS, finish_reason="stop") + DONE,
    MESSAGES: message_delta("end_turn") + STOP,
    RESPONSES: event({"type": "response.completed", "response": response("completed", 1)}),
}
ABORT = {
    "chat": (CHAT, chunk(CHAT, finish_reason="abort") + DONE),
    "chat with usage": (
        CHAT,
        chunk(CHAT, finish_reason="abort") + event({"choices": [], "usage": USAGE}) + DONE,
    ),
    "chat, nothing but its end": (CHAT, DONE),
    "completion": (COMPLETIONS, chunk(COMPLETIONS, finish_reason="abort") + DONE),
    "completion, nothing but its end": (COMPLETIONS, event({"choices": []}) + DONE),
    "message": (MESSAGES, message_delta("abort") + STOP),
    "message, null": (MESSAGES, message_delta(None) + STOP),
    "message, nothing but its end": (MESSAGES, STOP),
    "response": (
        RESPONSES,
        event({"type": "response.completed", "response": response("completed", 0)}),
    ),
    "response, cancelled": (
        RESPONSES,
        event({"type": "response.completed", "response": response("cancelled", 3)}),
    ),
}
ABORT_AFTER = {
    **{
        name: ABORT[name]
        for name in ("chat", "completion", "message", "message, null", "response, cancelled")
    },
    "chat, in one": (CHAT, chunk(CHAT, "b", finish_reason="abort") + DONE),
    "long response": (
        RESPONSES,
        event({"type": "response.completed", "response": {"i": "x" * 50_000}
               | response("cancelled", 3)}),
    ),
}  # fmt: skip
WHOLE_ABORT: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, {"choices": [{"message": {"content": None}, "finish_reason": "abort"}]}),
    "chat of two": (
        CHAT,
        {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}], "usage": USAGE},
    ),
    "completion": (COMPLETIONS, {"choices": [{"text": "half", "finish_reason": "abort"}]}),
    "message": (MESSAGES, {"type": "message", "content": [], "stop_reason": "abort"}),
    "message, none": (MESSAGES, {"type": "message", "content": [], "usage": {"input_tokens": 9}}),
    "response": (RESPONSES, response("completed", 0)),
    "response, cancelled": (RESPONSES, response("cancelled", 3)),
    "tokens": (GENERATE, {"choices": [{"token_ids": [], "finish_reason": "abort"}]}),
}
WHOLE_WELL: dict[str, Json] = {
    CHAT: {"choices": [{"message": {"content": '"abort"'}, "finish_reason": "stop"}]},
    COMPLETIONS: {"choices": [{"text": '"finish_reason": "abort"', "finish_reason": "length"}]},
    MESSAGES: {"type": "message", "content": [], "stop_reason": "end_turn"},
    RESPONSES: response("completed", 1, tools=[{"name": "cancelled"}]),
    GENERATE: {"choices": [{"token_ids": [1], "finish_reason": "stop"}]},
}


def whole(value: Json) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(value)

    return answer


def count(stage: Stage, outcome: str) -> float:
    return stage.metric("warmroute_requests_total", outcome=outcome)


# -- before a token --------------------------------------------------------------------------------


UNBEGUN = {
    **{
        f"abort: {name}": (path, (BEGINNING[path] + end,), "abort")
        for name, (path, end) in ABORT.items()
    },
    **{
        f"abort apart: {name}": (path, (BEGINNING[path], end), "abort")
        for name, (path, end) in ABORT.items()
    },
    **{f"no end: {path}": (path, (BEGINNING[path],), "no_end") for path in PATHS},
    **{f"nothing: {path}": (path, (b"",), "no_end") for path in PATHS},
}


@pytest.mark.parametrize(("path", "parts", "reason"), UNBEGUN.values(), ids=UNBEGUN)
async def test_a_stream_that_fails_before_a_token_moves_on(
    path: str, parts: tuple[bytes, ...], reason: str
) -> None:
    """Its client has seen nothing, so another replica answers; the first one has failed.

    Where the connection ended well, only the missing end says so.
    """
    well = BEGINNING[path] + TOKEN[path] + WELL[path]
    handler = first_then(streams(*parts), streams(well))
    async with FakeEngine(handler) as a, FakeEngine(handler) as b, on_stage(a, b, **FAR) as stage:
        reply = await stage.ask(body_of(path, stream=True), path)

        assert reply.body == well
        assert (len(a.received), len(b.received)) == (1, 1)
        assert stage.metric("warmroute_failovers_total", reason=reason) == 1
        assert count(stage, "ok") == 1


@pytest.mark.parametrize(("path", "value"), WHOLE_ABORT.values(), ids=WHOLE_ABORT)
async def test_a_whole_answer_that_is_aborted_moves_on(path: str, value: Json) -> None:
    """However much of it was computed: its client has seen nothing."""
    handler = first_then(whole(value), whole(WHOLE_WELL[path]))
    async with FakeEngine(handler) as a, FakeEngine(handler) as b, on_stage(a, b, **FAR) as stage:
        reply = await stage.ask(body_of(path, stream=False), path)

        assert reply.json() == WHOLE_WELL[path]
        assert (len(a.received), len(b.received)) == (1, 1)
        assert stage.metric("warmroute_failovers_total", reason="abort") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_everywhere_is_passed_on_and_blames_no_replica(stream: bool) -> None:
    """Two replicas are asked; then it is the request's own fault."""
    value = WHOLE_ABORT["chat"][1]
    end = BEGINNING[CHAT] + ABORT["chat"][1]
    handler = streams(end) if stream else whole(value)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(handler)) for _ in range(3)]
        stage = await stack.enter_async_context(on_stage(*engines, **FAR))
        for number in range(5):
            reply = await stage.ask(body_of(CHAT, stream=stream, number=number))

            assert reply.status == 200
            assert reply.body == (end if stream else orjson.dumps(value)) or not stream
        assert count(stage, "replica_failed") == 5
        assert sum(len(engine.received) for engine in engines) == 10
        assert stage.metric("warmroute_replica_healthy") == 3


# -- after tokens ----------------------------------------------------------------------------------


async def outcome_of(path: str, *parts: bytes) -> tuple[str, bytes]:
    """Have a stream passed on; return its outcome and what the client got."""
    async with FakeEngine(streams(*parts)) as engine, on_stage(engine, **FAR) as stage:
        reply = await stage.ask(body_of(path, stream=True), path)
        await stage.until(lambda: stage.metric("warmroute_requests_total"))
        (outcome,) = (
            each
            for each in ("ok", "replica_failed", "client_error", "client_gone")
            if count(stage, each)
        )
        return outcome, reply.body


CHAT_ERROR = {"error": {"message": "m", "type": "InternalServerError", "param": None, "code": 500}}
OF_CLIENT = {"error": {"message": "m", "type": "BadRequestError", "param": None, "code": 400}}


def message_error(code: int) -> bytes:
    """Write an error as vLLM 0.32 does: pydantic's text of the chat's error, which it quotes."""
    quoted = f"{{'error': {{'message': 'a ...am': None, 'code': {code}}}}}"
    text = (
        "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required "
        f"[type=missing, input_value={quoted}, input_type=dict]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/missing\nchoices\n"
        f"  Field required [type=missing, input_value={quoted}, input_type=dict]"
    )
    return event({"type": "error", "error": {"type": "internal_error", "message": text}})


ERRORS = {
    "chat": (CHAT, event(CHAT_ERROR) + DONE, "replica_failed"),
    "chat, busy": (CHAT, event({"error": {"code": 503, "message": "m"}}) + DONE, "replica_failed"),
    "chat, old": (CHAT, event({"object": "error", "message": "m", "code": 500}), "replica_failed"),
    "chat, the client's": (CHAT, event(OF_CLIENT) + DONE, "client_error"),
    "completion": (COMPLETIONS, event(CHAT_ERROR) + DONE, "replica_failed"),
    "message": (MESSAGES, message_error(500), "replica_failed"),
    "message, plain": (
        MESSAGES,
        event({"type": "error", "error": {"type": "internal_error", "message": "m"}}),
        "replica_failed",
    ),
    "message, the client's": (MESSAGES, message_error(400), "client_error"),
    "message, too long": (
        MESSAGES,
        event({"type": "error", "error": {"type": "invalid_request_error", "message": "m"}}),
        "client_error",
    ),
    "response": (
        RESPONSES,
        event({"type": "error", "code": "server_error", "message": "m"}),
        "replica_failed",
    ),
    "failed response": (
        RESPONSES,
        event({"type": "response.failed", "response": {"error": {"code": "server_error"}}}),
        "replica_failed",
    ),
    "long failed response": (
        RESPONSES,
        b'event: x\ndata: {"response":{"i":"' + b"x" * 50_000 + b'"},"type":"response.failed"}\n\n',
        "replica_failed",
    ),
    "response, the client's": (
        RESPONSES,
        event({"type": "error", "code": "invalid_prompt", "message": "m"}),
        "client_error",
    ),
    "long error": (CHAT, event({"error": {"message": "m" * 9_000, "code": 500}}), "replica_failed"),
}


LONG = {"instructions": "x" * 90_000}
GOOD = {
    "chat": (CHAT, WELL[CHAT]),
    "completion": (COMPLETIONS, WELL[COMPLETIONS]),
    "message": (MESSAGES, WELL[MESSAGES]),
    "response": (RESPONSES, WELL[RESPONSES]),
    "chat, CRLF": (CHAT, WELL[CHAT].replace(b"\n", b"\r\n")),
    "chat, no space": (CHAT, WELL[CHAT].replace(b"data: ", b"data:")),
    "chat that speaks of it": (
        CHAT,
        chunk(CHAT, 'data: {"error": {"code": 500}} "finish_reason": "abort"') + WELL[CHAT],
    ),
    "chat that calls it": (
        CHAT,
        event({"choices": [{"delta": {"tool_calls": [{"function": {"name": "abort"}}]}}]})
        + WELL[CHAT],
    ),
    "cut response": (
        RESPONSES,
        event({"type": "response.incomplete", "response": response("incomplete", 1)}),
    ),
    "long response": (
        RESPONSES,
        event({"type": "response.completed", "response": response("completed", 1, **LONG)}),
    ),
    "long response, type last": (
        RESPONSES,
        b"event: response.completed\ndata: "
        + orjson.dumps({"response": response("completed", 1, **LONG), "type": "response.completed"})
        + b"\n\n",
    ),
}


ENDS = {
    **{f"abort: {name}": (*case, "replica_failed") for name, case in ABORT_AFTER.items()},
    **{f"error: {name}": case for name, case in ERRORS.items()},
    **{f"no end: {path}": (path, b"", "replica_failed") for path in PATHS},
    **{f"good: {name}": (*case, "ok") for name, case in GOOD.items()},
}


@pytest.mark.parametrize(("path", "end", "outcome"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_stream_is_passed_on_and_judged_by_its_end(
    path: str, end: bytes, outcome: str, pieces: int
) -> None:
    """Aborts, errors and missing ends are the replica's failure, unless the request is wrong."""
    parts = [part for part in (BEGINNING[path], TOKEN[path], end) if part]
    if pieces == 1:
        parts = [b"".join(parts)]

    assert await outcome_of(path, *parts) == (outcome, b"".join(parts))


async def test_streams_of_other_routes_may_end_as_they_like() -> None:
    """Nothing is known of them."""
    path = "/v1/audio/speech"
    async with FakeEngine(streams(b"data: x\n\n")) as engine, on_stage(engine) as stage:
        await stage.ask({"model": "tiny", "input": "a", "stream": True}, path)

        assert count(stage, "ok") == 1


async def test_health_and_the_next_requests_see_failures_inside_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three in a row a replica gets none, for longer here than a busy machine needs."""
    monkeypatch.setattr("router.replicas.fleet.HealthRules", partial(HealthRules, backoff_s=600.0))
    failing = streams(BEGINNING[CHAT], TOKEN[CHAT], event(CHAT_ERROR) + DONE)
    well = streams(BEGINNING[CHAT] + TOKEN[CHAT] + WELL[CHAT])
    async with FakeEngine(failing) as a, FakeEngine(well) as b:
        async with on_stage(a, b, policy__name="round_robin", **FAR) as stage:
            for number in range(12):
                await stage.ask(body_of(CHAT, stream=True, number=number))

            assert len(a.received) == 3
            assert stage.metric("warmroute_replica_healthy", replica="r1") == 0
            assert stage.metric("warmroute_broken_streams_total", reason="event_500") == 3


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_client_that_leaves_at_the_error_does_not_hide_it(path: str) -> None:
    """SDKs close the connection as soon as they have read it."""
    errors = {
        CHAT: event(CHAT_ERROR),
        MESSAGES: message_error(500),
        RESPONSES: ERRORS["response"][1],
    }
    begun, end = BEGINNING[path] + TOKEN[path], errors[path]
    answer = streams(begun, end, then="hold")

    async with FakeEngine(answer) as engine, on_stage(engine, **FAR) as stage:
        async with stage.asking(body_of(path, stream=True), path) as reply:
            got = b""
            while len(got) < len(begun + end):
                got += await reply.content.readany()
        await stage.until(lambda: stage.metric("warmroute_requests_total"))

        assert count(stage, "replica_failed") == 1


async def test_a_client_that_leaves_in_the_middle_is_gone() -> None:
    """What is missing then is no failure of the replica, on any route."""
    answer = streams(BEGINNING[CHAT] + TOKEN[CHAT], then="hold")

    async with FakeEngine(answer) as engine, on_stage(engine, **FAR) as stage:
        for path in (*PATHS, "/v1/audio/speech"):
            async with stage.asking(body_of(path, stream=True), path) as reply:
                await reply.content.readany()
        await stage.until(lambda: stage.metric("warmroute_requests_total") == 5)

        assert count(stage, "client_gone") == 5


async def test_an_aborted_response_that_is_stored_is_not_sent_again() -> None:
    """It may be kept there by its id."""
    async with FakeEngine(whole(response("cancelled", 1))) as a, FakeEngine() as b:
        async with on_stage(a, b, policy__name="round_robin", **FAR) as stage:
            body = body_of(RESPONSES, stream=False) | {"store": True}
            reply = await stage.ask(body, RESPONSES)

            assert reply.json()["status"] == "cancelled"
            assert not b.received
            assert count(stage, "replica_failed") == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_emulated_engine_that_is_paused_aborts(path: str, stream: bool) -> None:
    """Before a token it is left; after one, a stream is passed on as its failure."""
    async with Engines(2) as engines, on_stage(*engines, policy__name="round_robin") as stage:
        for num_tokens in (0, 2):
            arm(engines[0], "abort", count=1, after_tokens=num_tokens)
            for number in range(2):
                body = body_of(path, stream=stream, number=10 * num_tokens + number)
                assert (await stage.ask(body, path)).status == 200

        num_cut, num_moved = (1, 1) if stream else (0, 2)
        assert stage.metric("warmroute_failovers_total", reason="abort") == num_moved
        assert count(stage, "replica_failed") == num_cut
        assert count(stage, "ok") == 4 - num_cut


async def test_an_abort_is_no_death() -> None:
    """Replicas that end in good order, one after the other, were not killed by a request."""
    async with Engines(3) as engines, on_stage(*engines) as stage:
        for engine in engines[:2]:
            arm(engine, "abort", after_tokens=0)
        replies = [await stage.ask(body_of(CHAT, stream=True)) for _ in range(3)]
        for engine in engines[:2]:
            arm(engine, "kill")
        await stage.until(lambda: stage.metric("warmroute_replica_healthy") <= 1)

        assert {reply.status for reply in replies} == {200}
        assert (await stage.ask(body_of(CHAT, stream=True))).status == 200


async def test_a_replica_that_aborts_and_dies_is_no_other_failure() -> None:
    """An abort whose connection then breaks is one failure."""
    answer = streams(BEGINNING[CHAT] + ABORT["chat"][1], then="cut", pause_s=0.0)
    well = BEGINNING[CHAT] + TOKEN[CHAT] + WELL[CHAT]
    async with FakeEngine(answer) as a, FakeEngine(streams(well)) as b:
        async with on_stage(a, b, policy__name="round_robin", **FAR) as stage:
            reply = await stage.ask(body_of(CHAT, stream=True))

            assert reply.body == well
            assert stage.metric("warmroute_failovers_total") == 1
