"""The pages of the public port that clients of vLLM know."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.tiny_model import MODEL_DIR
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, RawClient, Reply, Stage, arm, on_stage
from tests.faults.tenants import tenants_file

QUICK = {"health__interval_s": 0.02, "health__load_interval_s": 0.02}


async def get(stage: Stage, path: str, method: str = "GET") -> Reply:
    return await stage.ask(path=path, method=method)


def serving(*models: tuple[str, int | None]) -> FakeEngine:
    """Be an engine with these models, by name and length."""
    data: list[dict[str, Any]] = [
        {"id": name, "object": "model", "root": str(MODEL_DIR), "max_model_len": length}
        for name, length in models
    ]
    return FakeEngine(**{"v1/models": {"object": "list", "data": data}})


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_is_that_of_the_replicas(path: str) -> None:
    """200 while a request could be answered, else 503; as vLLM has it, without a body."""
    async with Engines(2) as engines, on_stage(*engines, **QUICK) as stage:
        replies = [await get(stage, path, method) for method in ("GET", "HEAD")]
        assert [(reply.status, reply.body) for reply in replies] == [(200, b"")] * 2
        arm(engines[0], "kill")
        await stage.until(lambda: stage.metric("warmroute_replica_healthy") == 1)
        assert (await get(stage, path)).status == 200
        arm(engines[1], "kill")
        await stage.until(lambda: stage.metric("warmroute_replica_healthy") == 0)
        assert (await get(stage, path)).status == 503


@pytest.mark.parametrize("way", ["drained", "asleep"])
async def test_health_is_503_where_no_replica_takes_requests(way: str) -> None:
    """Though its process is well."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        fleet = stage.router.fleet
        if way == "drained":
            fleet.members.drain("r1")
        else:
            fleet.members.set_sleep("r1", asleep=True, paused=False)

        assert (await get(stage, "/health")).status == 503


async def test_health_is_503_before_a_replica_is_found() -> None:
    """And the router's own page is there."""
    async with on_stage("http://127.0.0.1:9", ready=False) as stage:
        assert (await get(stage, "/health")).status == 503
        assert (await get(stage, "/version")).status == 503
        assert (await get(stage, "/healthz")).status == 200


async def test_a_ping_may_be_a_post() -> None:
    """As at vLLM; the connection goes on behind its body."""
    request = b"POST /ping HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}"
    async with Engines(1) as engines, on_stage(*engines) as stage:
        async with RawClient.connected(stage.url) as client:
            for _ in range(2):
                await client.send(request)
                assert await client.status() == 200
        assert (await get(stage, "/health", "POST")).status == 405
        assert (await get(stage, "/version", "POST")).status == 405


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["0.32.0"], "0.32.0"),
        (["0.33.0", "0.9.2"], "0.9.2"),
        (["0.33.0rc1", "0.32.1.dev3+g1"], "0.32.1.dev3+g1"),
        ([None, "0.32.0"], "0.32.0"),
        ([None], None),
    ],
)
async def test_the_version_is_the_oldest_replicas(
    versions: list[str | None], expected: str | None
) -> None:
    """So what a client may rely on is there wherever its request goes."""
    engines = [
        FakeEngine(**({} if version is None else {"version": {"version": version}}))
        for version in versions
    ]
    async with engines[0], engines[-1] if len(engines) > 1 else FakeEngine():
        async with on_stage(*engines) as stage:
            assert (await get(stage, "/version")).json() == {"version": expected}


async def test_a_models_length_is_the_shortest_of_its_replicas() -> None:
    """A request of that length fits all of them."""
    one = serving(("a", 9000), ("b", 500), ("c", None))
    two = serving(("a", 4000), ("b", 800), ("c", 70))
    async with one, two, on_stage(one, two) as stage:
        listed = (await get(stage, "/v1/models")).json()["data"]
        single = (await get(stage, "/v1/models/a")).json()

        assert {each["id"]: each["max_model_len"] for each in listed} == {
            "a": 4000,
            "b": 500,
            "c": 70,
        }
        assert single["max_model_len"] == 4000


async def test_other_names_are_listed() -> None:
    """As engines list all names of a model; one with `*` answers for each name that fits."""
    aliases = {"big": "a", "b": "a", "gone": "c", "claude-*": "b"}
    one = serving(("a", 9000), ("b", 500))
    async with one, on_stage(one, models__aliases=aliases) as stage:
        listed = (await get(stage, "/v1/models")).json()["data"]
        single = (await get(stage, "/v1/models/claude-opus-9")).json()
        absent = await get(stage, "/v1/models/gone")

        assert [each["id"] for each in listed] == ["a", "b", "big"]
        assert listed[2] == {**listed[0], "id": "big"}
        assert (single["id"], single["max_model_len"]) == ("claude-opus-9", 500)
        assert absent.status == 404


async def test_they_need_no_key(tmp_path: Any) -> None:
    """As vLLM with --api-key; they say nothing of tenants."""
    settings = {"tenants__file": tenants_file(tmp_path)}
    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:
        for path in ("/health", "/ping", "/version"):
            reply = await stage.ask(path=path, method="GET", headers={"Authorization": "Bearer x"})
            assert reply.status == 200
