"""Clients that leave, drip, lie, or send what is no request: the router goes on."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from typing import NoReturn

import orjson
import pytest
from aiohttp import web

from router.request import retry
from router.request.results import Read
from tests.faults.fake_engine import FakeEngine, streams
from tests.faults.stage import (
    KEY,
    SECRET,
    SLOW,
    STUCK,
    Engines,
    Json,
    RawClient,
    Reply,
    Stage,
    arm,
    chat,
    num_running,
    on_stage,
    records_in,
    streamed,
    words,
)

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"


async def still_serves(stage: Stage) -> None:
    """Assert that the next client is served."""
    assert (await stage.ask(chat(words(999)))).status == 200


# -- who leaves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_ends_the_engines_work(
    stream: bool,
) -> None:
    """The engine sees its request aborted at once, and no replica is blamed."""
    body = streamed(chat(words(1))) if stream else chat(words(1))
    async with Engines(2, time_model=STUCK) as engines, on_stage(*engines) as stage:
        async with stage.hanging_up(body):
            await stage.until(lambda: any(map(num_running, engines)))
        await stage.until(lambda: not any(map(num_running, engines)))

        assert sum(e.replica.ranks[0].stats.finished["abort"] for e in engines) == 1
        assert stage.metric("warmroute_failovers_total") == 0
        assert stage.metric("warmroute_requests_total", outcome="client_gone") == 1
        assert stage.metric("warmroute_replica_healthy") == 2
        assert '"outcome":"client_gone"' in stage.log


async def test_a_client_that_leaves_between_two_tries_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In metrics, log and records, and the retry that was not sent is not charged."""
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    monkeypatch.setattr(retry, "BACKOFF_S", 30.0)
    file = tmp_path / "decisions.jsonl"
    async with Engines(2) as engines, on_stage(*engines, log__decisions=file) as stage:
        for engine in engines:
            arm(engine, "status", status=500)
        async with stage.hanging_up(chat(words(1))):
            await stage.until(lambda: stage.metric("warmroute_failovers_total") == 1)
        await stage.until(
            lambda: stage.metric("warmroute_requests_total", outcome="client_gone") == 1
        )
        assert '"outcome":"client_gone"' in stage.log
        budget = stage.router.story.steps.retries._budget
        assert budget._retries.at(time.monotonic()) <= 0.0
    [record] = records_in(file)
    assert (record.status, record.outcome, len(record.tries)) == (499, "client_gone", 1)


async def test_a_client_that_leaves_before_its_prompt_is_known_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no failure of the last minute."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        reads = asyncio.Event()

        async def of(read: Read) -> NoReturn:
            reads.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(stage.router.story.steps.prompts, "of", of)
        async with stage.hanging_up(chat(words(1))):
            await reads.wait()
        await stage.until(lambda: "client left before a replica was chosen" in stage.log)
        assert (await stage.admin("/admin/state")).json()["recent"]["failed"] == 0


async def test_a_client_that_leaves_a_stream_ends_the_engines_work() -> None:
    """Within the next piece, not at its end."""
    async with Engines(1, time_model=SLOW) as (engine,), on_stage(engine) as stage:
        async with stage.asking(
            streamed(chat(words(1), max_tokens=2000, ignore_eos=True))
        ) as answer:
            await answer.content.readany()
            assert num_running(engine) == 1
        await stage.until(lambda: num_running(engine) == 0)

        assert engine.replica.ranks[0].stats.finished["abort"] == 1
        await stage.until(
            lambda: stage.metric("warmroute_requests_total", outcome="client_gone") == 1
        )


async def test_a_client_that_leaves_while_the_engine_writes_nothing_ends_its_work() -> None:
    """A stream that pauses does not hide that its client is gone."""
    pauses = streams(b"data: 1\n\n", then="hold")
    async with FakeEngine(pauses) as engine, on_stage(engine) as stage:
        async with stage.asking(streamed(chat("a"))) as answer:
            await answer.content.readany()
        async with asyncio.timeout(60):
            await engine.left.wait()


async def test_a_slow_reader_holds_up_no_other() -> None:
    """Nor does its answer pile up here: the engine is read as fast as the client reads."""
    num_written = 0

    async def writes(request: web.Request) -> web.StreamResponse:
        nonlocal num_written
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(2000):
            await response.write(b"data: " + b"x" * 65_536 + b"\n\n")
            num_written += 1
        return response

    async with FakeEngine(writes) as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            body = orjson.dumps(streamed(chat("a")))
            await client.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await client.head()
            async with stage.asking(None, "/healthz", method="GET") as answer:
                assert answer.status == 200
            before = -1
            while before != num_written:  # until no buffer takes any more
                before = num_written
                await asyncio.sleep(0.1)

        assert num_written < 500  # of 2,000: 32 MiB, in the sockets' buffers


# -- who sends slowly, or too much ---------------------------------------------------------------


async def test_a_dripped_body_is_refused_in_time() -> None:
    """Its deadline is one for the whole body; others are served meanwhile."""
    async with (
        Engines(1) as engines,
        on_stage(*engines, limits__receive_timeout_s=0.3) as stage,
    ):
        async with RawClient.connected(stage.url) as client:
            await client.send(POST + b"Content-Length: 1000\r\n\r\n")

            async def drip() -> None:
                while True:
                    await client.send(b"x")
                    await asyncio.sleep(0.01)

            async with asyncio.TaskGroup() as tg:
                dripping = tg.create_task(drip())
                await still_serves(stage)
                head = await client.head()
                dripping.cancel()

        assert b" 400 " in head
        assert stage.metric("warmroute_refused_total", code="invalid_request_error") == 1
        await still_serves(stage)


async def test_100_mib_are_refused_unread() -> None:
    """By their declared length at once, else when the limit is reached; named in the message."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        reply = await stage.ask(io.BytesIO(bytes(100 << 20)))
        async with RawClient.connected(stage.url) as client:
            await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
            for _ in range(33):
                await client.send(piece)
            chunked = await client.head()

        assert reply.status == 413
        assert "limits.body_bytes" in reply.error["message"]
        assert b" 413 " in chunked
        await still_serves(stage)


async def test_a_header_beyond_the_limit_is_refused() -> None:
    """And nothing of it is logged."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(POST + b"X-Large: " + SECRET.encode() * 4000 + b"\r\n\r\n")
            head = await client.head()
            said = await client.rest()

        assert b" 431 " in head
        assert b"longer than 16384 bytes" in said
        await still_serves(stage)


# -- what is no request --------------------------------------------------------------------------


async def test_garbage_on_the_socket_does_no_harm() -> None:
    """It is refused or hung up on; its bytes are not logged."""
    secret = SECRET.encode()
    garbage = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + secret + bytes(500),  # TLS
        secret + b"\r\n\r\n",
        b"\x00" * 1000 + secret + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + secret,
        b"GET / HTTP/9.9\r\nAuthorization: " + secret + b"\r\n\r\n",
        b"GET /" + secret + b" HTTP/1.1\r\nAuthorization " + secret + b"\r\n\r\n",
        POST + b"Authorization: " + secret + b"\x00\r\n\r\n",
        POST + b"Content-Length: " + secret + b"\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + secret,
        POST + b"Transfer-Encoding: chunked\r\n\r\nZZ" + secret + b"\r\n",
        POST + b"Content-Length: 1000\r\n\r\n" + secret,  # and leaves
        POST + b"Content-Length: -1\r\n\r\n",
    ]
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for data in garbage:
            async with RawClient.connected(stage.url) as client:
                await client.send(data)
                if b"1000" not in data:
                    assert (await client.head()).split(b" ")[1] == b"400", data
        await still_serves(stage)

        assert stage.metric("warmroute_refused_total", code="internal_error") == 0


def nested(depth: int, inner: str = "1") -> bytes:
    return b'{"a":' * depth + inner.encode() + b"}" * depth


async def test_bad_bodies_are_refused_by_field() -> None:
    """Each in the API's shape, with the field's name; none of them reaches an engine."""
    bodies: list[tuple[bytes | Json, str | None]] = [
        (b"", None),
        (b"no json " + SECRET.encode(), None),
        (b'{"model":"tiny"', None),
        (b"\xff\xfe", None),
        (b"null", None),
        (b'["a"]', None),
        (b'"a"', None),
        (nested(5000), None),
        (b"[" * 200_000, None),
        ({"model": "tiny"}, "messages"),
        ({"model": "tiny", "messages": SECRET}, "messages"),
        ({"model": "tiny", "messages": [SECRET]}, "messages[0]"),
        ({"model": "tiny", "messages": [{"content": SECRET}]}, "messages[0].role"),
        (chat("a", tools=[{"function": {}}]), "tools[0].function.name"),
    ]
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for body, param in bodies:
            reply = await stage.ask(body)

            assert reply.status == 400, body
            assert (reply.error["type"], reply.error["code"]) == ("BadRequestError", 400)
            assert reply.error["param"] == param
            assert param is None or f"`{param}`" in reply.error["message"]
        assert engine.received == []


async def test_bad_completions_are_refused_by_field() -> None:
    """The same for prompts."""
    bodies: list[tuple[Json, str]] = [
        ({}, "prompt"),
        ({"prompt": ["a", None]}, "prompt[1]"),
    ]
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for body, param in bodies:
            reply = await stage.ask(body | {"model": "tiny"}, "/v1/completions")

            assert (reply.status, reply.error["param"]) == (400, param), body
        assert engine.received == []


async def test_an_unknown_model_is_a_404_that_names_the_known() -> None:
    """In the API's own shape, Anthropic's too."""
    async with Engines(1, loras=(("sql", "/l"),)) as engines, on_stage(*engines) as stage:
        reply = await stage.ask(chat("a", model="gpt-9"))
        other = await stage.ask({"model": "gpt-9"}, "/v1/messages")

        assert (reply.status, reply.error["param"]) == (404, "model")
        assert (reply.error["type"], reply.error["code"]) == ("NotFoundError", 404)
        assert "tiny, sql" in reply.error["message"]
        assert other.json()["error"]["type"] == "not_found_error"


async def test_a_prompt_the_template_refuses_is_a_400() -> None:
    """The engine says so as long as our template is not proven to be its own, then we do."""
    template = {"continue_final_message": True, "add_generation_prompt": True}
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = await stage.ask(chat("a", **template))
        assert (await stage.ask(chat(words(1)))).status == 200
        then = await stage.ask(chat("a", **template))

        assert (first.status, then.status) == (400, 400)
        assert stage.metric("warmroute_requests_total", outcome="client_error") == 1
        assert stage.metric("warmroute_refused_total", code="chat_template_error") == 1
        assert then.error["param"] == "continue_final_message"
        assert stage.metric("warmroute_replica_healthy") == 2


def deep_bodies(depth: int) -> dict[str, bytes]:
    """Put a deep value wherever a chat request may hold one."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "@"}}
    calls = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    value = nested(depth, f'"{SECRET}"')
    bodies: dict[str, Json] = {
        "tools": chat("a", tools=[{"type": "function", "function": {"name": "f", "x": "@"}}]),
        "parameters": chat("a", tools=[{"function": {"name": "f", "parameters": "@"}}]),
        "arguments": chat("a") | calls,
        "kwargs": chat("a", chat_template_kwargs={"x": "@"}),
        "documents": chat("a", documents=[{"x": "@"}]),
        "content": chat("a") | {"messages": [{"role": "user", "content": [{"text": "@"}]}]},
        "unknown": chat("a", x="@"),
        "metadata": chat("a", metadata="@"),
    }
    found = {kind: orjson.dumps(body).replace(b'"@"', value) for kind, body in bodies.items()}
    in_text = orjson.dumps(value.decode())
    return found | {"in text": orjson.dumps(chat("a") | calls).replace(b'"@"', in_text)}


async def test_deep_values_are_no_internal_error() -> None:
    """As deep as the parser lets them be (1,024): answered by the engine or refused."""
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for depth in (100, 1000):
            for kind, body in deep_bodies(depth).items():
                reply = await stage.ask(body)
                assert reply.status in (200, 400), (kind, depth, reply.body)

        assert stage.metric("warmroute_refused_total", code="internal_error") == 0


async def test_a_thousand_refusals_leave_nothing() -> None:
    """Connections and memory are given back; the log stays readable."""
    async with Engines(1) as engines, on_stage(*engines) as stage:

        async def ask() -> list[Reply]:
            return [await stage.ask(b"no json", headers={"Authorization": KEY}) for _ in range(50)]

        async with asyncio.TaskGroup() as tg:
            asked = [tg.create_task(ask()) for _ in range(6)]

        assert {reply.status for task in asked for reply in task.result()} == {400}
        assert stage.metric("warmroute_refused_total", code="invalid_request_error") == 300
        await still_serves(stage)
