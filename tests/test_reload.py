"""router.assembly.reload: another configuration, while the router serves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from router.assembly.reload import Reload, apply
from router.base.errors import ConfigError
from router.config import PolicyConfig, ReplicaConfig, load
from tests.faults.stage import Engines, Stage, chat, on_stage, words


def change(stage: Stage, **sections: object) -> list[str]:
    return apply(stage.router, msgspec.structs.replace(stage.router.config, **sections))


async def test_replicas_and_the_policy_change_without_a_restart() -> None:
    """Who is answered by a replica that goes is answered to the end; the next goes elsewhere."""
    async with Engines(2) as (a, b), on_stage(a) as stage:
        one, other = (ReplicaConfig(url=engine.url) for engine in (a, b))
        assert (await stage.ask(chat(words(1)))).replica == "r1"
        policy = PolicyConfig(name="round_robin")

        assert change(stage, replicas=(other,), policy=policy) == ["replicas", "policy.name"]
        await stage.until(lambda: [r.url for r in stage.router.fleet.members.replicas] == [b.url])
        reply = await stage.ask(chat(words(1)))
        assert (reply.replica, reply.headers["x-warmroute-policy"]) == ("r2", "round_robin")
        shown = (await stage.admin("/admin/config")).json()
        assert (shown["policy"]["name"], shown["replicas"][0]["url"]) == ("round_robin", b.url)

        change(stage, replicas=(other, one))
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)
        assert {entry.name for entry in stage.router.registry.entries} == {"r1", "r2"}


async def test_what_needs_a_restart_is_refused_as_a_whole() -> None:
    """The error names the keys; what could have changed has not."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        limits = msgspec.structs.replace(stage.router.config.limits, body_bytes=1)
        with pytest.raises(ConfigError, match=r"limits\.body_bytes: needs a restart"):
            change(stage, limits=limits, replicas=())
        with pytest.raises(ConfigError, match="policy: "):
            change(stage, policy=PolicyConfig(params={"nonsense": 1}), replicas=())

        assert len(stage.router.registry.entries) == 1
        assert len(stage.router.config.replicas) == 1


async def test_a_name_that_is_taken_is_refused() -> None:
    """By a replica that was added by an order."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await stage.admin("/admin/replicas", {"url": "http://127.0.0.1:9", "name": "east"})
        east = ReplicaConfig(url="http://127.0.0.1:8", name="east")
        with pytest.raises(ConfigError, match=r"'east' is taken, by http://127\.0\.0\.1:9"):
            change(stage, replicas=(east,))

        assert {entry.name for entry in stage.router.registry.entries} == {"r1", "east"}


async def test_a_file_that_changes_is_read_again_where_that_is_asked_for(tmp_path: Path) -> None:
    """A bad one changes nothing; the good one after it does."""
    file = tmp_path / "warmroute.yaml"
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        base = stage.router.config
        file.write_text(f"replicas: [{engine.url}]")

        def read() -> object:
            found = load(file)
            return msgspec.structs.replace(base, replicas=found.replicas, policy=found.policy)

        reload = Reload(read, file)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tg:
            task = tg.create_task(reload.run(stage.router))
            file.write_text("replicas: {")
            await stage.until(lambda: stage.metric("warmroute_config_reads_total", result="bad"))
            file.write_text(f"replicas:\n  - {engine.url}\n  - {engine.url}/v1\n")
            await stage.until(
                lambda: f"{file}:3: replicas[1].url: is already replicas[0].url" in stage.log
            )
            assert stage.router.config is base
            file.write_text(f"replicas: [{engine.url}]\npolicy: {{name: random}}\n")
            await stage.until(lambda: stage.router.config.policy.name == "random")
            task.cancel()
