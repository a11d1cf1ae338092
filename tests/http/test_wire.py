"""What passes through compressed, what web pages may read, and answers that clients act on."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from router.http.exchange import ALLOW
from tests.faults.fake_engine import MODELS, FakeEngine, hang_up, streams
from tests.faults.stage import KEY, Json, Stage, chat, on_stage, records_in, streamed
from tests.faults.tenants import A, tenants_file

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
WHOLE = orjson.dumps({"object": "chat.completion", "choices": [], "usage": USAGE})
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
PAGE = {"Origin": "https://page.example"}
ASKS = PAGE | {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@asynccontextmanager
async def asking_raw(stage: Stage, body: Json) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a chat, and leave its answer compressed."""
    url = stage.url + "/v1/chat/completions"
    async with aiohttp.ClientSession(auto_decompress=False) as client:
        async with client.post(url, json=body, headers={"Authorization": KEY}) as answer:
            yield answer


# -- compressed answers --------------------------------------------------------------------------


async def test_engines_are_asked_for_no_compression() -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        await stage.ask(chat("a"), headers={"Accept-Encoding": "gzip, br, zstd"})

        assert engine.received[0].headers.getall("Accept-Encoding") == ["identity"]


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "gzip, br"])
async def test_a_compressed_answer_passes_as_it_came(encoding: str, tmp_path: Path) -> None:
    """And its usage is not read."""
    body = gzip.compress(WHOLE)

    async def answer(_: web.Request) -> web.Response:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        return web.Response(body=body, headers=headers)

    file = tmp_path / "records"
    async with FakeEngine(answer) as engine:
        async with on_stage(engine, log__decisions=file) as stage:
            async with asking_raw(stage, chat("a")) as reply:
                assert reply.status == 200
                assert reply.headers["Content-Encoding"] == encoding
                assert await reply.read() == body
        [record] = records_in(file)
        assert record.num_completion_tokens is None


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_a_compressed_stream_is_not_held_back(encoding: str) -> None:
    """The first bytes arrive while the engine waits to send the rest; no event is added."""
    packed = gzip.compress(EVENTS)
    goes_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Encoding": encoding, "Content-Type": "text/event-stream"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(packed[:10])
        await goes_on.wait()
        await response.write(packed[10:])
        return response

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        async with asking_raw(stage, streamed(chat("a"))) as reply:
            assert await reply.content.readexactly(10) == packed[:10]
            goes_on.set()
            assert await reply.read() == packed[10:]

        assert reply.headers["Content-Encoding"] == encoding
        assert stage.log.count("answers come compressed") >= 1


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
async def test_a_stream_is_the_same_for_a_client_without_chunks(version: str) -> None:
    """Whether or not its events may go on in the chunks in which they came."""
    event = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"b"}}]}\n\n'
    events = [*[event] * 20, b"data: [DONE]\n\n"]
    async with FakeEngine(streams(*events, pause_s=0.002)) as engine, on_stage(engine) as stage:
        body = orjson.dumps(streamed(chat("a")))
        head = (
            f"POST /v1/chat/completions {version}\r\nHost: a\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: {KEY}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", int(stage.url.split(":")[-1]))
        writer.write(head.encode() + body)
        got = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        await writer.wait_closed()

    if version == "HTTP/1.1":
        sizes, texts = got.split(b"\r\n")[:-1:2], got.split(b"\r\n")[1::2]
        assert [len(text) for text in texts] == [int(size, 16) for size in sizes]
        got = b"".join(texts)
    assert got == b"".join(events)


async def test_a_compressed_stream_that_breaks_off_gets_no_plain_event() -> None:
    """Its connection is cut: text would be no gzip."""

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Encoding": "gzip", "Content-Type": "text/event-stream"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(gzip.compress(EVENTS)[:10])
        hang_up(request)
        return response

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        async with asking_raw(stage, streamed(chat("a"))) as reply:
            with pytest.raises(aiohttp.ClientPayloadError):
                await reply.read()


async def test_a_compressed_error_is_retried_elsewhere() -> None:
    async def fails(_: web.Request) -> web.Response:
        body = gzip.compress(b'{"error":{"message":"x"}}')
        return web.Response(status=500, body=body, headers={"Content-Encoding": "gzip"})

    async with FakeEngine(fails) as a, FakeEngine() as b, on_stage(a, b) as stage:
        replies = [await stage.ask(chat(str(i))) for i in range(4)]

        assert {reply.status for reply in replies} == {200}


# -- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_json_in_other_encodings_arrives_as_it_was_sent(encoding: str) -> None:
    """`json.loads`, vLLM's reader, takes them all; the prompt is tokenized all the same."""
    body = orjson.dumps(chat("a")).decode().encode(encoding)
    async with FakeEngine() as engine, on_stage(engine) as stage:
        reply = await stage.ask(body, headers={"Content-Type": "application/json"})

        assert reply.status == 200
        assert reply.headers["x-warmroute-policy"] == "kv_aware"
        assert engine.received[0].body == body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model":"\\ud83d"}', "half of a surrogate pair"),
        (b'{"model":"\\udc00"}', "half of a surrogate pair"),
        (b'{"a":"\xff"}', "not valid UTF-8"),
        (b'{"a":"\xed\xa0\xbd"}', "not valid UTF-8"),
        (b'{"a":NaN}', "no NaN"),
        (b'{"a":-Infinity}', "no NaN"),
        (b'{"a":' * 2_000, "nested deeper than 1,024"),
        (b'{"a":"\x01"}', "control character"),
        (b"{} x", "goes on after"),
        (b'{"a":1', "ends before"),
        (b"{'a':1}", "is not JSON"),
        (b"[]", "must be a JSON object"),
    ],
)
async def test_each_kind_of_wrong_json_has_its_own_message(body: bytes, words: str) -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            reply = await stage.ask(body, path)

            assert reply.status == 400
            assert words in reply.json()["error"]["message"]
            assert ("nested" in reply.json()["error"]["message"]) == ("nested" in words)
        assert engine.received == []


async def test_an_empty_list_of_tools_is_the_engines_to_judge() -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for fields in ({"tools": []}, {"tools": [], "tool_choice": "none"}, {"stop": []}):
            assert (await stage.ask(chat("a", **fields))).status == 200
        for path in ("/v1/messages", "/v1/responses"):
            assert (await stage.ask(chat("a", tools=[]) | {"input": "a"}, path)).status == 200

        assert len(engine.received) == 5


# -- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a.wav",
        b'content-disposition:form-data;name="file";filename="a.wav"',
        b'Content-Type: audio/wav\r\nContent-Disposition: form-data; filename="a;b"; name=file',
    ],
)
async def test_uploads_of_any_client_arrive(head: bytes) -> None:
    """What their audio contains does not matter: a part's name is in its head alone."""
    audio = (
        b'\0name*=vllm_xargs\r\n--c\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n'
    )
    model = b"--b\r\nContent-Disposition: form-data; name=model\r\n\r\ntiny\r\n"
    body = b"--b\r\n" + head + b"\r\n\r\n" + audio + b"\r\n" + model + b"--b--\r\n"
    kind = {"Content-Type": 'multipart/form-data; boundary="b"'}
    async with FakeEngine() as engine, on_stage(engine) as stage:
        reply = await stage.ask(body, "/v1/audio/transcriptions", headers=kind)

        assert reply.status == 200, reply.body
        assert engine.received[0].body == body


# -- web pages -----------------------------------------------------------------------------------


async def test_a_preflight_needs_neither_key_nor_replica(tmp_path: Path) -> None:
    paths = ("/v1/chat/completions", "/v1/models", "/v1/models/tiny", "/v1/responses/r", "/x")
    async with on_stage(
        "http://127.0.0.1:1", ready=False, tenants__file=tenants_file(tmp_path)
    ) as stage:
        for path in paths:
            reply = await stage.ask(None, path, method="OPTIONS", headers=ASKS)

            assert reply.status == 200
            assert reply.headers[ALLOW] == "*"
            assert "POST" in reply.headers["Access-Control-Allow-Methods"]
            wanted = ASKS["Access-Control-Request-Headers"]
            assert reply.headers["Access-Control-Allow-Headers"] == wanted


async def test_web_pages_can_read_the_routers_own_answers(tmp_path: Path) -> None:
    """401, 404, 405, 413, 400, the model list; nothing is said to who sends no Origin."""
    file = tenants_file(tmp_path)
    async with FakeEngine() as engine:
        async with on_stage(engine, tenants__file=file, limits__body_bytes=2_000) as stage:
            asked: list[tuple[int, str, str, Any, Json]] = [
                (401, "POST", "/v1/chat/completions", chat("a"), {"Authorization": "Bearer x"}),
                (404, "POST", "/x", chat("a"), A),
                (405, "GET", "/v1/chat/completions", None, A),
                (413, "POST", "/v1/chat/completions", b" " * 3_000, A),
                (400, "POST", "/v1/chat/completions", b"no json", A),
                (200, "GET", "/v1/models", None, A),
                (200, "GET", "/v1/models/", None, A),
                (404, "GET", "/v1/models/x", None, A),
                (200, "GET", "/healthz", None, A),
            ]
            for status, method, path, body, key in asked:
                reply = await stage.ask(body, path, method=method, headers=key | PAGE)
                plain = await stage.ask(body, path, method=method, headers=key)

                assert reply.status == status, path
                assert reply.headers.getall(ALLOW) == ["*"]
                assert "Retry-After" in reply.headers["Access-Control-Expose-Headers"]
                assert ALLOW not in plain.headers


async def test_503_without_replicas_can_be_read_too() -> None:
    async with on_stage("http://127.0.0.1:1", ready=False) as stage:
        stage.router.readiness.is_starting = lambda: False  # type: ignore[method-assign]
        for path, method in (("/v1/chat/completions", "POST"), ("/v1/models", "GET")):
            body = chat("a") if method == "POST" else None
            reply = await stage.ask(body, path, method=method, headers=PAGE)

            assert reply.status == 503
            assert reply.headers[ALLOW] == "*"
            assert int(reply.headers["Retry-After"]) >= 1


async def test_an_engines_own_permission_stays_single() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({}, headers={ALLOW: "https://engine.example"})

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        reply = await stage.ask(chat("a"), headers=PAGE)

        assert reply.headers.getall(ALLOW) == ["https://engine.example"]


# -- answers that clients act on -----------------------------------------------------------------


async def test_405_names_the_methods_of_a_route() -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for method, path, allowed in (
            ("GET", "/v1/chat/completions", "POST, OPTIONS"),
            ("PUT", "/v1/responses/r1", "DELETE, GET, HEAD, OPTIONS"),
            ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
            ("DELETE", "/v1/models/tiny", "GET, HEAD, OPTIONS"),
            ("POST", "/healthz", "GET, HEAD, OPTIONS"),
        ):
            reply = await stage.ask(None, path, method=method)

            assert reply.status == 405
            assert reply.headers["Allow"] == allowed
        asked = await stage.ask(None, "/v1/chat/completions", method="OPTIONS")

        assert asked.status == 200
        assert [received.method for received in engine.received] == ["OPTIONS"]


async def test_a_wrong_base_url_is_answered_with_the_right_route() -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for path, meant in (
            ("/v1/v1/chat/completions", "/v1/chat/completions"),
            ("/chat/completions", "/v1/chat/completions"),
            ("//v1/messages", "/v1/messages"),
            ("/v1/v1/messages/", "/v1/messages"),
            ("/v1/tokenize", "/tokenize"),
            ("/v1/message", "/v1/messages"),
            ("/v1/chat/completion", "/v1/chat/completions"),
        ):
            reply = await stage.ask(chat("a"), path)

            assert reply.status == 404
            assert f"did you mean {meant}?" in reply.error["message"]
        reply = await stage.ask(chat("a"), "/v1/sleep")
        assert "did you mean" not in reply.error["message"]


async def test_pages_answer_head_as_get() -> None:
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for path in ("/healthz", "/readyz", "/v1/models", "/v1/models/tiny", "/metrics"):
            reply = await stage.ask(None, path, method="HEAD")

            assert reply.status == 200
            assert reply.body == b""


async def test_a_model_whose_replica_was_not_found_yet_may_come() -> None:
    """503 with Retry-After: SDKs give up at a 404."""
    other = MODELS | {"data": [MODELS["data"][0] | {"id": "other"}]}  # type: ignore[index, dict-item]
    async with FakeEngine() as here, FakeEngine(**{"v1/models": other}) as gone:
        await gone.die()
        async with on_stage(here, gone.url) as stage:
            replies = [
                await stage.ask(chat("a", model="other")),
                await stage.ask(None, "/v1/models/other", method="GET"),
            ]
        async with on_stage(here) as stage:
            unknown = await stage.ask(chat("a", model="other"))

    assert [reply.status for reply in replies] == [503, 503]
    assert all(int(reply.headers["Retry-After"]) >= 1 for reply in replies)
    assert unknown.status == 404
