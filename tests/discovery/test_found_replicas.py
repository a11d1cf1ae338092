"""What a router does with replicas that a source found: the test speaks for the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.config import ReplicaConfig
from router.replicas.entry import Found
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, Stage, chat, on_stage, words
from tests.redis_servers import Start

SOURCE: dict[str, Any] = {
    "ready": False,
    "discovery__hosts": ["loopback"],
    "discovery__dns": ["replicas.x:1"],
    "discovery__dns_servers": ["127.0.0.1:9"],  # nothing is there
}


def find(stage: Stage, *urls: str) -> None:
    """Have the source name these replicas."""
    sources = stage.router.discovery.sources
    (source,) = sources.states()
    sources.found(source.name, [Found(replica=ReplicaConfig(url=url)) for url in urls])


def urls_of(stage: Stage) -> set[str]:
    return {replica.url for replica in stage.router.fleet.members.replicas}


async def test_routers_that_see_a_change_at_different_times_undo_nothing(
    start_redis: Start,
) -> None:
    redis = start_redis()
    async with (
        Engines(2) as (a, b),
        on_stage(redis=redis, **SOURCE) as early,
        on_stage(redis=redis, **SOURCE) as late,
    ):
        find(early, a.url, b.url)  # this router has seen b come, that one has not yet
        find(late, a.url)
        for stage, known in ((early, {a.url, b.url}), (late, {a.url})):
            await stage.until(lambda stage=stage, known=known: urls_of(stage) == known)  # type: ignore[misc]
            await stage.until(lambda stage=stage: stage.metric("warmroute_routers") == 2)  # type: ignore[misc]
        (name,) = (r.name for r in early.router.fleet.members.replicas if r.url == b.url)
        await early.admin(f"/admin/replicas/{name}/drain", {"draining": True})
        await late.until(lambda: late.router.registry.records)
        assert urls_of(late) == {a.url}

        find(late, a.url, b.url)
        await late.until(lambda: urls_of(late) == {a.url, b.url})
        assert not late.router.discovery.watches.is_offered(name)
        await late.admin(f"/admin/replicas/{name}/drain", {"draining": False})
        await early.until(lambda: early.router.discovery.watches.is_offered(name))

        find(early, a.url)
        await early.until(lambda: urls_of(early) == {a.url})
        assert urls_of(late) == {a.url, b.url}
        assert (await late.ask(chat(words(1)))).status == 200


@pytest.mark.parametrize("key_hosts", [[], ["loopback"]])
async def test_a_found_replica_gets_the_key_only_where_it_may(
    tmp_path: Path, key_hosts: list[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("wr-engine-key")
    settings = {"engine__api_key_file": key, "engine__key_hosts": key_hosts}
    async with FakeEngine() as engine, on_stage(**settings, **SOURCE) as stage:
        find(stage, engine.url)
        await stage.until(lambda: urls_of(stage))

        assert bool(stage.router.engine_key.headers(engine.url)) is bool(key_hosts)
