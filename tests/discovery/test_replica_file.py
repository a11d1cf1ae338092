"""router.discovery.replica_file: a file of replicas, read, refused and followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from router.base.errors import ConfigError
from router.config import ReplicaConfig
from router.discovery.replica_file import parse
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, Stage, chat, on_stage, words
from tests.redis_servers import Start

STAGE = {"ready": False, "discovery__hosts": ["loopback"]}


@pytest.mark.parametrize(
    "text",
    [
        "- http://a:1\n- {url: 'http://b:1', name: b}\n",
        "replicas:\n  - http://a:1\n  - {url: 'http://b:1', name: b}\n",
        json.dumps(["http://a:1", {"url": "http://b:1", "name": "b"}]),
    ],
)
def test_it_has_the_shape_of_the_configurations_list(text: str) -> None:
    assert parse(text.encode()) == (
        ReplicaConfig(url="http://a:1"),
        ReplicaConfig(url="http://b:1", name="b"),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- http://a:1\n- {url: http://b:1", "line 2: not YAML"),
        ("- {url: 'http://a:1', nme: a}", r"unknown key 'replicas\[0\].nme': did you mean 'name'"),
        ("- {name: a}", r"replicas\[0\].*url"),
        ("- http://a:1\n- 7", r"replicas\[1\]"),
        ("- http://a:1\n- ftp://b", r"replicas\[1\].url: 'ftp://b' is not a base URL"),
        ("- http://a:1\n- http://a:1/", r"replicas\[1\].url: is already replicas\[0\].url"),
        ("[{url: 'http://a', name: x}, {url: 'http://b', name: x}]", r"replicas\[1\].name: 'x'"),
        ("", "write a list of replicas"),
        ("half", "write a list of replicas"),
        ("servers: []", "unknown key 'servers'"),
        ("[" * 5000, "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(text.encode())


def put(file: Path, *urls: str) -> None:
    """Replace a file in one step."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(list(urls)))
    os.replace(new, file)


def urls(stage: Stage) -> set[str]:
    return {replica.url for replica in stage.router.fleet.members.replicas}


async def test_a_file_is_followed_while_the_router_serves(tmp_path: Path) -> None:
    file = tmp_path / "replicas.json"
    async with Engines(2) as (a, b):
        put(file, a.url)
        async with on_stage(discovery__file=file, **STAGE) as stage:
            await stage.ready()
            assert (await stage.ask(chat(words(1)))).status == 200
            put(file, a.url, b.url)
            await stage.until(lambda: urls(stage) == {a.url, b.url})

            file.write_text("- http://127.0.0.1:1\n- {url")
            failing = ("warmroute_discovery_failing", f"file {file}")
            await stage.until(lambda: stage.metric(failing[0], source=failing[1]) == 1)
            shown = (await stage.admin("/admin/replicas")).json()
            assert "line 2: not YAML" in shown["sources"][0]["reason"]
            assert {each["source"] for each in shown["replicas"]} == {f"file {file}"}
            assert urls(stage) == {a.url, b.url}

            put(file, b.url)
            await stage.until(lambda: urls(stage) == {b.url})
            assert stage.metric(failing[0], source=failing[1]) == 0
            assert (await stage.ask(chat(words(1)))).status == 200
            assert stage.log.count("its last replicas stay") == 2  # in two log forms


async def test_the_links_of_a_config_map_are_followed(tmp_path: Path) -> None:
    async with Engines(2) as (a, b):
        for name, engine in (("v1", a), ("v2", b)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "replicas.yaml").write_text(f"- {engine.url}\n")
        os.symlink("v1", tmp_path / "..data")
        os.symlink("..data/replicas.yaml", tmp_path / "replicas.yaml")
        async with on_stage(discovery__file=tmp_path / "replicas.yaml", **STAGE) as stage:
            await stage.until(lambda: urls(stage) == {a.url})
            os.symlink("v2", tmp_path / "..new")
            os.replace(tmp_path / "..new", tmp_path / "..data")
            await stage.until(lambda: urls(stage) == {b.url})


async def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "replicas.yaml"
    async with Engines(1) as (engine,), on_stage(discovery__file=file, **STAGE) as stage:
        await stage.until(lambda: stage.metric("warmroute_discovery_failing") == 1)
        ready = await stage.ask(None, "/readyz", method="GET")
        put(file, engine.url)
        await stage.ready()

        assert b"No such file" in ready.body
        assert (await stage.ask(chat(words(1)))).status == 200


@pytest.mark.parametrize("key_hosts", [[], ["loopback"]])
async def test_a_found_replica_gets_the_key_only_where_it_may(
    tmp_path: Path, key_hosts: list[str]
) -> None:
    key, file = tmp_path / "key", tmp_path / "replicas.yaml"
    key.write_text("wr-engine-key")
    settings = {"engine__api_key_file": key, "engine__key_hosts": key_hosts}
    async with FakeEngine() as engine:
        put(file, engine.url)
        async with on_stage(discovery__file=file, **settings, **STAGE) as stage:
            await stage.until(lambda: urls(stage))

            (url,) = urls(stage)
            sent = stage.router.engine_key.headers(url)
            assert bool(sent) is bool(key_hosts)


async def test_routers_that_see_a_change_at_different_times_undo_nothing(
    tmp_path: Path, start_redis: Start
) -> None:
    async with Engines(2) as (a, b):
        files = [tmp_path / "early.json", tmp_path / "late.json"]
        put(files[0], a.url, b.url)  # this router has seen b come, that one has not yet
        put(files[1], a.url)
        redis = start_redis()
        async with (
            on_stage(discovery__file=files[0], redis=redis, **STAGE) as early,
            on_stage(discovery__file=files[1], redis=redis, **STAGE) as late,
        ):
            for stage, known in ((early, {a.url, b.url}), (late, {a.url})):
                await stage.until(lambda stage=stage, known=known: urls(stage) == known)  # type: ignore[misc]
                await stage.until(lambda stage=stage: stage.metric("warmroute_routers") == 2)  # type: ignore[misc]
            (name,) = (r.name for r in early.router.fleet.members.replicas if r.url == b.url)
            await early.admin(f"/admin/replicas/{name}/drain", {"draining": True})
            await late.until(lambda: late.router.registry.records)
            assert urls(late) == {a.url}

            put(files[1], a.url, b.url)
            await late.until(lambda: urls(late) == {a.url, b.url})
            assert not late.router.discovery.watches.is_offered(name)
            await late.admin(f"/admin/replicas/{name}/drain", {"draining": False})
            await early.until(lambda: early.router.discovery.watches.is_offered(name))

            put(files[0], a.url)
            await early.until(lambda: urls(early) == {a.url})
            assert urls(late) == {a.url, b.url}
            assert (await late.ask(chat(words(1)))).status == 200
