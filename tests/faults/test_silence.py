"""Silence of an engine: what is waited for, what is left, and what a stream's client gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import orjson
import pytest
from aiohttp import web

from loadtest.engine_model.time_model import TimeModel
from tests.faults.fake_engine import FakeEngine, Handler
from tests.faults.stage import (
    ONE_AT_A_TIME,
    SLOW,
    STUCK,
    Engines,
    Stage,
    arm,
    chat,
    num_running,
    on_stage,
    records_in,
    streamed,
    words,
)

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
COMMENT = b": keep-alive\n\n"  # vLLM 0.32 entrypoints/serve/utils/sse_keep_alive.py
OURS = b": no token yet\n\n"
WAITS = ("for=window;before=0", "for=window;before=1")
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
BODIES = {
    CHAT: chat(words(1)),
    COMPLETIONS: {"model": "tiny", "prompt": words(1), "max_tokens": 4},
    MESSAGES: chat(words(1)),
    RESPONSES: {"model": "tiny", "input": words(1), "max_output_tokens": 4},
}

Write = Callable[[bytes], Awaitable[None]]
Play = Callable[[Write], Awaitable[None]]


def streaming(play: Play) -> Handler:
    """Answer with a stream that `play` writes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await play(response.write)
        return response

    return answer


@asynccontextmanager
async def playing(play: Play, **settings: Any) -> AsyncIterator[tuple[FakeEngine, Stage]]:
    """Run a router in front of an engine whose streams `play` writes."""
    async with FakeEngine(streaming(play)) as engine, on_stage(engine, **settings) as stage:
        yield engine, stage


@asynccontextmanager
async def playing_first(play: Play, **settings: Any) -> AsyncIterator[tuple[FakeEngine, Stage]]:
    """Run one in front of such an engine and of one that answers at once, in turn."""
    async with FakeEngine(streaming(play)) as a, FakeEngine(streaming(answers)) as b:
        async with on_stage(a, b, policy__name="round_robin", **settings) as stage:
            yield a, stage


async def for_ever(write: Write, comment: bytes = COMMENT) -> None:
    """Write comments and nothing else."""
    while True:
        await write(comment)
        await asyncio.sleep(0.02)


async def answers(write: Write) -> None:
    await write(ROLE + TOKEN + LAST + DONE)


def figures(num_requests: int, num_tokens: int) -> tuple[int, str]:
    """Write `/metrics`."""
    text = f'vllm:num_requests_running{{engine="0"}} {num_requests}\n'
    return 200, text + f'vllm:generation_tokens_total{{engine="0"}} {num_tokens}\n'


async def working(engine: FakeEngine, num_requests: int = 1) -> None:
    """Let an engine's tokens grow."""
    num_tokens = 0
    while True:
        num_tokens += 7
        engine.pages["/metrics"] = figures(num_requests, num_tokens)
        await asyncio.sleep(0.02)


# -- what comes before the first token -----------------------------------------------------------


COMMENTS = [
    COMMENT,
    b": keep-alive\r\n\r\n",
    b":\r\r",
    b"\n",
    b"data:\n\n",
    b"data: \r\n\r\n",
    b"id: 1\n\n",
    b"retry: 1000\n\n",
    b'event: ping\ndata: {"type": "ping"}\n\n',
    ": noch da — bitte warten\n\n".encode(),
]


@pytest.mark.parametrize("step", [0, 1, 5])
async def test_comments_are_no_first_token(step: int, tmp_path: Path) -> None:
    """The time of the first token is that of an event, however comments are written and cut."""
    written = go_on = asyncio.Event()
    comment = b""

    async def play(write: Write) -> None:
        comments = 4 * comment
        for start in range(0, len(comments), step or len(comments)):
            await write(comments[start : start + (step or len(comments))])
            await asyncio.sleep(0)
        written.set()
        await go_on.wait()
        await answers(write)

    file = tmp_path / "decisions.jsonl"
    async with (
        playing(play, log__decisions=file) as (_, stage),
        asyncio.TaskGroup() as tg,
    ):
        for comment in COMMENTS:
            written, go_on = asyncio.Event(), asyncio.Event()
            asked = tg.create_task(stage.ask(streamed(chat(words(1)))))
            await written.wait()
            await asyncio.sleep(0.05)  # the first token must not be counted before its end

            assert stage.metric("warmroute_inflight_uncached_tokens") > 0
            go_on.set()
            reply = await asked
            assert reply.body == 4 * comment + ROLE + TOKEN + LAST + DONE
    records = records_in(file)
    assert len(records) == len(COMMENTS)
    for record in records:
        assert record.ttft_ms is not None
        assert record.ttft_ms >= 45


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_an_engine_that_only_writes_comments_is_left(path: str) -> None:
    """After the time to the first byte another replica answers."""
    async with playing_first(for_ever, forward__first_byte_timeout_s=0.5) as (a, stage):
        replies = [await stage.ask(BODIES[path] | {"stream": True}, path) for _ in range(2)]

        assert [reply.status for reply in replies] == [200, 200]
        assert all(TOKEN in reply.body for reply in replies)
        assert len(a.received) >= 1
        assert stage.metric("warmroute_failovers_total", reason="upstream_timeout") == len(
            a.received
        )


CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'


@pytest.mark.parametrize("has_figures", [False, True])
@pytest.mark.parametrize(("path", "first"), [(CHAT, ROLE), (RESPONSES, CREATED)])
async def test_comments_behind_a_beginning_are_no_first_token(
    path: str, first: bytes, has_figures: bool
) -> None:
    """A role, or that a response was created, says as little as they do."""

    async def begins(write: Write) -> None:
        await write(first)
        await for_ever(write)

    async with playing_first(begins, forward__first_byte_timeout_s=1.0) as (a, stage):
        if has_figures:
            a.pages["/metrics"] = figures(1, 7)
        replies = [await stage.ask(BODIES[path] | {"stream": True}, path) for _ in range(2)]

        assert all(reply.body == ROLE + TOKEN + LAST + DONE for reply in replies)
        moved = stage.metric("warmroute_failovers_total", reason="upstream_timeout")
        assert moved == len(a.received) >= 1


async def test_a_beginning_of_an_engine_that_hangs_is_kept() -> None:
    """Its figures stand still, and it writes nothing more."""

    async def begins(write: Write) -> None:
        await write(ROLE)
        await asyncio.Event().wait()

    soon = {"forward__first_byte_timeout_s": 1.0, "health__interval_s": 0.05}
    async with (
        FakeEngine(streaming(begins), metrics=figures(1, 7)) as a,
        FakeEngine(streaming(answers), metrics=figures(1, 7)) as b,
        on_stage(a, b, policy__name="round_robin", **soon) as stage,
    ):
        fleet = stage.router.fleet
        await stage.until(lambda: all(each.engine_load for each in fleet.load.status(monotonic())))
        for _ in range(2):
            reply = await stage.ask(streamed(chat(words(1))))
            assert reply.body == ROLE + TOKEN + LAST + DONE


async def test_comments_behind_a_beginning_are_passed_on_by_an_engine_at_work() -> None:
    """A tool call that a parser holds back may take minutes."""
    end = asyncio.Event()

    async def works(write: Write) -> None:
        await write(ROLE)
        while not end.is_set():
            await write(COMMENT)
            await asyncio.sleep(0.02)
        await write(TOKEN + LAST + DONE)

    async with (
        playing(works, health__load_interval_s=0.1, health__interval_s=0.1) as (engine, stage),
        asyncio.TaskGroup() as tg,
    ):
        working_on = tg.create_task(working(engine))
        async with stage.asking(streamed(chat(words(1)))) as answer:
            assert (await answer.content.readany()).startswith(ROLE + COMMENT)
            end.set()
            await answer.read()
        working_on.cancel()


async def test_an_engine_that_dies_after_comments_is_left() -> None:
    """Comments end no failover; nor does an error event behind them."""

    async def dies(write: Write) -> None:
        await write(COMMENT)
        await asyncio.sleep(0.05)
        raise ConnectionResetError

    async def fails(write: Write) -> None:
        await write(COMMENT)
        await asyncio.sleep(0.05)
        await write(ROLE + b'data: {"error":{"message":"m","type":"x","code":500}}\n\n' + DONE)

    for play in (dies, fails):
        async with playing_first(play) as (_, stage):
            for _ in range(2):
                reply = await stage.ask(streamed(chat(words(1))))
                assert reply.body == ROLE + TOKEN + LAST + DONE


async def test_no_more_comments_are_held_back_than_a_few_kilobytes() -> None:
    """An engine that is at work may write them for long."""

    async def play(write: Write) -> None:
        for _ in range(400):
            await write(20 * COMMENT)
            await asyncio.sleep(0)
        await write(COMMENT[:5])
        await asyncio.sleep(0.05)
        await write(COMMENT[5:])
        await answers(write)

    async with playing(play) as (_, stage):
        reply = await stage.ask(streamed(chat(words(1))))
    before = reply.body.removesuffix(ROLE + TOKEN + LAST + DONE)

    assert before == len(before) // len(COMMENT) * COMMENT
    assert 0 < len(before) < 400 * 20 * len(COMMENT) // 2


async def test_comments_behind_the_first_token_are_the_clients() -> None:
    """Byte for byte, as are those before it."""
    rest = [TOKEN, COMMENT, TOKEN, b": a\r\n\r\n", LAST + DONE]

    async def play(write: Write) -> None:
        await write(COMMENT)
        for piece in [ROLE, *rest]:
            await write(piece)
            await asyncio.sleep(0.02)

    async with playing(play) as (_, stage):
        reply = await stage.ask(streamed(chat(words(1))))

    assert reply.body == COMMENT + ROLE + b"".join(rest)


async def test_white_space_before_a_body_is_no_first_byte() -> None:
    """An engine that writes nothing else is left; of an answer it is a part."""

    async def play(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(3):
            await response.write(b" \n")
            await asyncio.sleep(0.02)
        if request.headers.get("x-more"):
            await response.write(b'{"choices":[]}')
            return response
        while True:
            await response.write(b"\n")
            await asyncio.sleep(0.02)

    async with (
        FakeEngine(play) as engine,
        on_stage(engine, forward__first_byte_timeout_s=0.5) as stage,
    ):
        whole = await stage.ask(chat(words(1)), headers={"x-more": "1"})
        left = await stage.ask(chat(words(1)))

    assert whole.body == 3 * b" \n" + b'{"choices":[]}'
    assert left.status == 504


# -- at work, or not -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [ROLE, ROLE + TOKEN])
async def test_a_silent_tool_call_is_waited_for(first: bytes) -> None:
    """Its tokens grow: the stream is not cut, and the replica not blamed."""

    async def play(write: Write) -> None:
        await write(first)
        await asyncio.sleep(0.9)  # more than twice the deadline
        await write(TOKEN + LAST + DONE)

    async with (
        playing(play, forward__idle_timeout_s=0.4) as (engine, stage),
        asyncio.TaskGroup() as tg,
    ):
        works = tg.create_task(working(engine))
        reply = await stage.ask(streamed(chat(words(1))))
        works.cancel()

        assert reply.body == first + TOKEN + LAST + DONE
        assert stage.metric("warmroute_requests_total", outcome="ok") == 1


@pytest.mark.parametrize("comment", [b"", COMMENT])
async def test_a_stream_of_an_engine_that_hangs_is_cut(comment: bytes) -> None:
    """Comments are no sign of work, nor are requests that it says are running."""

    async def play(write: Write) -> None:
        await write(ROLE + TOKEN)
        if comment:
            await for_ever(write, comment)
        await asyncio.Event().wait()

    async with playing(play, forward__idle_timeout_s=0.4) as (engine, stage):
        engine.pages["/metrics"] = figures(1, 7)
        reply = await stage.ask(streamed(chat(words(1))))

        assert b"sent nothing inside its answer" in reply.body
        assert stage.metric("warmroute_requests_total", outcome="replica_failed") == 1


async def test_a_whole_answer_that_takes_long_is_generated_once() -> None:
    """Its first byte cannot come before its last token."""
    model = TimeModel(base_ms=30.0)
    async with (
        Engines(2, time_model=model) as engines,
        on_stage(*engines, forward__first_byte_timeout_s=0.4) as stage,
    ):
        reply = await stage.ask(chat(words(1), max_tokens=40, ignore_eos=True))

        assert reply.status == 200
        assert reply.usage["completion_tokens"] == 40
        assert stage.metric("warmroute_failovers_total") == 0
        assert stage.metric("warmroute_replica_healthy") == 2


async def test_a_whole_answer_of_an_idle_engine_moves_on() -> None:
    """It has lost the request: it shows fewer than were sent, though it works for others."""
    async with (
        Engines(2, time_model=SLOW) as engines,
        on_stage(*engines, policy__name="round_robin", forward__first_byte_timeout_s=0.6) as stage,
        asyncio.TaskGroup() as tg,
    ):
        for engine in engines:
            arm(engine, "hang", count=1, text="lost")
        others = [
            tg.create_task(stage.ask(streamed(chat(words(n), max_tokens=90, ignore_eos=True))))
            for n in range(2)
        ]
        await stage.until(lambda: all(map(num_running, engines)))
        lost = await stage.ask(chat(words(3) + " lost"))

        assert (lost.status, lost.error["type"]) == (504, "BadGatewayError")
        assert all([(await other).status == 200 for other in others])


async def test_an_engine_that_stands_still_is_left() -> None:
    """Its requests run for ever, by its own word."""
    async with (
        Engines(1, time_model=STUCK) as (engine,),
        on_stage(engine, forward__first_byte_timeout_s=0.4) as stage,
    ):
        reply = await stage.ask(chat(words(1)))

        assert reply.status == 504
        await stage.until(lambda: num_running(engine) == 0)


async def test_without_figures_other_answers_show_that_it_works() -> None:
    """An engine that has no metrics, or none that answer."""
    more = asyncio.Event()

    async def play(request: web.Request) -> web.StreamResponse:
        if b"whole" in await request.read():
            await asyncio.sleep(1.1)  # more than twice the deadline
            more.set()
            return web.json_response({"choices": []})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE)
        while not more.is_set():
            await response.write(TOKEN)
            await asyncio.sleep(0.02)
        await response.write(LAST + DONE)
        return response

    async with (
        FakeEngine(play) as engine,
        on_stage(engine, forward__first_byte_timeout_s=0.5) as stage,
        asyncio.TaskGroup() as tg,
    ):
        other = tg.create_task(stage.ask(streamed(chat(words(1)))))
        await engine.reached.wait()
        reply = await stage.ask(chat(words(2) + " whole"))

        assert (reply.status, (await other).status) == (200, 200)


# -- probes --------------------------------------------------------------------------------------

QUICK = {"health__interval_s": 0.05, "health__timeout_s": 0.1}


async def test_a_replica_that_writes_is_not_down_though_its_probes_hang() -> None:
    """Bytes of answers are signs of life; those who wait for a first token there go on waiting."""
    async with (
        Engines(2, time_model=SLOW) as engines,
        on_stage(*engines, policy__name="round_robin", **QUICK) as stage,
        asyncio.TaskGroup() as tg,
    ):
        for engine in engines:
            arm(engine, "hang_probes")
        asked = [
            tg.create_task(stage.ask(streamed(chat(words(n), max_tokens=80, ignore_eos=True))))
            for n in range(4)
        ]
        replies = [await each for each in asked]

        assert all(reply.events[-1] == "[DONE]" for reply in replies)
        assert "replica down" not in stage.log
        assert stage.metric("warmroute_failovers_total") == 0
        await stage.until(lambda: stage.log.count("replica down") == 4)  # each is logged twice


async def test_a_replica_whose_figures_move_is_not_down_though_its_probes_hang() -> None:
    """Whole answers show nothing until they are whole: they are awaited, and sent once."""

    async def whole(_: web.Request) -> web.Response:
        await asyncio.sleep(1.0)  # ten times the deadline of a probe
        return web.json_response({"choices": []})

    async with (
        FakeEngine(whole) as a,
        FakeEngine(whole) as b,
        on_stage(a, b, policy__name="round_robin", **QUICK) as stage,
        asyncio.TaskGroup() as tg,
    ):
        works = tg.create_task(working(a, num_requests=3))
        asked = [tg.create_task(stage.ask(chat(words(n)))) for n in range(6)]
        await stage.until(lambda: len(a.received) == len(b.received) == 3)
        a.hanging.add("/health")
        assert [(await each).status for each in asked] == [200] * 6
        works.cancel()

        assert len(a.received) == len(b.received) == 3
        assert "replica down" not in stage.log


async def test_comments_do_not_make_up_for_probes_that_hang() -> None:
    """Whoever writes them, nothing shows that an engine computes."""
    async with (
        playing_first(for_ever, **QUICK) as (a, stage),
        asyncio.TaskGroup() as tg,
    ):
        asked = [tg.create_task(stage.ask(streamed(chat(words(n))))) for n in range(2)]
        await stage.until(lambda: a.received)
        a.hanging |= {"/health", "/metrics"}
        for each in asked:
            assert (await each).body == ROLE + TOKEN + LAST + DONE
        assert stage.log.count("replica down") == 2  # each is logged twice


async def test_a_probe_that_is_answered_badly_counts_whatever_is_written() -> None:
    """A status is the engine's own word."""
    end = asyncio.Event()

    async def play(write: Write) -> None:
        await write(ROLE)
        while not end.is_set():
            await write(TOKEN)
            await asyncio.sleep(0.01)
        await write(LAST + DONE)

    async with (
        playing(play, **QUICK) as (engine, stage),
        stage.asking(streamed(chat(words(1)))) as answer,
    ):
        await answer.content.readany()
        engine.pages["/health"] = (500, "")
        await stage.until(lambda: "replica down" in stage.log)
        end.set()
        await answer.read()


# -- streams that begin early --------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_stream_begins_early_and_fails_over_all_the_same(path: str) -> None:
    """Also after the engine has said that it begins."""
    created = b'event: response.created\ndata: {"type":"response.created"}\n\n'

    async def dies(write: Write) -> None:
        if path == RESPONSES:
            await write(created)
        await asyncio.sleep(0.5)
        raise ConnectionResetError

    async with playing_first(dies, forward__early_stream_s=0.1) as (_, stage):
        replies = [await stage.ask(BODIES[path] | {"stream": True}, path) for _ in range(2)]

        early = [reply for reply in replies if reply.body.startswith(OURS)]
        assert len(early) == stage.metric("warmroute_failovers_total") >= 1
        for reply in replies:
            assert reply.status == 200
            assert reply.body.replace(OURS, b"") == ROLE + TOKEN + LAST + DONE
        assert "x-warmroute-replica" not in early[0].headers


async def test_engines_comments_do_not_keep_ours_back() -> None:
    """The engine's come on a connection of ours; its clients' is as silent without ours."""
    tokens = asyncio.Event()

    async def play(write: Write) -> None:
        while not tokens.is_set():
            await write(COMMENT)
            await asyncio.sleep(0.02)
        await answers(write)

    async with (
        playing(play, forward__early_stream_s=0.1) as (_, stage),
        stage.asking(streamed(chat(words(1)))) as answer,
    ):
        assert await answer.content.readany() == OURS
        assert await answer.content.readany() == OURS
        tokens.set()
        rest = await answer.content.read()
        assert rest.replace(OURS, b"").replace(COMMENT, b"") == ROLE + TOKEN + LAST + DONE


async def test_a_silent_span_of_a_stream_has_comments() -> None:
    """Between events, and never inside one."""

    async def play(write: Write) -> None:
        await write(ROLE + TOKEN)
        await asyncio.sleep(0.5)
        await write(TOKEN[:30])
        await asyncio.sleep(0.5)
        await write(TOKEN[30:] + LAST + DONE)

    fields = {"tools": [{"type": "function", "function": {"name": "f"}}]}  # passed on unread
    async with playing(play, forward__early_stream_s=0.1) as (_, stage):
        reply = await stage.ask(streamed(chat(words(1), **fields)))

    assert OURS in reply.body
    assert reply.body.replace(OURS, b"") == ROLE + TOKEN + TOKEN + LAST + DONE
    assert all(
        event.startswith((b"data: {", b"data: [", b": no"))
        for event in reply.body.removesuffix(b"\n\n").split(b"\n\n")
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
async def test_an_error_after_an_early_start_is_an_event(path: str) -> None:
    """In the API's own shape."""

    async def dies(write: Write) -> None:
        await asyncio.sleep(0.4)
        raise ConnectionResetError

    async with playing(dies, forward__early_stream_s=0.1) as (_, stage):
        reply = await stage.ask(BODIES[path] | {"stream": True}, path)
        last = reply.body.replace(OURS, b"").replace(PING, b"").strip().splitlines()

        assert reply.status == 200
        assert reply.body.startswith(PING if path == MESSAGES else OURS)
        assert orjson.loads(last[-1].removeprefix(b"data: "))["error"]["message"]
        assert (last[0] == b"event: error") == (path in (MESSAGES, RESPONSES))


async def test_an_answer_that_is_no_stream_does_not_begin_early() -> None:
    """Its status is not known before it is."""

    async def fails(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.4)
        return web.json_response({"error": {"message": "m", "code": 400}}, status=400)

    async with (
        FakeEngine(fails) as engine,
        on_stage(engine, forward__early_stream_s=0.1) as stage,
    ):
        reply = await stage.ask(chat(words(1)))

    assert reply.status == 400
    assert OURS not in reply.body


async def test_a_stream_that_waits_in_the_queue_begins_early() -> None:
    """Before it is known where it goes."""
    async with (
        Engines(1, time_model=SLOW) as (engine,),
        on_stage(engine, queue__mode="on", forward__early_stream_s=0.1) as stage,
        asyncio.TaskGroup() as tg,
    ):
        arm(engine, "slow", factor=20.0)
        bodies = [streamed(chat(words(n))) for n in range(3)]
        replies = [await task for task in [tg.create_task(stage.ask(b)) for b in bodies]]

        assert all(reply.body.startswith(OURS) for reply in replies)
        assert all(reply.events[-1] == "[DONE]" for reply in replies)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
async def test_only_a_stream_that_waits_begins_early_by_default(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent engine's stream that did not wait begins with its first token, with all headers."""
    monkeypatch.setattr("router.request.queue.KEEPALIVE_S", 0.1)
    begin, arrived = asyncio.Event(), asyncio.Event()

    async def play(write: Write) -> None:
        arrived.set()
        await begin.wait()
        await answers(write)

    body = BODIES[path] | {"stream": True}
    async with (
        playing(play, queue__mode="on", queue_rules=ONE_AT_A_TIME) as (engine, stage),
        asyncio.TaskGroup() as tg,
    ):
        first = tg.create_task(stage.ask(body, path))
        await arrived.wait()
        whole = tg.create_task(stage.ask(BODIES[path], path))
        async with stage.asking(body, path) as waiting:
            keep_alive = PING if path == MESSAGES else OURS
            assert await waiting.content.readexactly(2 * len(keep_alive)) == 2 * keep_alive
            assert len(engine.received) == 1
            begin.set()
            rest = await waiting.content.read()

        assert (await whole).status == 200
        assert (await whole).headers["x-warmroute-replica"] == "r1"
        assert (await first).headers["x-warmroute-replica"] == "r1"
        for silent in (await first, await whole):
            assert keep_alive not in silent.body
        assert rest.replace(keep_alive, b"") == (await first).body
        assert waiting.status == 200
        named = {name for name in waiting.headers if name.startswith("x-warmroute-")}
        assert named == {"x-warmroute-request-id", "x-warmroute-waits"}
        assert waiting.headers["x-warmroute-waits"] in WAITS


async def test_streams_that_wait_begin_late_if_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`forward.early_stream_s: 0`."""
    monkeypatch.setattr("router.request.queue.KEEPALIVE_S", 0.05)
    off: Any = {"queue_rules": ONE_AT_A_TIME, "forward__early_stream_s": 0}
    async with (
        Engines(1, time_model=SLOW) as (engine,),
        on_stage(engine, queue__mode="on", **off) as stage,
        asyncio.TaskGroup() as tg,
    ):
        arm(engine, "slow", factor=20.0)
        bodies = [streamed(chat(words(n))) for n in range(3)]
        replies = [await task for task in [tg.create_task(stage.ask(b)) for b in bodies]]

        assert any(float(reply.headers["x-warmroute-waited-ms"]) > 100 for reply in replies)
        assert all(OURS not in reply.body for reply in replies)
