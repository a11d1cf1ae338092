"""WebSockets through a whole router: their bytes, their ends, their replicas."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import WSMsgType

from router.tenants.client_keys import digest_of, written
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, Engines, Stage, arm, on_stage, records_in
from tests.faults.tenants import A, tenants_file

PATH = "/v1/realtime"
AUDIO = base64.b64encode(b"\0" * 320).decode()
UPDATE = {"type": "session.update", "model": "tiny"}
COMMIT = {"type": "input_audio_buffer.commit"}
APPEND = {"type": "input_audio_buffer.append", "audio": AUDIO}
FINAL = COMMIT | {"final": True}

Ws = aiohttp.ClientWebSocketResponse


@asynccontextmanager
async def connected(stage: Stage, query: str = "", **options: Any) -> AsyncIterator[Ws]:
    async with aiohttp.ClientSession() as client:
        async with client.ws_connect(stage.url + PATH + query, **options) as ws:
            yield ws


async def say(ws: Ws, *events: dict[str, Any]) -> None:
    for event in events:
        await ws.send_str(orjson.dumps(event).decode())


async def hear(ws: Ws) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(await ws.receive_str(timeout=30))
    return event


async def end_of(ws: Ws) -> tuple[int | None, str]:
    """Read to the end; return its code and reason."""
    while True:
        message = await ws.receive(timeout=30)
        if message.type is WSMsgType.CLOSE:
            return message.data, message.extra or ""
        if message.type in (WSMsgType.CLOSED, WSMsgType.CLOSING, WSMsgType.ERROR):
            return ws.close_code, ""


async def refused(stage: Stage, query: str = "", **options: Any) -> tuple[int, Any]:
    """Ask for a WebSocket that is refused; return status, and its error or else its text."""
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw==",
    } | options
    async with aiohttp.ClientSession() as client:
        url = stage.url + PATH + query
        async with client.get(url, headers=headers, allow_redirects=False) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, (await answer.json())["error"] if is_json else await answer.text()


def num_open(stage: Stage) -> float:
    return stage.metric("warmroute_websockets")


def is_idle(stage: Stage) -> bool:
    return num_open(stage) == 0 and stage.metric("warmroute_inflight_requests") == 0


@pytest.mark.parametrize("query", ["?model=tiny", ""])
async def test_speech_goes_in_and_text_comes_out(query: str, tmp_path: Path) -> None:
    """With a single model the query may omit it; the connection counts while it lasts."""
    log = tmp_path / "decisions.jsonl"
    async with (
        Engines(1, realtime=True) as (engine,),
        on_stage(engine, log__decisions=log) as stage,
    ):
        async with connected(stage, query) as ws:
            assert (await hear(ws))["type"] == "session.created"
            await say(ws, UPDATE, COMMIT, APPEND, APPEND, FINAL)
            heard = [await hear(ws) for _ in range(3)]
            assert [event["type"] for event in heard] == ["transcription.delta"] * 2 + [
                "transcription.done"
            ]
            assert heard[-1]["text"] == " 320 320"
            assert num_open(stage) == 1
            assert stage.metric("warmroute_inflight_requests", replica="r1") == 1
            await ws.close(code=4321, message=b"enough")
        await stage.until(lambda: is_idle(stage))
        await stage.until(lambda: engine.replica.num_in_flight == 0)

        passed_on = "warmroute_websocket_messages_total"
        assert stage.metric(passed_on, by="client") == 5
        assert stage.metric(passed_on, by="replica") == 4
        assert stage.metric("warmroute_websockets_ended_total", by="client") == 1
        assert stage.metric("warmroute_requests_total", api="realtime", outcome="ok") == 1
    (record,) = records_in(log)
    assert (record.api, record.model, record.status) == ("realtime", "tiny", 101)


async def test_a_session_goes_where_the_model_is() -> None:
    """With several models the query must name one."""
    async with (
        Engines(1, realtime=True) as (one,),
        Engines(1, realtime=True, served_model_names=("other",)) as (two,),
        on_stage(one, two) as stage,
    ):
        async with connected(stage, "?model=other") as ws:
            await hear(ws)
            await say(ws, UPDATE | {"model": "other"}, COMMIT, APPEND)
            assert (await hear(ws))["type"] == "transcription.delta"
            assert (one.replica.num_in_flight, two.replica.num_in_flight) == (0, 1)
        await stage.until(lambda: is_idle(stage) and two.replica.num_in_flight == 0)
        for query, expected in (("?model=none", 404), ("", 400), ("?submodel=tiny", 400)):
            status, error = await refused(stage, query)
            assert (status, error["param"]) == (expected, "model")


async def test_a_model_that_cannot_is_said_so() -> None:
    """Its engine has no such route: 403 at the handshake, and nothing against its health."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        status, error = await refused(stage, "?model=tiny")
        assert (status, error["message"]) == (404, "No replica serves GET /v1/realtime.")
        await stage.until(lambda: is_idle(stage))
        assert stage.metric("warmroute_replica_healthy", replica="r1") == 1
        assert stage.metric("warmroute_requests_total", outcome="client_error") == 1
        assert await refused(stage, "?model=tiny") == (status, error)


async def echo(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
    """Send everything back; close as a text says."""
    ws = aiohttp.web.WebSocketResponse(max_msg_size=0, compress=False)
    await ws.prepare(request)
    async for message in ws:
        if message.type is WSMsgType.BINARY:
            await ws.send_bytes(message.data)
        elif message.data.startswith("close "):
            await ws.close(code=int(message.data.split()[1]), message=b"as you say")
        elif message.data == "die":
            assert request.transport is not None
            request.transport.abort()
        else:
            await ws.send_str(message.data)
    return ws


@asynccontextmanager
async def echoing(**settings: Any) -> AsyncIterator[tuple[Stage, FakeEngine]]:
    async with FakeEngine() as engine:
        engine.on_request = echo
        async with on_stage(engine, **settings) as stage:
            yield stage, engine


async def test_messages_are_passed_on_as_they_are() -> None:
    """Text and bytes, empty and larger than any buffer, in order."""
    texts = ["", "ä\u2028\U0001f600", '{"type": "session.update"', "x" * 1_000_000]
    async with echoing() as (stage, engine), connected(stage, "?model=tiny&more=%20x") as ws:
        for text in texts:
            await ws.send_str(text)
            assert await ws.receive_str(timeout=30) == text
        data = bytes(range(256)) * 4096
        await ws.send_bytes(data)
        assert await ws.receive_bytes(timeout=30) == data
        assert engine.received[0].target.endswith("?model=tiny&more=%20x")


@pytest.mark.parametrize(
    ("code", "outcome"), [(1000, "ok"), (3999, "ok"), (1011, "replica_failed")]
)
async def test_an_engine_s_end_is_the_client_s(code: int, outcome: str) -> None:
    """With its code and reason; 1011 says that it failed."""
    async with echoing() as (stage, _):
        async with connected(stage, "?model=tiny", autoclose=False) as ws:
            await ws.send_str(f"close {code}")
            assert await end_of(ws) == (code, "as you say")
        await stage.until(lambda: is_idle(stage))
        assert stage.metric("warmroute_requests_total", outcome=outcome) == 1
        assert stage.metric("warmroute_websockets_ended_total", by="replica") == 1


async def test_an_engine_that_dies_ends_its_clients_with_an_error() -> None:
    """What it had sent arrives; then an error in the API's shape, and 1011."""
    async with echoing() as (stage, _):
        async with connected(stage, "?model=tiny", autoclose=False) as ws:
            await ws.send_str("first")
            assert await ws.receive_str(timeout=30) == "first"
            await ws.send_str("die")
            assert (await hear(ws))["code"] == "upstream_broken"
            assert (await end_of(ws))[0] == 1011
        await stage.until(lambda: is_idle(stage))
        assert stage.metric("warmroute_requests_total", outcome="replica_failed") == 1


async def test_a_client_that_dies_leaves_nothing_behind() -> None:
    """The engine's side is closed, the load given back."""
    async with Engines(1, realtime=True) as (engine,), on_stage(engine) as stage:
        async with connected(stage, "?model=tiny") as ws:
            await hear(ws)
            assert engine.replica.num_in_flight == 1
            connection = ws._response.connection
            assert connection is not None
            assert connection.transport is not None
            connection.transport.abort()
            await stage.until(lambda: is_idle(stage))
            await stage.until(lambda: engine.replica.num_in_flight == 0)
        assert stage.metric("warmroute_requests_total", outcome="client_gone") == 1


async def test_another_replica_takes_what_one_refuses() -> None:
    """Before the upgrade nothing is lost: one that is dead or has no room is left."""
    async with Engines(2, realtime=True) as (one, two), on_stage(one, two) as stage:
        arm(one, "kill")
        await one.changed.wait()
        for _ in range(3):
            async with connected(stage, "?model=tiny") as ws:
                assert (await hear(ws))["type"] == "session.created"
                assert two.replica.num_in_flight == 1
            await stage.until(lambda: two.replica.num_in_flight == 0)
        arm(two, "kill")
        two.changed.clear()
        await two.changed.wait()
        status, error = await refused(stage, "?model=tiny")
        assert (status, "No replica" in error["message"]) == (503, True)


async def test_a_replica_without_the_route_is_left_for_one_that_has_it() -> None:
    """An older engine in a rolling upgrade: it is asked once, and not to blame."""
    async with Engines(1) as (old,), Engines(1, realtime=True) as (new,):
        async with on_stage(old, new) as stage:
            while not stage.router.fleet.members.lacking:  # equal replicas are drawn
                async with connected(stage, "?model=tiny") as ws:
                    assert (await hear(ws))["type"] == "session.created"
                await stage.until(lambda: new.replica.num_in_flight == 0)
            assert stage.metric("warmroute_failovers_total", reason="no_route") <= 1
            assert stage.router.fleet.members.lacking == {"GET /v1/realtime": {"r1"}}
            assert stage.metric("warmroute_replica_healthy") == 2


@pytest.mark.parametrize("status", [500, 503])
async def test_a_handshake_follows_the_rules_of_all_requests(status: int) -> None:
    """A failure is retried elsewhere and counted; the last one's answer is the client's."""

    async def fail(_: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        return aiohttp.web.json_response({"error": {"message": "no room"}}, status=status)

    async with (
        FakeEngine(fail) as one,
        FakeEngine(echo) as two,
        on_stage(one, two) as stage,
    ):
        while not one.received:
            async with connected(stage, "?model=tiny") as ws:
                await ws.send_str("a")
                assert await ws.receive_str(timeout=30) == "a"
        failed = stage.metric("warmroute_failovers_total", replica="r1", reason=f"status_{status}")
        assert failed == 1
        two.on_request = fail
        assert await refused(stage, "?model=tiny") == (status, {"message": "no room"})
        await stage.until(lambda: is_idle(stage))


async def test_the_number_of_connections_is_limited() -> None:
    async with echoing(limits__websockets=1) as (stage, _):
        async with connected(stage, "?model=tiny") as ws:
            await ws.send_str("a")
            assert await ws.receive_str(timeout=30) == "a"
            status, error = await refused(stage, "?model=tiny")
            assert (status, "limits.websockets" in error["message"]) == (503, True)
        await stage.until(lambda: is_idle(stage))


async def test_extensions_are_the_two_ends_own() -> None:
    """They compress if they agree; the router's last frames are plain, which they may be."""
    async with FakeEngine() as engine:

        async def answer(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
            ws = aiohttp.web.WebSocketResponse()
            await ws.prepare(request)
            await ws.send_str(f"{ws.compress} " + await ws.receive_str())
            assert request.transport is not None
            request.transport.abort()
            return ws

        engine.on_request = answer
        async with (
            on_stage(engine) as stage,
            connected(stage, "?model=tiny", compress=15, autoclose=False) as ws,
        ):
            await ws.send_str("x" * 100_000)
            assert await ws.receive_str(timeout=30) == "15 " + "x" * 100_000
            assert (await hear(ws))["code"] == "upstream_broken"
            assert (await end_of(ws))[0] == 1011


async def test_an_idle_connection_is_closed() -> None:
    async with echoing(limits__websocket_idle_s=0.1) as (stage, _):
        async with connected(stage, "?model=tiny", autoclose=False) as ws:
            code, reason = await end_of(ws)
            assert (code, reason != "") == (1001, True)
        await stage.until(lambda: is_idle(stage))


async def test_a_router_that_ends_says_so_to_its_sockets() -> None:
    """1012 after the time for draining; nothing is left open."""
    async with echoing(listen__drain_grace_s=0.0, listen__drain_s=0.1) as (stage, engine):
        async with connected(stage, "?model=tiny", autoclose=False) as ws:
            await ws.send_str("a")
            await ws.receive_str(timeout=30)
            stage.stop.set()
            assert (await hear(ws))["code"] == "shutting_down"
            assert (await end_of(ws))[0] == 1012
        assert engine.received


async def test_what_is_no_websocket_is_refused() -> None:
    """On its route, and WebSockets on others."""
    async with echoing() as (stage, engine):
        async with aiohttp.ClientSession() as client:
            async with client.get(stage.url + PATH) as answer:
                assert answer.status == 400
                assert "is a WebSocket" in (await answer.json())["error"]["message"]
            async with client.post(stage.url + PATH) as answer:
                assert answer.status == 405
        assert not engine.received
        status, _ = await refused(stage, "", **{"Sec-WebSocket-Version": "9"})
        assert status == 400  # the engine's own answer
        await stage.until(lambda: is_idle(stage))


async def test_pages_of_elsewhere_are_not_connected() -> None:
    """A browser opens WebSockets for any page, and lets it read them."""
    async with echoing() as (stage, engine):
        for origin in ("https://evil.example", "null", stage.url + "0"):
            status, error = await refused(stage, "?model=tiny", Origin=origin)
            assert (status, error["param"]) == (403, "Origin")
        assert not engine.received
        async with connected(stage, "?model=tiny", headers={"Origin": stage.url}) as ws:
            await ws.send_str("a")
            assert await ws.receive_str(timeout=30) == "a"


async def test_an_engine_s_redirect_is_not_followed() -> None:
    """It would be sent what its engine may have, the key among it."""
    async with FakeEngine() as engine, FakeEngine() as other, on_stage(engine) as stage:

        async def redirect(_: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
            return aiohttp.web.Response(status=307, headers={"Location": other.url + PATH})

        engine.on_request, other.on_request = redirect, echo
        status, _ = await refused(stage, "?model=tiny")

        assert status == 307
        assert not other.received


async def test_a_secret_in_a_subprotocol_stays_here() -> None:
    """Browsers send keys there; the engine's handshake is the router's own."""
    async with echoing() as (stage, engine):
        async with connected(stage, "?model=tiny", protocols=["realtime", "api-key.s3cret"]) as ws:
            await ws.send_str("a")
            await ws.receive_str(timeout=30)
        assert all("s3cret" not in str(each.headers) for each in engine.received)
        assert "s3cret" not in stage.log


async def test_tenants_connect_with_their_keys(tmp_path: Path) -> None:
    """Only tenants without their own cache or list of models, because messages are not read."""
    keys = {name: f"sk-{SECRET}-{name}" for name in "de"}
    lines = [
        f"{{name: {name}, keys: ['{written(digest_of(key))}'], cache: shared, {limit}}}"
        for (name, key), limit in zip(
            keys.items(), ("max_in_flight: 1", "models: [tiny]"), strict=True
        )
    ]
    settings = {"tenants__file": tenants_file(tmp_path, *lines)}
    of_d, of_e = ({"Authorization": f"Bearer {key}"} for key in keys.values())
    async with Engines(1, realtime=True) as (engine,), on_stage(engine, **settings) as stage:
        assert (await refused(stage, "?model=tiny"))[0] == 401
        assert (await refused(stage, "?model=tiny", **A))[0] == 415
        assert (await refused(stage, "?model=tiny", **of_e))[0] == 415
        async with connected(stage, "?model=tiny", headers=of_d) as ws:
            await hear(ws)
            assert (await refused(stage, "?model=tiny", **of_d))[0] == 429
        await stage.until(lambda: is_idle(stage))
        async with connected(stage, "?model=tiny", headers=of_d) as ws:
            await hear(ws)


async def test_who_is_slow_slows_the_other_down() -> None:
    """What a client does not take is not kept here: its engine waits."""
    num, num_sent, piece = 200, 0, b"x" * 1_000_000

    async def flood(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        nonlocal num_sent
        ws = aiohttp.web.WebSocketResponse(compress=False)
        await ws.prepare(request)
        for _ in range(num):
            await ws.send_bytes(piece)
            num_sent += 1
        await ws.close()
        return ws

    async with FakeEngine(flood) as engine, on_stage(engine) as stage:
        async with connected(stage, "?model=tiny") as ws:
            seen, num_same = -1, 0
            while num_same < 20:  # looks at which nothing has moved
                await asyncio.sleep(0.02)
                num_same = num_same + 1 if num_sent == seen else 0
                seen = num_sent
            assert num_sent < num
            for _ in range(num):
                assert await ws.receive_bytes(timeout=30) == piece
        assert num_sent == num
