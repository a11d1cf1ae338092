"""What a collector gets of requests, through a whole router. Page: docs/operate/observe.md."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp import web

from router.observers.tracing.observer import Tracing
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import (
    ONE_AT_A_TIME,
    SECRET,
    SESSION,
    STUCK,
    Engines,
    arm,
    chat,
    holder,
    num_running,
    on_stage,
    streamed,
    words,
)
from tests.observers.tracing.receiver import Received, Receiver, receiving

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
JOINED = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01", "tracestate": "vendor=1"}


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def computed(span: Received) -> dict[str, int]:
    """The tokens that were computed, by cause."""
    prefix = "warmroute.computed."
    return {k.removeprefix(prefix): v for k, v in span.attributes.items() if k.startswith(prefix)}


async def test_a_request_is_a_server_span_with_a_client_span_below(collector: Receiver) -> None:
    async with Engines(1) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            reply = await stage.ask(streamed(chat(words(1))))

    server, (client,) = collector.server, collector.of("client")
    assert (server.name, client.name) == ("POST /v1/chat/completions", "chat tiny")
    assert server.parent_id == ""
    assert (client.trace_id, client.parent_id) == (server.trace_id, server.span_id)
    assert server.begun_ns <= client.begun_ns < client.ended_ns <= server.ended_ns
    assert server.event_names == ["decided", "first_token"]
    assert server.begun_ns < server.event("warmroute.decided").at_ns <= client.begun_ns
    assert client.begun_ns < server.event("warmroute.first_token").at_ns < client.ended_ns
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["warmroute.request_id"] == reply.headers["x-warmroute-request-id"]
    assert server.attributes["warmroute.replica"] == reply.replica
    assert client.attributes["gen_ai.usage.input_tokens"] == reply.usage["prompt_tokens"]
    assert client.attributes["gen_ai.usage.output_tokens"] == 4
    assert client.attributes["gen_ai.request.stream"] is True
    assert 0 < client.attributes["gen_ai.response.time_to_first_chunk"] < 60
    assert f":{client.attributes['server.port']}" in engines[0].url
    assert not server.is_error
    assert not client.is_error


async def test_causes_and_cached_tokens_are_attributes(collector: Receiver) -> None:
    """The causes add up to what the engine says that it computed."""
    async with Engines(1) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            await stage.ask(streamed(chat(words(1), "yes", words(2))))
            await stage.settled(*engines)
            second = await stage.ask(streamed(chat(words(1), "yes", words(9))))

    server, client = collector.of("server")[1], collector.of("client")[1]
    assert second.reported > 0
    assert server.attributes["warmroute.cached_tokens"] == second.reported
    assert client.attributes["gen_ai.usage.cache_read.input_tokens"] == second.reported
    assert sum(computed(server).values()) == second.usage["prompt_tokens"] - second.reported
    assert computed(server)["changed"] > 0
    assert server.attributes["warmroute.changed.part"] == "message"


async def test_usage_is_what_the_engine_reports(collector: Receiver) -> None:
    """Not what the router counts; the log line has the trace's id."""

    async def answer(_: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 77, "completion_tokens": 3}
        return web.json_response({"object": "chat.completion", "choices": [], "usage": usage})

    async with FakeEngine(answer) as engine:
        async with on_stage(engine, tracing__endpoint=collector.url) as stage:
            await stage.ask(chat(words(1)))
            log = stage.log

    (client,) = collector.of("client")
    assert client.attributes["gen_ai.usage.input_tokens"] == 77
    assert client.attributes["gen_ai.usage.output_tokens"] == 3
    assert "gen_ai.usage.cache_read.input_tokens" not in client.attributes
    assert collector.server.trace_id in log


async def test_no_span_has_what_a_client_wrote(collector: Receiver) -> None:
    """No prompt, no key, no session id: the stage puts a secret into each."""
    headers = {"X-Session-ID": SESSION, "baggage": f"a={SECRET}", "tracestate": f"a={SECRET}"}
    async with Engines(1) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            await stage.ask(streamed(chat(words(1))), headers=JOINED | headers)
            await stage.ask(None, f"/v1/responses/resp_{SECRET}", method="GET")
            await stage.ask(chat(words(2)), f"/{SECRET}/v1/chat/completions?key={SECRET}")

    assert len(collector.of("server")) == 3
    assert SECRET.encode() not in b"".join(collector.raw)
    assert "warmroute.session" in collector.spans[0].attributes


async def test_a_client_trace_goes_on_to_the_engine(collector: Receiver) -> None:
    """The engine's parent is the CLIENT span; the client's own state reaches it."""
    async with FakeEngine() as engine:
        async with on_stage(engine, tracing__endpoint=collector.url) as stage:
            await stage.ask(chat(words(1)), headers=JOINED)
        (received,) = engine.received

    server, (client,) = collector.server, collector.of("client")
    assert (server.trace_id, server.parent_id) == (TRACE_ID, CLIENT_SPAN)
    assert received.headers["traceparent"] == f"00-{TRACE_ID}-{client.span_id}-01"
    assert received.headers.getall("tracestate") == ["vendor=1"]


@pytest.mark.parametrize(
    "header",
    [f"00-{TRACE_ID}-{'0' * 16}-01", f"ff-{TRACE_ID}-{CLIENT_SPAN}-01", "garbage", "00-" * 200],
)
async def test_a_traceparent_that_is_none_begins_a_trace(collector: Receiver, header: str) -> None:
    async with FakeEngine() as engine:
        async with on_stage(engine, tracing__endpoint=collector.url) as stage:
            await stage.ask(chat(words(1)), headers={**JOINED, "traceparent": header})
        (received,) = engine.received

    assert collector.server.parent_id == ""
    assert collector.server.trace_id != TRACE_ID
    assert collector.server.trace_id in received.headers["traceparent"]
    assert "tracestate" not in received.headers


async def test_clients_need_not_be_joined(collector: Receiver) -> None:
    settings = {"tracing__endpoint": collector.url, "tracing__join_clients": False}
    async with FakeEngine() as engine, on_stage(engine, **settings) as stage:
        await stage.ask(chat(words(1)), headers=JOINED)

    assert collector.server.trace_id != TRACE_ID
    assert collector.server.parent_id == ""


async def test_a_client_that_is_not_sampled_is_not_traced(collector: Receiver) -> None:
    """Its headers pass as they are, so that the engine does not trace it either."""
    unsampled = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-00"}
    async with FakeEngine() as engine:
        async with on_stage(engine, tracing__endpoint=collector.url) as stage:
            await stage.ask(chat(words(1)), headers=unsampled)
        (received,) = engine.received

    assert received.headers["traceparent"] == unsampled["traceparent"]
    assert collector.spans == []


async def test_of_a_trace_that_is_not_sampled_the_engine_is_told(collector: Receiver) -> None:
    settings = {"tracing__endpoint": collector.url, "tracing__sample_ratio": 0.0}
    async with FakeEngine() as engine:
        async with on_stage(engine, **settings) as stage:
            await stage.ask(chat(words(1)))
            await stage.ask(chat(words(1)), headers=JOINED)
        own, joined = engine.received

    assert int(own.headers["traceparent"][-2:], 16) & 1 == 0
    assert int(joined.headers["traceparent"][-2:], 16) & 1 == 1
    assert collector.server.trace_id == TRACE_ID


async def test_without_an_endpoint_headers_pass_untouched() -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        await stage.ask(chat(words(1)), headers=JOINED)
        await stage.ask(chat(words(2)))
        first, second = engine.received

        assert first.headers["traceparent"] == JOINED["traceparent"]
        assert first.headers["tracestate"] == "vendor=1"
        assert "traceparent" not in second.headers
        assert stage.router.observer(Tracing) is None


async def test_each_try_is_a_client_span(collector: Receiver) -> None:
    """The failed one says how; only the other one has usage."""
    async with Engines(2) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            first = await stage.ask(streamed(chat(words(1))))
            await stage.settled(*engines)
            arm(holder(stage, first, engines), "status", status=500)
            again = await stage.ask(streamed(chat(words(1))))

    assert (again.status, again.replica != first.replica) == (200, True)
    server = collector.of("server")[1]
    failed, last = [span for span in collector.of("client") if span.trace_id == server.trace_id]
    assert failed.is_error
    assert failed.attributes["error.type"] == "status_500"
    assert failed.attributes["warmroute.replica"] == first.replica
    assert "gen_ai.usage.input_tokens" not in failed.attributes
    assert last.attributes["gen_ai.usage.input_tokens"] > 0
    assert {failed.parent_id, last.parent_id} == {server.span_id}
    assert failed.ended_ns <= last.begun_ns
    assert server.event_names == ["decided", "decided", "first_token"]
    assert not server.is_error
    assert not last.is_error


async def test_an_answer_that_breaks_off_is_an_error(collector: Receiver) -> None:
    """Its status was 200."""
    async with Engines(1) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            arm(engines[0], "die_after", after_tokens=2)
            await stage.ask(streamed(chat(words(1))))

    server, (client,) = collector.server, collector.of("client")
    assert server.attributes["http.response.status_code"] == 200
    assert server.is_error
    assert client.is_error
    assert client.attributes["error.type"] == "replica_failed"


async def test_a_refused_request_has_its_error(collector: Receiver) -> None:
    """A path that a client has made up names no span."""
    async with Engines(1) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            await stage.ask(chat(words(1)) | {"model": "other"})
            await stage.ask(chat(words(1)), "/made/up")

    unknown_model, unknown_route = collector.of("server")
    assert unknown_model.attributes["http.response.status_code"] == 404
    assert unknown_model.attributes["error.type"] == "model_not_found"
    assert not unknown_model.is_error
    assert unknown_route.name == "POST"
    assert "http.route" not in unknown_route.attributes
    assert collector.of("client") == []


async def test_the_routers_own_pages_are_not_traced(collector: Receiver) -> None:
    async with Engines(1) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
                assert (await stage.ask(path=path, method="GET")).status == 200

    assert collector.spans == []


async def test_a_request_that_waits_says_for_what(collector: Receiver) -> None:
    gate = asyncio.Event()

    async def answer(_: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.json_response({"object": "chat.completion", "choices": []})

    settings = {"tracing__endpoint": collector.url, "queue__mode": "on", "health__interval_s": 60.0}
    async with (
        FakeEngine(answer) as engine,
        on_stage(engine, queue_rules=ONE_AT_A_TIME, **settings) as stage,
    ):
        async with asyncio.TaskGroup() as tg:
            tg.create_task(stage.ask(streamed(chat(words(1)))))
            await stage.until(lambda: engine.received)
            tg.create_task(stage.ask(streamed(chat(words(2)))))
            await stage.until(lambda: stage.metric("warmroute_waiting_requests") == 1)
            await asyncio.sleep(0.05)
            gate.set()

    first, second = collector.of("server")
    assert "queued" not in first.event_names
    assert second.event_names[:2] == ["queued", "decided"]
    assert second.event("warmroute.queued").attributes == {"warmroute.waited_for": "window"}
    waited_ns = second.event("warmroute.decided").at_ns - second.event("warmroute.queued").at_ns
    assert waited_ns / 1e9 == pytest.approx(second.attributes["warmroute.waited_s"], abs=0.002)
    assert second.attributes["warmroute.waited_s"] > 0.04


async def test_a_client_that_leaves_is_no_error(collector: Receiver) -> None:
    async with Engines(1, time_model=STUCK) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            async with stage.hanging_up(streamed(chat(words(1)))):
                await stage.until(lambda: num_running(engines[0]) == 1)
            await stage.until(lambda: num_running(engines[0]) == 0)

    server, (client,) = collector.server, collector.of("client")
    assert client.attributes["warmroute.outcome"] == "client_gone"
    assert server.attributes["warmroute.outcome"] == "client_gone"
    assert "http.response.status_code" not in server.attributes
    assert not server.is_error
    assert not client.is_error


@pytest.mark.parametrize("transfer", ["mooncake", "nixl"])
async def test_both_halves_of_a_request_are_client_spans(
    collector: Receiver, transfer: str
) -> None:
    """Usage belongs to the half that answers."""
    async with (
        Engines(1, kv_role="producer", connector=transfer) as (p,),
        Engines(1, kv_role="consumer", connector=transfer) as (d,),
    ):
        first = {"url": p.url, "name": "p", "role": "prefill"}
        if transfer == "mooncake":
            first["bootstrap"] = p.url
        settings = {
            "replicas": [first, {"url": d.url, "name": "d", "role": "decode"}],
            "prefill__transfer": transfer,
            "tracing__endpoint": collector.url,
        }
        async with on_stage(p, d, **settings) as stage:
            reply = await stage.ask(streamed(chat(words(1, 400))))
            assert reply.headers["x-warmroute-prefill"] == "p"

    by_role = {span.attributes["warmroute.role"]: span for span in collector.of("client")}
    assert set(by_role) == {"prefill", "decode"}
    assert by_role["prefill"].attributes["warmroute.outcome"] == "ok"
    assert by_role["prefill"].begun_ns <= by_role["decode"].begun_ns
    assert "gen_ai.usage.input_tokens" not in by_role["prefill"].attributes
    assert by_role["decode"].attributes["gen_ai.usage.output_tokens"] == 4
