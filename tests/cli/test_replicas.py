"""The commands of `warmroute replicas`, against a whole router.

`warmroute engine`: an order says where it goes.
"""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from router.cli.replicas import table
from tests.cli.running import beside
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, chat, on_stage, words


async def test_replicas_are_listed_added_drained_and_removed() -> None:
    """Each order reports what it did; the list has the status of each replica."""
    closed = "http://127.0.0.1:9"
    async with Engines(2) as (first, second), on_stage(first, closed) as stage:
        await stage.ask(chat(words(1)))
        await stage.settled(first)
        added = await beside(
            stage, "replicas", "add", second.url, "--name", "east", "--role", "decode"
        )
        again = json.loads((await beside(stage, "replicas", "add", second.url, "--json")).stdout)
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)
        drained = await beside(stage, "replicas", "drain", "east")
        listed = await beside(stage, "replicas", "list")
        back = await beside(stage, "replicas", "undrain", "east")
        raw = json.loads((await beside(stage, "replicas", "list", "--json")).stdout)
        used = await beside(stage, "replicas", "list")
        removed = await beside(stage, "replicas", "remove", "r2", "--now")
        leaving = await beside(stage, "replicas", "remove", "east")
        await stage.until(lambda: len(stage.router.registry.entries) == 1)

    assert added.stdout.startswith(f"east: {second.url} added; ")
    assert again["name"] == "east"
    assert drained.stdout == "east gets no new requests\n"
    assert back.stdout == "east gets requests again\n"
    assert removed.stdout == "r2 is removed\n"
    assert leaving.stdout == "east is removed as soon as its answers in flight are done\n"
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert lines[1][:4] == ["r1", first.url, "yes", "exact"]
    assert "not yet: /v1/models" in listed.stdout  # (wrapped)
    assert ["east", second.url, "no:", "draining"] in [line[:4] for line in lines]
    assert "yes: decode" in used.stdout
    assert raw["replicas"][2]["replica"]["role"] == "decode"
    assert [replica["name"] for replica in raw["replicas"]] == ["r1", "r2", "east"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("drain", "r9"), "no replica 'r9'; known: r1"),
        (("remove", "a/b"), "no replica 'a/b'; known: r1"),
        (("add", "ftp://x"), "url: 'ftp://x' is not a base URL"),
        (("add", "http://127.0.0.1:9", "--name", "r1"), "the name 'r1' is taken"),
    ],
)
async def test_what_is_refused_is_one_line(args: tuple[str, ...], said: str) -> None:
    """In the router's own words; exit status 1."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        result = await beside(stage, "replicas", *args)

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


def test_an_empty_fleet_says_what_to_do() -> None:
    """No table without rows."""
    assert "warmroute replicas add" in table({"replicas": []})


def test_what_is_out_says_why() -> None:
    """Leaving, or out by its health; markup in a reason is text."""
    rank = {"id": "r1", "state": "down", "reason": "probe [refused]", "num_requests": 0}
    rank |= {"queue_ms": 0.0, "cache": "blind", "cache_reason": "no events yet"}
    replica = {"name": "r1", "url": "http://x", "draining": False, "leaving": False}
    replica |= {"ranks": [rank | {"num_gpu_blocks": 0}]}

    assert "no: down, probe [refused]" in table({"replicas": [replica]})
    assert "blind: no events yet" in table({"replicas": [replica]})
    assert "no: leaving" in table({"replicas": [replica | {"leaving": True}]})


def test_an_evacuation_says_how_far_it_is() -> None:
    left = {"sessions": 2, "requests": 1, "left_s": 9.0, "is_over": False}
    replica = {"name": "r1", "url": "http://x", "draining": True, "leaving": False}
    replica |= {"evacuation": left, "waiting_for": "http://x: refused"}
    said = " ".join(table({"replicas": [replica]}).split())

    for part in ("no: draining", "2 live", "1 in flight"):
        assert part in said


async def _does(_: web.Request) -> web.Response:
    return web.json_response({})


@pytest.mark.parametrize(
    "route",
    ["sleep", "pause", "release_kv_cache_memory", "reset_prefix_cache", "reset_mm_cache",
     "reset_encoder_cache", "wake_up", "resume", "start_profile", "unload_lora_adapter"],
)  # fmt: skip
async def test_an_order_for_nobody_in_particular_reaches_no_engine(route: str) -> None:
    async with FakeEngine(_does) as a, FakeEngine(_does) as b, on_stage(a, b) as stage:
        result = await beside(stage, "engine", route)
        both = await beside(stage, "engine", route, "--all", "--replica", "r1")

        assert (a.received, b.received) == ([], [])
    assert (result.exit_code, both.exit_code) == (2, 2)
    assert f"say where: {route} --replica NAME" in result.stderr
    assert "--all" in result.stderr
    assert "not both" in both.stderr


@pytest.mark.parametrize(("where", "sent"), [(("--all",), (1, 1)), (("--replica", "r2"), (0, 1))])
async def test_an_order_goes_where_it_says(where: tuple[str, ...], sent: tuple[int, int]) -> None:
    async with FakeEngine(_does) as a, FakeEngine(_does) as b, on_stage(a, b) as stage:
        result = await beside(stage, "engine", "sleep", "level=1", *where)

        assert (len(a.received), len(b.received)) == sent
    assert result.exit_code == 0


async def test_a_question_may_go_to_all() -> None:
    """It changes nothing."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        result = await beside(stage, "engine", "is_sleeping")

    assert result.stdout.count('{"is_sleeping": false}') == 2
