"""Replicas that lack a route, as an older engine does in a rolling upgrade.

Page: docs/operate/failures.md.
"""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.faults.fake_engine import MODELS, FakeEngine, Handler
from tests.faults.stage import Json, Reply, Stage, chat, on_stage, words

FAR = {"health__interval_s": 60.0}
NOT_FOUND: Json = {"detail": "Not Found"}
NOT_ALLOWED: Json = {"detail": "Method Not Allowed"}
BODIES: dict[str, Json] = {
    "/v1/messages": chat(words(1)),
    "/v1/messages/count_tokens": chat(words(1)) | {"tools": [{"type": "unheard_of"}]},
    "/v1/responses": {"model": "tiny", "input": words(1)},
    "/v1/responses/render": {"model": "tiny", "input": words(1)},
    "/v1/embeddings": {"model": "tiny", "input": words(1)},
    "/v1/chat/completions": chat(words(1)),
    "/rerank": {"model": "tiny", "query": "a", "documents": ["b"]},
    "/tokenize": {"model": "tiny", "prompt": words(1)},
}


def lacks(*paths: str, status: int = 404, said: Json | str = NOT_FOUND) -> Handler:
    """Be an engine that has all routes but these."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path not in paths:
            return web.json_response({"object": "chat.completion", "choices": []})
        if isinstance(said, str):
            return web.Response(status=status, text=said)
        return web.json_response(said, status=status)

    return answer


def on(engine: FakeEngine, path: str) -> int:
    """Count clients' requests; the router's own comparison of token ids has no request id."""
    return sum(each.target == path and "X-Request-Id" in each.headers for each in engine.received)


async def ask_each_way(stage: Stage, path: str) -> list[Reply]:
    """Ask so often that each replica had its turn."""
    return [await stage.ask(BODIES[path], path) for _ in range(6)]


@pytest.mark.parametrize("path", BODIES)
async def test_another_replica_is_asked_and_the_router_remembers(path: str) -> None:
    """The client sees nothing of it, and no replica is to blame."""
    async with FakeEngine(lacks(path)) as old, FakeEngine() as new:
        for engine in (old, new):
            engine.tokenizes = path == "/tokenize"
        async with on_stage(old, new, policy__name="round_robin", **FAR) as stage:
            replies = await ask_each_way(stage, path)

            assert {reply.status for reply in replies} == {200}
            assert on(old, path) <= 1
            assert on(new, path) == 6
            num_asked = stage.metric("warmroute_failovers_total", reason="no_route")
            assert num_asked == on(old, path)
            assert stage.metric("warmroute_replica_healthy") == 2


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (405, NOT_ALLOWED),
        (404, {"error": {"message": "Not Found", "type": "Not Found", "code": 404}}),
        (404, {"object": "error", "message": "Not Found", "code": 404}),
        (404, "Not Found"),
    ],
)
async def test_servers_say_it_in_several_ways(status: int, said: Json | str) -> None:
    """FastAPI, starlette, and vLLM in its own shapes."""
    path = "/v1/messages"
    old = lacks(path, status=status, said=said)
    async with FakeEngine(old) as a, FakeEngine() as b:
        async with on_stage(a, b, policy__name="round_robin", **FAR) as stage:
            assert {r.status for r in await ask_each_way(stage, path)} == {200}
            assert on(a, path) == 1


async def test_its_other_routes_are_used() -> None:
    """Only what it lacks goes elsewhere."""
    async with FakeEngine(lacks("/v1/messages")) as old, FakeEngine() as new:
        async with on_stage(old, new, policy__name="round_robin", **FAR) as stage:
            await ask_each_way(stage, "/v1/messages")
            await ask_each_way(stage, "/v1/chat/completions")

            assert on(old, "/v1/chat/completions") == 3
            assert "replica lacks a route: others get its requests" in stage.log
            assert "route=POST /v1/messages" in stage.log.replace('"', "")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", [1, 4])
async def test_a_route_that_all_lack_is_404_in_the_apis_own_shape(path: str, number: int) -> None:
    """Each is asked once, and then none."""
    async with FakeEngine(lacks(path)) as a, FakeEngine(lacks(path)) as b:
        engines = [a, b]
        for engine in engines:
            engine.tokenizes = path == "/tokenize"
        stages = on_stage(*engines[: min(number, 2)], forward__max_tries=1, **FAR)
        async with stages as stage:
            for _ in range(3):
                reply = await stage.ask(BODIES[path], path)

                assert reply.status == 404
                what = f"No replica serves POST {path}."
                if path.startswith("/v1/messages"):
                    error = {"type": "not_found_error", "message": what}
                    assert reply.json() == {"type": "error", "error": error}
                else:
                    assert reply.error["message"] == what
                    assert (reply.error["type"], reply.error["code"]) == ("NotFoundError", 404)

            assert [on(engine, path) for engine in engines[: min(number, 2)]] == [1] * min(
                number, 2
            )
            assert stage.metric("warmroute_replica_healthy") == min(number, 2)
            assert stage.metric("warmroute_requests_total", outcome="replica_failed") == 0


async def test_a_replica_that_may_have_it_but_is_down_is_no_404() -> None:
    """The client may come back: the replica with the route may, too."""
    path = "/v1/responses"
    async with FakeEngine(lacks(path)) as old, FakeEngine() as new:
        async with on_stage(old, new, policy__name="round_robin", **FAR) as stage:
            await ask_each_way(stage, path)
            await new.die()
            replies = [await stage.ask(BODIES[path], path) for _ in range(2)]

            assert [reply.status for reply in replies] == [503, 503]
            assert all("Retry-After" in reply.headers for reply in replies)


async def test_a_route_of_a_replica_that_is_still_asked_waits_for_it() -> None:
    """Right after the start one replica was found, and the other one has the route."""
    path = "/v1/responses"

    async def slow(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            await asyncio.sleep(0.3)
            return web.json_response(MODELS)
        return web.json_response({"object": "response"})

    async with FakeEngine(lacks(path)) as old, FakeEngine(slow) as new:
        del new.pages["/v1/models"]
        async with on_stage(old, new, ready=False) as stage:
            assert (await stage.ask(BODIES[path], path)).status == 200


async def test_a_restarted_replica_is_asked_again() -> None:
    """It may be the next release: what was known of the process is forgotten with it."""
    path = "/v1/responses"
    quick = {"health__interval_s": 0.02, "health__load_interval_s": 0.02}
    async with FakeEngine(lacks(path)) as engine:
        async with on_stage(engine, policy__name="round_robin", **quick) as stage:
            assert (await stage.ask(BODIES[path], path)).status == 404
            engine.on_request = FakeEngine().on_request
            assert (await stage.ask(BODIES[path], path)).status == 404
            assert on(engine, path) == 1

            engine.pages["/metrics"] = (200, "process_start_time_seconds 1.0\n")
            await stage.until(lambda: "replica restarted" in stage.log)
            await stage.until(lambda: not any(stage.router.fleet.members.lacking.values()))

            assert (await stage.ask(BODIES[path], path)).status == 200


async def test_what_has_side_effects_moves_on_too() -> None:
    """Nothing was done there."""
    path = "/v1/responses"
    async with FakeEngine(lacks(path)) as old, FakeEngine() as new:
        async with on_stage(old, new, policy__name="round_robin", **FAR) as stage:
            body = BODIES[path] | {"background": True, "store": True}
            replies = [await stage.ask(body, path) for _ in range(4)]

            assert {reply.status for reply in replies} == {200}
            assert (on(old, path), on(new, path)) == (1, 4)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_routes_with_an_id_are_one_route(method: str) -> None:
    """However many ids clients name."""

    async def old(request: web.Request) -> web.StreamResponse:
        return web.json_response(NOT_FOUND, status=404)

    async with FakeEngine(old) as a, FakeEngine() as b:
        async with on_stage(a, b, **FAR) as stage:
            for number in range(6):
                reply = await stage.ask(path=f"/v1/responses/resp_{number}", method=method)
                assert reply.status == 200

            assert len(a.received) <= 1
            assert len(stage.router.fleet.members.lacking) <= 1


@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": "The model `tiny` does not exist.", "code": 404}},
        {"error": {"message": "Not Found: that model", "code": 404}},
        {"detail": "Not Found here"},
        {"detail": [{"msg": "Not Found"}]},
        "",
        "<html><body>404 Not Found</body></html>",
    ],
)
async def test_another_404_is_the_clients(said: Json | str) -> None:
    """Of the model, for instance: it is passed on as it came, from the first replica."""
    path = "/v1/embeddings"
    handler = lacks(path, said=said)
    async with FakeEngine(handler) as a, FakeEngine(handler) as b, on_stage(a, b, **FAR) as stage:
        reply = await stage.ask(BODIES[path], path)

        assert reply.status == 404
        assert (reply.json() if isinstance(said, dict) else reply.body.decode()) == said
        assert len(a.received) + len(b.received) == 1
        assert not stage.router.fleet.members.lacking


async def test_an_operators_route_is_the_other_servers_matter() -> None:
    """There a thing that does not exist may be told in the same words."""
    path = "/v1/files/1"
    handler = lacks(path)
    routes = {"forward__routes": ["/v1/files/*"]}
    async with FakeEngine(handler) as a, FakeEngine(handler) as b:
        async with on_stage(a, b, **routes, **FAR) as stage:
            reply = await stage.ask(path=path, method="GET")

            assert (reply.status, reply.json()) == (404, NOT_FOUND)
            assert len(a.received) + len(b.received) == 1


async def test_an_unknown_model_stays_one() -> None:
    """Though the route is lacking somewhere."""
    path = "/v1/embeddings"
    async with FakeEngine(lacks(path)) as old, on_stage(old, **FAR) as stage:
        await stage.ask(BODIES[path], path)
        reply = await stage.ask(BODIES[path] | {"model": "other"}, path)

        assert (reply.status, reply.error["param"]) == (404, "model")
