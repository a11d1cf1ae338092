"""No client gets another client's answer. Page: docs/operate/failures.md."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from aiohttp import web

from router.upstream.session import MAX_HEADER_BYTES
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import chat, on_stage, streamed
from tests.raw_http import stream, whole

NAMES = [f"client {number}" for number in range(9)]
BEFORE = b'{"object":"chat.completion","choices":[],"for":"somebody else"}'
STRAYS = {
    "whole": whole(BEFORE),
    "stream": stream(b"data: " + BEFORE + b"\n\n", b"data: [DONE]\n\n"),
    "408": whole(b"<html/>", status="408 Request Time-out", kind="html"),
}


class Stray(FakeEngine):
    """Answers with the request's own words; then come bytes that no request asked for."""

    def __init__(self, stray: bytes) -> None:
        super().__init__(self._answer)
        self._stray = stray
        self.num_strays = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        said = {"content": "ok", "role": "assistant"}
        choice = {"index": 0, "delta": said, "message": said, "finish_reason": "stop"}
        event = {"choices": [choice], "for": asked["messages"][0]["content"]}
        asyncio.get_running_loop().call_later(0.02, self._write, request.transport)
        if not asked.get("stream"):
            return web.json_response(event)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + orjson.dumps(event) + b"\n\ndata: [DONE]\n\n")
        return response

    def _write(self, transport: asyncio.Transport | None) -> None:
        if transport is not None and not transport.is_closing():
            self.num_strays += 1
            transport.write(self._stray)


@pytest.mark.parametrize("kind", STRAYS)
@pytest.mark.parametrize("streams", [False, True])
async def test_each_client_gets_its_own_answer(kind: str, streams: bool) -> None:
    """Although bytes come on each connection once its answer has ended."""
    async with Stray(STRAYS[kind]) as engine, on_stage(engine) as stage:
        for name in NAMES:
            body = chat(name)
            reply = await stage.ask(streamed(body) if streams else body)
            assert reply.status == 200
            assert (reply.events[0] if streams else reply.json())["for"] == name
            await stage.until(lambda: engine.num_strays == len(engine.received))

        await stage.until(
            lambda: stage.metric("warmroute_stray_answers_total", server="r1") == len(NAMES)
        )
        assert len(engine.received) == len(NAMES)  # each was sent once
        assert stage.log.count("warning bytes came that no request had asked for") == 1
        assert stage.metric("warmroute_replica_healthy") == 1


@pytest.mark.parametrize("size", [8_180, MAX_HEADER_BYTES + 1])
async def test_an_answer_with_a_long_header_is_generated_once(size: int) -> None:
    """It is passed on up to the limit; over the limit the client gets an error with a name."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": []}, headers={"X-Long": "a" * size})

    async with FakeEngine(answer) as one, FakeEngine(answer) as two, on_stage(one, two) as stage:
        replies = [await stage.ask(chat(name)) for name in NAMES]

        assert len(one.received) + len(two.received) == len(NAMES)
        if size <= MAX_HEADER_BYTES:
            assert {(each.status, len(each.headers["X-Long"])) for each in replies} == {(200, size)}
        else:
            assert {each.status for each in replies} == {502}
            assert "head of its answer" in replies[0].error["message"]
            assert stage.metric("warmroute_not_retried_total", why="unreadable") == len(NAMES)
        assert stage.metric("warmroute_replica_healthy") == 2
