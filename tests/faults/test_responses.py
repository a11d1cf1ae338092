"""Responses that engines keep: a request for one comes to the engine that has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from router.cluster import redis_records
from router.cluster import shares as record_share
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, Json, Reply, Stage, on_stage
from tests.faults.tenants import A, B, tenants_file
from tests.redis_servers import Start

PATH = "/v1/responses"


class Keeper(FakeEngine):
    """An engine with a store of responses, as vLLM has one with VLLM_ENABLE_RESPONSES_API_STORE."""

    def __init__(self) -> None:
        super().__init__(self.answer)
        self.kept: dict[str, Json] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response_id = request.path.split("/")[3] if request.path.count("/") > 2 else None
        body = orjson.loads(await request.read() or b"{}")
        asked = response_id or body.get("previous_response_id")
        if asked is not None and asked not in self.kept:
            return web.json_response(
                {"error": {"message": f"Response with id '{asked}' not found.", "code": 404}},
                status=404,
            )
        if response_id is not None:
            return web.json_response(self.kept[response_id])
        made = {"id": f"resp_{id(self):x}_{len(self.kept)}", "object": "response", "output": []}
        self.kept[made["id"]] = made
        if not body.get("stream"):
            return web.json_response(made)
        events = [
            {"response": made, "sequence_number": number, "type": f"response.{kind}"}
            for number, kind in enumerate(("created", "in_progress", "completed"))
        ]
        lines = (b"event: x\ndata: " + orjson.dumps(event) + b"\n\n" for event in events)
        return web.Response(body=b"".join(lines), content_type="text/event-stream")


@asynccontextmanager
async def keepers(number: int = 3) -> AsyncIterator[list[Keeper]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Keeper()) for _ in range(number)]


async def create(stage: Stage, headers: Json | None = None, **fields: Any) -> str:
    """Have a response made; return its id."""
    reply = await stage.ask(
        {"model": "tiny", "input": f"{SECRET} hi", **fields}, PATH, headers=headers
    )
    assert reply.status == 200
    return str(reply.events[0]["response"]["id"] if fields.get("stream") else reply.json()["id"])


async def about(stage: Stage, response_id: str, way: str) -> Reply:
    """Ask something about a response, or go on from it."""
    path = f"{PATH}/{response_id}"
    if way in ("go on", "stream"):
        body: Json = {"model": "tiny", "input": f"{SECRET} hi", "stream": way == "stream"}
        return await stage.ask(body | {"previous_response_id": response_id}, PATH)
    if way == "cancel":
        return await stage.ask(path=path + "/cancel", method="POST")
    if way == "input_items":
        return await stage.ask(path=path + "/input_items", method="GET")
    return await stage.ask(path=path, method=way)


async def retrieve(stage: Stage, response_id: str, headers: Json | None = None) -> Reply:
    return await stage.ask(path=f"{PATH}/{response_id}", method="GET", headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_found_where_it_was_issued(stream: bool) -> None:
    """To be read, cancelled, deleted, and gone on from; from whichever session one asks."""
    async with keepers() as engines, on_stage(*engines, policy__name="round_robin") as stage:
        sessions = [{"X-Session-ID": f"{SECRET}-{number}"} for number in range(6)]
        ids = [await create(stage, headers, stream=stream) for headers in sessions]

        for response_id, headers in zip(ids, reversed(sessions), strict=True):
            assert (await retrieve(stage, response_id, headers)).json()["id"] == response_id
            for method, tail in (("POST", "/cancel"), ("GET", "/input_items"), ("DELETE", "")):
                reply = await stage.ask(
                    path=f"{PATH}/{response_id}{tail}", method=method, headers=headers
                )
                assert reply.status == 200
            await create(stage, headers, previous_response_id=response_id)
        assert stage.metric("warmroute_responses_found_total", result="here") == 30


@pytest.mark.parametrize("way", ["GET", "DELETE", "cancel", "input_items", "go on", "stream"])
async def test_what_no_router_knows_is_asked_for_at_every_replica(way: str) -> None:
    """Each engine gets it once, and the last one has the word."""
    async with keepers() as engines, on_stage(*engines, forward__max_tries=1) as stage:
        reply = await about(stage, "resp_unheard_of", way)

        assert (reply.status, reply.error["code"]) == (404, 404)
        assert [len(engine.received) for engine in engines] == [1, 1, 1]
        assert stage.metric("warmroute_responses_found_total", result="unknown") == 1
        assert stage.metric("warmroute_failovers_total") == 0  # it was a question, no failure
        assert stage.metric("warmroute_replica_healthy") == 3
        assert stage.metric("warmroute_requests_total", outcome="client_error") == 1


@pytest.mark.parametrize("way", ["GET", "DELETE", "cancel", "input_items", "go on", "stream"])
async def test_a_response_that_another_router_had_made_is_found(way: str) -> None:
    """This router was restarted, say. It is asked for, and its replica is known from then on."""
    async with keepers() as engines:
        engines[2].kept["resp_1"] = {"id": "resp_1", "object": "response", "output": []}
        async with on_stage(*engines) as stage:
            reply = await about(stage, "resp_1", way)
            num_received = len(engines[2].received)
            again = await about(stage, "resp_1", way)

            assert (reply.status, again.status) == (200, 200)
            assert num_received == 1
            assert len(engines[2].received) == 2
            assert all(len(engine.received) <= 1 for engine in engines[:2])
            assert stage.metric("warmroute_responses_found_total", result="here") == 1


async def test_a_model_that_does_not_exist_is_no_response_that_is_missing() -> None:
    """The first engine's word about it counts: it does not name the response."""

    async def answer(_: web.Request) -> web.StreamResponse:
        error = {"message": "The model `tiny` does not exist.", "code": 404}
        return web.json_response({"error": error}, status=404)

    async with FakeEngine(answer) as a, FakeEngine(answer) as b, on_stage(a, b) as stage:
        body = {"model": "tiny", "input": "hi", "previous_response_id": "resp_1"}

        assert (await stage.ask(body, PATH)).status == 404
        assert len(a.received) + len(b.received) == 1


async def test_a_replica_without_the_route_does_not_hide_that_none_has_the_response() -> None:
    """The client gets a 404 in the API's words, whoever is asked last."""

    async def old(_: web.Request) -> web.StreamResponse:
        return web.json_response({"detail": "Not Found"}, status=404)

    async with keepers(1) as (new,), FakeEngine(old) as first, FakeEngine(old) as last:
        async with on_stage(first, new, last) as stage:
            for _ in range(3):
                reply = await retrieve(stage, "resp_1")

                assert reply.status == 404
                assert reply.error["message"] == "Response with id 'resp_1' not found."
            assert len(first.received) <= 1
            assert len(last.received) <= 1


async def test_a_response_that_is_not_kept_is_not_remembered() -> None:
    """`store: false`, as Codex sends it: no engine will have it."""
    async with keepers() as engines, on_stage(*engines) as stage:
        await create(stage, store=False)

        assert len(stage.router.responses) == 0


@pytest.mark.parametrize("way", ["dead", "removed"])
async def test_a_response_of_a_replica_that_is_gone_is_not_found(way: str) -> None:
    """In the API's own words, and at no other engine; neither can it be gone on from."""
    async with keepers(2) as engines, on_stage(*engines, policy__name="round_robin") as stage:
        response_id = await create(stage)
        (owner,) = (engine for engine in engines if engine.kept)
        name = next(r.name for r in stage.router.fleet.members.replicas if r.url == owner.url)
        if way == "dead":
            await owner.die()
        else:
            await stage.admin(f"/admin/replicas/{name}", method="DELETE")
            await stage.until(lambda: stage.router.registry.find(name) is None)
        created = {"model": "tiny", "input": "hi", "previous_response_id": response_id}

        replies = [await retrieve(stage, response_id), await stage.ask(created, PATH)]

        for reply in replies:
            assert reply.status == 404
            assert reply.error == {
                "message": f"Response with id '{response_id}' not found.",
                "type": "invalid_request_error",
                "param": "response_id",
                "code": 404,
            }


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_draining_replica_still_has_its_responses(is_known: bool) -> None:
    """It takes no new work, but what it issued is there alone, known to this router or not."""
    async with keepers(2) as engines, on_stage(*engines, policy__name="round_robin") as stage:
        response_id = "resp_1"
        if is_known:
            response_id = await create(stage)
        else:
            engines[1].kept[response_id] = {"id": "resp_1", "object": "response", "output": []}
        owner = next(engine for engine in engines if engine.kept)
        name = next(r.name for r in stage.router.fleet.members.replicas if r.url == owner.url)
        stage.router.fleet.members.drain(name)

        assert (await retrieve(stage, response_id)).status == 200


async def test_tenants_do_not_reach_one_anothers_responses(tmp_path: Path) -> None:
    """To another tenant a response is not there; nor is one that no router knows."""
    settings = {"tenants__file": tenants_file(tmp_path), "policy__name": "round_robin"}
    async with keepers(2) as engines, on_stage(*engines, **settings) as stage:
        of_a = await create(stage, A)
        chosen = await create(stage, A, request_id="resp_mine")

        assert (await retrieve(stage, of_a, A)).json()["id"] == of_a
        num_received = sum(len(engine.received) for engine in engines)
        for response_id, headers in ((of_a, B), ("resp_unheard_of", A), (chosen, A)):
            reply = await retrieve(stage, response_id, headers)
            assert (reply.status, reply.error["param"]) == (404, "response_id")
        assert sum(len(engine.received) for engine in engines) == num_received


async def test_routers_share_what_they_know(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any router, and from one that joins later."""
    monkeypatch.setattr(redis_records, "OWNER_TIMEOUT_S", 30.0)  # on a busy machine
    redis = start_redis()
    async with keepers() as engines, AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(on_stage(*engines, redis=redis, redis__timeout_s=30.0))
            for _ in range(2)
        ]
        for stage in (first, second):
            await stage.until(lambda stage=stage: stage.metric("warmroute_redis_up") == 1)  # type: ignore[misc]
        ids = [await create(first) for _ in range(6)]
        assert not first.router.responses.unsaved()  # it was written before the answer went out

        for response_id in ids:
            assert (await retrieve(second, response_id)).json()["id"] == response_id
        assert second.metric("warmroute_responses_found_total", result="redis") == 6
        assert (await retrieve(second, ids[0])).status == 200
        assert second.metric("warmroute_responses_found_total", result="here") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_another_router_finds_a_tenants_response_at_once(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: bool
) -> None:
    """Right after the answer, and after Redis lost its data; what nobody issued stays a 404."""
    monkeypatch.setattr(redis_records, "OWNER_TIMEOUT_S", 30.0)  # on a busy machine
    monkeypatch.setattr(record_share, "_RESPONSES_S", 60.0)  # what is written later is too late
    redis = start_redis()
    settings = {"redis": redis, "redis__timeout_s": 30.0, "tenants__file": tenants_file(tmp_path)}
    async with keepers() as engines, AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(on_stage(*engines, **settings)) for _ in range(2)
        ]
        for stage in (first, second):
            await stage.until(lambda stage=stage: stage.metric("warmroute_redis_up") == 1)  # type: ignore[misc]
        for _ in range(20):
            response_id = await create(first, A, stream=stream)
            assert (await retrieve(second, response_id, A)).status == 200
        unseen = await create(first, A, stream=stream)

        redis.client.flushall()
        await first.until(lambda: first.metric("warmroute_sharing_total", kind="outages") == 1)
        await first.until(lambda: first.metric("warmroute_redis_up") == 1)
        await second.until(lambda: second.metric("warmroute_redis_up") == 1)
        await first.until(lambda: not first.router.responses.unsaved())
        assert (await retrieve(second, unseen, A)).status == 200
        assert (await retrieve(second, "resp_unheard_of", A)).status == 404


async def test_no_request_fails_because_redis_does(start_redis: Start) -> None:
    """What a router issued itself it knows; the rest is placed as any request."""
    redis = start_redis()
    async with keepers(1) as engines, on_stage(*engines, redis=redis) as stage:
        await stage.until(lambda: stage.metric("warmroute_redis_up") == 1)
        redis.pause()
        response_id = await create(stage)

        assert (await retrieve(stage, response_id)).status == 200
        assert (await retrieve(stage, "resp_unheard_of")).status == 404
        redis.resume()
