"""x-warmroute-keepalive-s in a whole router: comments until there is something to read."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import chat, on_stage, streamed

EACH_SECOND = {"x-warmroute-keepalive-s": "1"}
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
END = b"data: [DONE]\n\n"
COMMENT = b": no token yet\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
REFUSAL = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}


class Slow:
    """An engine that answers when it may."""

    def __init__(
        self, status: int = 200, body: bytes = EVENTS + END, *, whole: bool = True
    ) -> None:
        self.may = asyncio.Event()
        self._status, self._body, self._whole = status, body, whole

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        await self.may.wait()
        kind = "text/event-stream" if self._status == 200 else "application/json"
        if self._whole:
            return web.Response(status=self._status, body=self._body, content_type=kind)
        response = web.StreamResponse(status=self._status, headers={"Content-Type": kind})
        await response.prepare(request)
        for piece in (self._body[:40], self._body[40:]):
            await response.write(piece)
            await asyncio.sleep(0.05)
        return response


async def ask(
    slow: Slow, path: str = "/v1/chat/completions", num_comments: int = 1, **fields: Any
) -> tuple[int, str, bytes]:
    """Have a stream's client wait for comments before the engine answers."""
    async with FakeEngine(slow.answer) as engine, on_stage(engine) as stage:
        body = streamed(chat("hello")) | fields
        sign = PING if path == "/v1/messages" else COMMENT
        async with stage.asking(body, path, headers=EACH_SECOND) as answer:
            first = b""
            while first.count(sign) < num_comments:
                first += await answer.content.readany()
            assert first == num_comments * sign
            slow.may.set()
            return answer.status, answer.content_type, await answer.read()


@pytest.mark.parametrize("whole", [True, False])
async def test_a_client_that_waits_reads_comments_and_then_its_answer(whole: bool) -> None:
    """Short answers come in one piece."""
    status, kind, rest = await ask(Slow(whole=whole), num_comments=2 if whole else 1)

    assert (status, kind) == (200, "text/event-stream")
    assert rest.replace(COMMENT, b"") == EVENTS + END


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", None),
        ("/v1/messages", "error"),
        ("/v1/responses", "error"),
    ],
)
async def test_an_error_of_the_engine_comes_as_an_event(path: str, kind: str | None) -> None:
    """In the shape of the API: a status can no longer be sent."""
    fields = {"input": "hello", "max_tokens": 9} if path != "/v1/chat/completions" else {}
    _, _, rest = await ask(Slow(400, orjson.dumps(REFUSAL)), path, **fields)
    said = rest.replace(COMMENT, b"").replace(PING, b"")
    [event] = [part for part in said.split(b"\n\n") if part.strip()]
    lines = event.splitlines()

    assert lines[:-1] == ([b"event: " + kind.encode()] if kind else [])
    data = orjson.loads(lines[-1].removeprefix(b"data: "))
    assert data["error"]["message"] == "too long"
    assert data.get("type") == ("error" if path == "/v1/responses" else data.get("type"))


async def test_a_long_error_is_named_by_its_status() -> None:
    """One that does not come whole is not read to its end."""
    _, _, rest = await ask(Slow(500, b"{" + b" " * 20_000_000 + b"}", whole=False))

    assert b'data: {"error"' in rest
    assert b"answered with status 500" in rest


async def test_an_error_that_is_no_json_is_quoted() -> None:
    _, _, rest = await ask(Slow(502, b"<html>Bad gateway</html>" + 2_000 * b"x"))

    assert b"<html>Bad gateway" in rest
    assert len(rest.replace(COMMENT, b"")) < 1_200


async def test_a_quick_answer_has_no_comment_and_a_whole_one_keeps_its_status() -> None:
    """Nor does an answer that is no stream ever get one."""
    slow = Slow(400, orjson.dumps(REFUSAL))
    slow.may.set()
    async with FakeEngine(slow.answer) as engine, on_stage(engine) as stage:
        reply = await stage.ask(streamed(chat("hello")), headers=EACH_SECOND)
        assert (reply.status, reply.json()) == (400, REFUSAL)
        slow.may.clear()
        async with asyncio.TaskGroup() as tg:
            task = tg.create_task(stage.ask(chat("hello"), headers=EACH_SECOND))
            await asyncio.sleep(1.1)  # a comment would have come
            slow.may.set()
        assert (task.result().status, task.result().json()) == (400, REFUSAL)


@pytest.mark.parametrize("given", ["0", "601", "soon", "1.5", ""])
async def test_a_header_that_makes_no_sense_is_refused(given: str) -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        reply = await stage.ask(streamed(chat("hello")), headers={"x-warmroute-keepalive-s": given})

    assert reply.status == 400
    assert reply.json()["error"]["param"] == "x-warmroute-keepalive-s"
    assert "from 1 to 600" in reply.json()["error"]["message"]


async def test_a_client_that_leaves_meanwhile_leaves_nothing() -> None:
    """Neither a request at the engine nor a lease."""
    slow = Slow()
    async with FakeEngine(slow.answer) as engine, on_stage(engine) as stage:
        async with stage.asking(streamed(chat("hello")), headers=EACH_SECOND) as answer:
            assert await answer.content.readany() == COMMENT
        async with asyncio.timeout(60.0):
            await engine.left.wait()
        await stage.until(lambda: stage.metric("warmroute_inflight_requests", replica="r1") == 0)
