"""router.http.app in a whole router: what goes through is the client's and the engine's own."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io

import orjson
import pytest
from aiohttp import web

from loadtest.tiny_model import MODEL_DIR
from router.api.sessions import session_hash
from router.request.record import Recorder
from tests.faults.fake_engine import FakeEngine, streams
from tests.faults.stage import (
    KEY,
    SECRET,
    Engines,
    Json,
    RawClient,
    chat,
    on_stage,
    streamed,
    words,
)

UUID = "3b70e2b4-94a4-4c11-9f0e-0123456789ab"
HTTP = b" HTTP/1.1\r\nHost: router\r\n"

BODIES = {
    "whitespace": b'\n{ "model" :\t"tiny",\r\n "messages":[ {"role":"user","content":"a"} ] }\n ',
    "key order": b'{"stream":false,"messages":[{"content":"a","role":"user"}],"model":"tiny"}',
    "duplicate keys": b'{"model":"x","model":"tiny","messages":[{"role":"user","content":"a"}]}',
    "unknown fields": b'{"messages":[{"role":"user","content":"a","x":[1]}],"y":{"z":null}}',
    "null content": b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":'
    b'null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]}]}',
    "escapes": b'{"messages":[{"role":"user","content":"\\u00e9 \\ud83d\\ude00 \\/ \xc3\xa9"}]}',
    "big numbers": b'{"seed":123456789012345678901234567890,"top_p":1.0e-0,"temperature":1.10,'
    b'"messages":[{"role":"user","content":"a"}]}',
    "byte order": '{"messages":[{"role":"user","content":"\\u2028\u2028"}]}'.encode(),
}


# -- bytes in ------------------------------------------------------------------------------------


async def test_a_body_arrives_byte_for_byte() -> None:
    """Nothing is parsed and written again: white space, order, nulls, numbers stay."""
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for body in BODIES.values():
            reply = await stage.ask(body, headers={"Content-Type": "application/json"})
            assert reply.status == 200

        assert [received.body for received in engine.received] == list(BODIES.values())
        assert engine.received[0].headers["Content-Type"] == "application/json"


async def test_a_failure_to_record_an_answer_costs_its_client_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has been sent by then; the next request is answered, too."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    async with FakeEngine() as engine, on_stage(engine) as stage:
        monkeypatch.setattr(Recorder, "finished", fail)
        for _ in range(2):
            reply = await stage.ask(chat("a"))

            assert reply.status == 200
            assert "choices" in reply.json()

        assert "internal error" in stage.log


async def test_path_and_query_arrive_as_they_are() -> None:
    """A query is the engine's business; so is a path of a kind that the operator let through."""
    targets = [
        "/v1/chat/completions?a=1&a=2&b&c=%2F%20+&d=%E2%82%AC&e=/../%2e%2e//x",
        "/v1/responses/resp_1/cancel?",
        "/v1/files/a%20b/%C3%A9?x",
    ]
    body = orjson.dumps(chat("a"))
    async with FakeEngine() as engine, on_stage(engine, forward__routes=["/v1/files/*"]) as stage:
        async with RawClient.connected(stage.url) as client:
            for target in targets:
                length = b"Content-Length: %d\r\n\r\n" % len(body)
                await client.send(b"POST " + target.encode() + HTTP + length + body)
                assert await client.status() == 200

        assert [received.target for received in engine.received] == [
            targets[0], "/v1/responses/resp_1/cancel", targets[2],
        ]  # fmt: skip


async def test_headers_go_through_but_those_of_the_hop() -> None:
    """Keys and traces reach the engine; what belongs to the client's connection stays here."""
    async with FakeEngine() as engine, on_stage(engine) as stage:
        sent = {
            "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "X-Request-Id": "mine-1",
            "Accept": "text/event-stream",
            "User-Agent": "agent/1",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
            "TE": "trailers",
            "Keep-Alive": "timeout=5",
            "Proxy-Authorization": "Basic x",
            "Cookie": "a=b",
        }
        reply = await stage.ask(chat("a"), headers=sent)

        got = engine.received[0].headers
        for name in ("traceparent", "X-Request-Id", "Accept", "User-Agent", "Cookie"):
            assert got[name] == sent[name]
        assert got["Authorization"] == KEY
        assert not {"X-Hop", "TE", "Keep-Alive", "Proxy-Authorization"} & set(got)
        assert got["Host"] == engine.url.removeprefix("http://")
        assert reply.headers["x-warmroute-request-id"] == "mine-1"


async def test_a_request_gets_an_id_where_it_has_none_or_a_wrong_one() -> None:
    """The engine and the client get the same one."""
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for given in (None, "spaces in it", "x" * 200):
            reply = await stage.ask(chat("a"), headers={"X-Request-Id": given} if given else {})
            got = engine.received.pop().headers["X-Request-Id"]

            assert got == reply.headers["x-warmroute-request-id"] != given


async def test_the_session_is_forwarded() -> None:
    """As X-Session-ID, wherever it came from: a digest, in place of what a client calls it."""
    none = {"X-Session-ID": ""}
    cases: list[tuple[Json, Json, str]] = [
        ({"X-Session-ID": "s1", "session_id": "s2"}, {}, "s1"),
        (none | {"x-claude-code-session-id": "s2"}, {}, "s2"),
        (none, {"prompt_cache_key": UUID}, UUID),
        (none, {"metadata": {"user_id": "u_session_s4"}}, "s4"),
        (none, {"session_id": "a\r\nX-Evil: 1"}, "a\r\nX-Evil: 1"),
        (none, {"session_id": "sité\u4e00"}, "sité\u4e00"),
        ({"X-Session-ID": "s" * 10_000}, {}, "s" * 10_000),
    ]
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for headers, fields, session in cases:
            reply = await stage.ask(chat("a", **fields), headers=headers)
            got = engine.received.pop().headers

            assert reply.status == 200
            assert got["X-Session-ID"] == f"{session_hash(session, 'tiny'):016x}"
            assert "X-Evil" not in got


async def test_odd_bytes_in_headers_are_nothing_special() -> None:
    """No 500; as the session's name an engine sees a digest."""
    body = orjson.dumps(chat("a"))
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for value in (b"\xff\xfe", b"a\x80b", b"\xc3\xa9", b"\t x", b"\xed\xa0\x80"):
            async with RawClient.connected(stage.url) as client:
                await client.send(
                    b"POST /v1/chat/completions" + HTTP + b"X-Session-ID: " + value + b"\r\n"
                    b"session_id: " + value + b"\r\nX-Other: " + value + b"\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body
                )
                assert await client.status() == 200, value
            session = engine.received.pop().headers["X-Session-ID"]

            assert session.isascii()
            assert session.isalnum()


async def test_what_routers_say_to_engines_is_not_the_clients_to_say() -> None:
    """It is taken out of bodies and headers, on every route; the rest stays byte for byte."""
    headers = {"X-data-parallel-rank": "7", "X-Vllm-Priority": "-9", "X-Warmroute-Arm": "a/b",
               "x-warmroute-x": "1"}  # fmt: skip
    sent = (
        b'{ "model":"tiny", "kv_transfer_params":{"prompt_token_ids":[1]},"m\\u0065ssages": '
        b'[{"role":"user","content":"priority"}],"pr\\u0069ority":1, "vllm_xargs":{}, "n":1.0}'
    ).replace(b"\\\\", b"\\")
    left = b'{ "model":"tiny", "m\\u0065ssages": [{"role":"user","content":"priority"}],  "n":1.0}'
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/pooling"):
            assert (await stage.ask(sent, path, headers=headers)).status == 200
            received = engine.received.pop()

            assert received.body == left.replace(b"\\\\", b"\\")
            assert received.headers["Content-Length"] == str(len(received.body))
            assert not {name.lower() for name in headers} & {n.lower() for n in received.headers}
        for body in ('{"priority":1}'.encode("utf-16"), b'\xef\xbb\xbf{"priority":1}'):
            assert (await stage.ask(body, "/v1/messages")).status == 200
            assert engine.received.pop().body == b"{}"
        for body in (b'{"priority":1,"x":NaN}', b"[1]"):
            assert (await stage.ask(body, "/v1/messages")).status == 400
        assert (await stage.ask({"vllm_xargs": {}}, "/v1/audio/transcriptions")).status == 400
        assert engine.received == []


async def test_an_operator_lets_a_field_through() -> None:
    """It arrives, with its header."""
    async with (
        FakeEngine() as engine,
        on_stage(engine, forward__client_fields=["vllm_xargs", "priority"]) as stage,
    ):
        body = orjson.dumps(chat("a", priority=1, vllm_xargs={"a": 1}))
        await stage.ask(body, headers={"X-Vllm-Priority": "2"})

        assert engine.received[0].body == body
        assert engine.received[0].headers["X-Vllm-Priority"] == "2"


async def test_the_engine_learns_where_a_request_is_from() -> None:
    """As far as it is known here; a client's own word does not count, a trusted proxy's does."""
    said = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https", "Forwarded": "for=x",
            "X-Real-IP": "203.0.113.9"}  # fmt: skip
    async with FakeEngine() as engine:
        for proxies, hops, proto in (
            ([], "127.0.0.1", "http"),
            (["127.0.0.1"], "203.0.113.9, 127.0.0.1", "https"),
        ):
            async with on_stage(engine, forward__trusted_proxies=proxies) as stage:
                reply = await stage.ask(chat("a"), headers=said)
                refused = await stage.ask(b"no json", headers=said)
                got = engine.received.pop().headers

                assert got["X-Forwarded-For"] == hops
                assert got["X-Forwarded-Proto"] == proto
                assert got["X-Forwarded-Host"] == stage.url.removeprefix("http://")
                assert not {"Forwarded", "X-Real-IP"} & set(got)
                assert "x-warmroute-cached" not in reply.headers  # it may be from anywhere
                assert refused.status == 400
                address = hops.split(",")[0]
                assert stage.log.count(f'"client":"{address}"') == 2
                assert stage.log.count(f"client={address}") == 2


# -- what an answer's headers say ----------------------------------------------------------------


async def test_a_refused_request_learns_nothing_of_the_cache() -> None:
    """Nor which replica, policy or time: asking costs nothing, and could be done for any prompt."""

    async def refuses(request: web.Request) -> web.Response:
        status = 200 if b"-1" not in await request.read() else 400
        return web.json_response({}, status=status, headers={"X-Warmroute-Cached": "gpu=1"})

    async with FakeEngine(refuses) as engine, on_stage(engine) as stage:
        replies = [await stage.ask(chat("a", max_tokens=n)) for n in (-1, 1)]
        replies.append(await stage.ask(b"no json"))

    names = [[n for n in r.headers if n.lower().startswith("x-warmroute-")] for r in replies]
    assert [reply.status for reply in replies] == [400, 200, 400]
    assert names[0] == names[2] == ["x-warmroute-request-id"]
    assert {"x-warmroute-replica", "x-warmroute-policy", "x-warmroute-ms"} < set(names[1])


async def test_details_can_be_kept_to_oneself() -> None:
    """Then an answer has its request's id alone, whatever an engine says in these names."""

    async def says(_: web.Request) -> web.Response:
        return web.json_response({}, headers={"X-Warmroute-Cached": "gpu=1"})

    async with (
        FakeEngine(says) as engine,
        on_stage(engine, listen__detail_headers="never") as stage,
    ):
        reply = await stage.ask(chat("a"))

    names = [name for name in reply.headers if name.lower().startswith("x-warmroute-")]
    assert names == ["x-warmroute-request-id"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, br"])
async def test_a_compressed_body_is_refused(encoding: str) -> None:
    """Engines would take its bytes for the JSON itself, so nothing hides in it either."""
    body = gzip.compress(orjson.dumps(chat("a", priority=1)))
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings"):
            reply = await stage.ask(body, path, headers={"Content-Encoding": encoding})

            assert reply.status == 415
            assert "without Content-Encoding" in reply.error["message"]
        assert (await stage.ask(chat("a"), headers={"Content-Encoding": "identity"})).status == 200
        assert len(engine.received) == 1


async def test_a_body_of_20_mib_arrives() -> None:
    """Whole, and so does an answer of the same size."""
    body = orjson.dumps(chat(SECRET + "x" * (20 << 20)))

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read(), content_type="application/json")

    async with FakeEngine(echo) as engine, on_stage(engine) as stage:
        reply = await stage.ask(io.BytesIO(body))

        assert reply.status == 200
        assert hashlib.sha256(reply.body).digest() == hashlib.sha256(body).digest()
        assert reply.headers["Content-Length"] == str(len(body))


async def test_a_chunked_body_arrives_whole() -> None:
    """The engine gets its length."""
    body = orjson.dumps(chat("a"))
    async with FakeEngine() as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(
                b"POST /v1/chat/completions" + HTTP + b"Transfer-Encoding: chunked\r\n\r\n"
            )
            for piece in (body[:7], body[7:]):
                await client.send(b"%x\r\n%s\r\n" % (len(piece), piece))
            await client.send(b"0\r\n\r\n")

            assert await client.status() == 200
        assert engine.received[0].body == body
        assert engine.received[0].headers["Content-Length"] == str(len(body))


# -- bytes out -----------------------------------------------------------------------------------


async def test_status_headers_and_bytes_come_back() -> None:
    """Also those of errors: the engine's own words; and the connection stays usable."""

    async def answer(request: web.Request) -> web.Response:
        status = int(request.path.rpartition("/")[2])
        headers = {"X-Engine": "1", "Location": "/elsewhere"}
        response = web.Response(status=status, body=said(status), headers=headers)
        response.headers.add("Set-Cookie", "a=1")
        response.headers.add("Set-Cookie", "b=2")
        return response

    def said(status: int) -> bytes:
        return b"" if status in (204, 304) else b'{ "said" : "so" }\n'

    async with FakeEngine(answer) as engine, on_stage(engine, forward__routes=["/v1/*"]) as stage:
        async with RawClient.connected(stage.url) as client:
            for status in (200, 201, 204, 302, 304, 400, 401, 404, 409, 422, 429, 500):
                await client.send(b"GET /v1/%d" % status + HTTP + b"\r\n")
                head = await client.head()
                body = await client.read(len(said(status)))

                assert body == said(status)
                assert head.startswith(b"HTTP/1.1 %d " % status)
                assert b"X-Engine: 1" in head
                assert head.count(b"Set-Cookie") == 2
                assert b"Location: /elsewhere" in head


async def test_head_says_how_long_the_answer_would_be() -> None:
    """And sends none of it."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"12345")

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(b"HEAD /v1/responses/r1" + HTTP + b"\r\n")
            head = await client.head()
            await client.send(b"GET /v1/responses/r1" + HTTP + b"\r\n")

            assert b"content-length: 5" in head.lower()
            assert await client.status() == 200
        assert [received.method for received in engine.received] == ["HEAD", "GET"]


@pytest.mark.parametrize("kind", ["text/event-stream", "application/octet-stream"])
async def test_every_piece_is_passed_on_at_once(kind: str) -> None:
    """The client reads the first one while the engine has not written the second."""
    may_go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        large = b"y" * (2 << 20) if kind != "text/event-stream" else b""
        await response.write(b"data: 1\n\n" + large)
        await may_go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        async with stage.asking(streamed(chat("a"))) as answered:
            first = await answered.content.readany()
            may_go_on.set()
            rest = await answered.read()

    assert first.startswith(b"data: 1\n\n")
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_stream_arrives_byte_for_byte() -> None:
    """Whatever its pieces are: half lines, comments, empty events."""
    pieces = [b": hello\n", b'\ndata: {"a', b'":1}\n\n', b"\n\n\n", b"data: [DONE]\n\n"]
    async with FakeEngine(streams(*pieces, pause_s=0.0)) as engine, on_stage(engine) as stage:
        reply = await stage.ask(streamed(chat("a")))

    assert reply.body == b"".join(pieces)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streams", [False, True])
async def test_questions_about_the_cache_change_no_answer(path: str, streams: bool) -> None:
    """Fields that ask for cache diagnostics are the engine's to read, and the answer is its own."""
    whole = b'{"id": "a_1", "usage": {"input_tokens": 9, "output_tokens": 1}}'
    stream = b'event: message_start\ndata: {"type":"message_start","message":{"id":"a_1"}}\n\n'
    stream += b'event: response.completed\ndata: {"type":"x","response":{"id":"a_1"}}\n\n'

    async def answer(request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if streams else "application/json"
        return web.Response(body=stream if streams else whole, headers={"Content-Type": kind})

    asked = b'{"diagnostics": {"previous_message_id": "a_0"}, "stream": %s, "max_tokens": 4, '
    asked += b'"prompt_cache_options": {"comparison_response_id": "a_0"}, "input": "a", '
    asked += b'"model": "tiny", "messages": [{"role": "user", "content": "a"}]}'
    body = asked % (b"true" if streams else b"false")
    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        reply = await stage.ask(body, path, headers={"Content-Type": "application/json"})

        assert [received.body for received in engine.received] == [body]
    assert reply.body == (stream if streams else whole)


# -- routes --------------------------------------------------------------------------------------


async def test_a_route_that_the_operator_added_is_passed_through() -> None:
    """With any method and body, to a healthy replica."""
    async with FakeEngine() as engine, on_stage(engine, forward__routes=["/v1/files/*"]) as stage:
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"):
            reply = await stage.ask(b"any bytes", "/v1/files/7?x", method=method)
            got = engine.received.pop()

            assert reply.status == 200
            assert (got.method, got.target, got.body) == (method, "/v1/files/7?x", b"any bytes")
            assert reply.headers["x-warmroute-policy"] == "least_loaded"


async def test_models_are_the_union_of_all_replicas() -> None:
    """Each once, adapters with their parents."""
    async with (
        Engines(2, served_model_names=("tiny",), loras=(("sql", "/l/sql"),)) as (a, b),
        Engines(1, served_model_names=("other",)) as (c,),
        on_stage(a, b, c) as stage,
    ):
        reply = await stage.ask(None, "/v1/models", method="GET")

    assert [(m["id"], m["parent"]) for m in reply.json()["data"]] == [
        ("tiny", None),
        ("sql", "tiny"),
        ("other", None),
    ]


async def test_a_request_may_leave_out_the_only_model() -> None:
    """With several, it is asked to name one."""
    body = chat("a")
    del body["model"]
    async with Engines(1) as (a,), Engines(1, served_model_names=("other",)) as (b,):
        async with on_stage(a) as stage:
            assert (await stage.ask(body)).status == 200
        async with on_stage(a, b) as stage:
            reply = await stage.ask(body)

    assert reply.status == 400
    assert reply.error["param"] == "model"
    assert "tiny, other" in reply.error["message"]


def form(model: str | None) -> bytes:
    fields = {"file": 'name="file"; filename="a.mp3"', "model": 'name="model"'}
    values = {"file": "audio", "model": model}
    parts = [
        f"--x\r\nContent-Disposition: form-data; {fields[name]}\r\n\r\n{value}\r\n"
        for name, value in values.items()
        if value is not None
    ]
    return "".join((*parts, "--x--\r\n")).encode()


async def test_no_request_reaches_a_replica_of_another_model() -> None:
    """Whether a form, JSON or the query names it; one that has to name one is asked to."""
    sent = {"Content-Type": "multipart/form-data; boundary=x"}
    routes = ["/v1/images/edits", "/v1/realtime/calls"]
    audio, images, calls = "/v1/audio/transcriptions", *routes
    async with (
        FakeEngine() as tiny,
        FakeEngine(**{"v1/models": {"data": [{"id": "other", "root": str(MODEL_DIR)}]}}) as other,
        on_stage(tiny, other, forward__routes=routes) as stage,
    ):
        tiny.tokenizes = other.tokenizes = True
        for _ in range(3):
            for path, body, headers in (
                (audio, form("other"), sent),
                (images, form("other"), sent),
                (f"{calls}?model=other", b"v=0", {"Content-Type": "application/sdp"}),
                ("/tokenize", b'{"model":"other","prompt":"a"}', {}),
            ):
                assert (await stage.ask(body, path, headers=headers)).status == 200
        for path, body, headers in (
            (audio, form(None), sent),
            ("/detokenize", b'{"tokens":[1]}', {}),
        ):
            reply = await stage.ask(body, path, headers=headers)
            assert (reply.status, reply.error["param"]) == (400, "model")
        for path in (audio, images):
            reply = await stage.ask(form("neither"), path, headers=sent)
            assert (reply.status, reply.error["type"]) == (404, "NotFoundError")

        assert [each for each in tiny.received if "X-Request-Id" in each.headers] == []
        asked = [each for each in other.received if "X-Request-Id" in each.headers]
        assert len(asked) == 12  # beside the router's own comparison of token ids


async def test_a_form_without_a_model_goes_to_the_only_one() -> None:
    """As the engine would take it."""
    sent = {"Content-Type": "multipart/form-data; boundary=x"}
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for body in (form(None), form("tiny"), b"--x--"):
            reply = await stage.ask(body, "/v1/audio/translations", headers=sent)
            assert reply.status == 200
            assert engine.received.pop().body == body


async def test_one_model_can_be_asked_for() -> None:
    """By its name, however that is written in a path."""
    async with (
        Engines(1, served_model_names=("org/tiny",)) as (a,),
        on_stage(a) as stage,
    ):
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
            assert (await stage.ask(None, path, method="GET")).json()["id"] == "org/tiny"
        reply = await stage.ask(None, "/v1/models/org", method="GET")

    assert (reply.status, reply.error["param"]) == (404, "model")


async def test_routes_that_control_an_engine_do_not_reach_one() -> None:
    """In any spelling; the refusal has the API's shape and says what to do."""
    names = ["reset_prefix_cache", "sleep", "collective_rpc", "metrics", "v1/load_lora_adapter"]
    spellings = [
        "/%s", "//%s", "/%s/", "/v1/../%s", "/./%s", "/v1/chat/completions/../../../%s", "/%%2e/%s",
        "/v1/%%2e%%2e/%s", "/v1%%2f..%%2f%s", "/\\%s", "/%s;x", "/%s%%00", "/%s#", "/%s%%3f",
        "/v1/responses/../../%s", "/v1/responses/%%2e%%2e%%2f%s",
    ]  # fmt: skip
    targets = [spelling % name for spelling in spellings for name in names]
    targets += ["/%72eset_prefix_cache", "/%6detrics", "/sleep?level=1", "/%73leep?level=1", "/"]
    async with FakeEngine() as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            for target in targets:
                await client.send(b"POST " + target.encode() + HTTP + b"Content-Length: 0\r\n\r\n")
                assert await client.status() in (404, 405), target
        reply = await stage.ask({}, "/sleep")

        assert engine.received == []
        assert reply.status == 404
        assert reply.error["type"] == "NotFoundError"
        assert "`forward.routes`" in reply.error["message"]


async def test_a_slash_at_the_end_of_a_known_route_changes_nothing() -> None:
    """It is routed by its tokens as without; the engine would redirect the client to itself."""
    async with FakeEngine() as engine, on_stage(engine) as stage:
        reply = await stage.ask(chat("a"), "/v1/chat/completions/?a=1")
        models = await stage.ask(None, "/v1/models/", method="GET")

        assert engine.received[0].target == "/v1/chat/completions?a=1"
        assert reply.headers["x-warmroute-policy"] == "kv_aware"
        assert models.json()["data"][0]["id"] == "tiny"


async def test_its_own_pages_answer() -> None:
    """Health, readiness, metrics."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        names = ("/healthz", "/readyz", "/metrics")
        pages = [await stage.ask(None, name, method="GET") for name in names]

    assert [page.status for page in pages] == [200] * 3
    assert b"warmroute_replica_state" in pages[2].body


# -- what is no request for an engine ------------------------------------------------------------


async def test_websocket_is_refused_clearly() -> None:
    """In the API's own shape; the connection goes on."""
    async with FakeEngine() as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(
                b"GET /v1/realtime" + HTTP + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n\r\n"
            )
            head = await client.head()
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await client.read(length)

            assert head.startswith(b"HTTP/1.1 404 ")
            assert "route them to a replica" in orjson.loads(body)["error"]["message"]
            await client.send(b"GET /v1/responses/r1" + HTTP + b"\r\n")
            assert await client.status() == 200
        assert [received.target for received in engine.received] == ["/v1/responses/r1"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_an_engine_s_redirect_is_not_followed(status: int) -> None:
    """The other server would get what only the engine may have, such as its key.

    Nor is it passed on: it would name the engine's own address. Its replica is not to blame.
    """
    async with FakeEngine() as engine, FakeEngine() as other, on_stage(engine) as stage:

        async def redirect(_: web.Request) -> web.StreamResponse:
            return web.Response(status=status, headers={"Location": other.url})

        engine.on_request = redirect
        for _ in range(4):
            reply = await stage.ask(path="/v1/responses/r0", method="GET")
            assert reply.status == 502
            assert f"a redirect (status {status}), which is refused" in reply.error["message"]
            assert "Location" not in reply.headers
        assert stage.metric("warmroute_replica_healthy") == 1

    assert not other.received


async def test_an_upgrade_to_http2_is_ignored() -> None:
    """As Java's client offers it with every request."""
    body = orjson.dumps(chat("a"))
    async with FakeEngine() as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(
                b"POST /v1/chat/completions" + HTTP + b"Connection: Upgrade, HTTP2-Settings\r\n"
                b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )

            assert await client.status() == 200
        assert engine.received[0].body == body
        assert not {"Upgrade", "HTTP2-Settings"} & set(engine.received[0].headers)


async def test_a_target_cannot_change_the_host() -> None:
    """Only paths go to a replica, of a whole URL too; everything else is refused here."""
    lines = [
        b"GET @evil/ HTTP/1.1",
        b"GET :80/ HTTP/1.1",
        b"GET * HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"CONNECT evil:80 HTTP/1.1",
        b"GET \\\\evil/ HTTP/1.1",
    ]
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for line in lines:
            async with RawClient.connected(stage.url) as client:
                await client.send(line + b"\r\nHost: evil\r\n\r\n")
                head = await client.head()

                assert head.split(b" ")[1] in (b"400", b"404"), line
        assert engine.received == []


async def test_the_connection_survives_errors() -> None:
    """A refused request leaves it open for the next."""
    good = orjson.dumps(chat(words(1)))
    async with Engines(1) as engines, on_stage(*engines) as stage:
        async with RawClient.connected(stage.url) as client:
            statuses = []
            for body in (b"no json", b'{"model":"x","messages":[]}', b"{}", good, b"[]", good):
                await client.send(
                    b"POST /v1/chat/completions" + HTTP + b"Content-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body
                )
                statuses.append(await client.status())

    assert statuses == [400, 404, 400, 200, 400, 200]


@pytest.mark.parametrize("start", ["http://router", "HTTPS://router:8080", "http://[::1]:80"])
async def test_a_whole_url_as_target_is_its_path(start: str) -> None:
    """RFC 9112 asks servers to take it; the engine gets the path and the query."""
    body = orjson.dumps(chat(words(1)))
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for target, status in (("/v1/chat/completions?a=b", 200), ("/unknown", 404), ("", 404)):
            async with RawClient.connected(stage.url) as client:
                await client.send(
                    f"POST {start}{target} HTTP/1.1\r\nHost: router\r\n".encode()
                    + b"Content-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
                )
                assert await client.status() == status
        assert [each.target for each in engine.received] == ["/v1/chat/completions?a=b"]
