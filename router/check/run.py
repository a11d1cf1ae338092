"""The check from beginning to end: look at everything, then judge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.check import host, mooncake, redis, replica, sources, together
from router.check.mooncake import PoolSeen
from router.check.report import Report
from router.check.seen import Deadline, ReplicaSeen
from router.check.tokenizer import Tokenizers
from router.config import Config
from router.config.hosts import HostRules
from router.config.secrets import read_secret
from router.config.tls import client_tls
from router.discovery.engine_api import EngineApi
from router.replicas.registry import EngineKey, Registry
from router.replicas.replica import Entry


async def check(
    config: Config,
    *,
    redis_password: str | None = None,
    wait_s: float = 10.0,
) -> Report:
    """Check what a router would use; see the package.

    Args:
        redis_password: None: there is none.
        wait_s: After it, systems that have not answered are reported as silent.

    Raises:
        ConfigError: the engines' key or a certificate cannot be read.
    """
    deadline = Deadline(wait_s)
    api = EngineApi(
        timeout_s=deadline.at_most(config.health.timeout_s),
        tls=client_tls(config.forward),
        key=EngineKey.of(config, read_secret(config.engine.api_key_file, "engine.api_key_file")),
    )
    async with asyncio.TaskGroup() as tg:
        looking = tg.create_task(host.look(config, deadline), name="host")
        names = config.mooncake.names
        hosts = HostRules(config.admin.replica_hosts)
        registry = Registry(config.replicas, hosts=hosts, pools=names)
        store = None
        if config.redis.is_configured:
            store = await redis.look(config.redis, password=redis_password, deadline=deadline)
        found = await sources.look(config.discovery, registry, names, deadline)
        replicas = await _look_at_replicas(registry.entries, config, api, deadline)
        pools = await _look_at_pools(config, replicas, deadline)
        here = await looking
    findings = [*found]
    for seen in replicas:
        findings += replica.judge(seen, config)
    findings += together.judge(replicas, config.events)
    if store is not None:
        findings += redis.judge(store, config=config.redis, index=config.index, replicas=replicas)
    for pool in pools:
        findings += mooncake.judge(pool, replicas)
    findings += here
    return Report(findings=tuple(findings), replicas=replicas, redis=store, pools=pools)


async def _look_at_replicas(
    entries: Sequence[Entry], config: Config, api: EngineApi, deadline: Deadline
) -> tuple[ReplicaSeen, ...]:
    tokenizers = Tokenizers(config, api, deadline)
    async with api, asyncio.TaskGroup() as tg:
        looking = [
            tg.create_task(
                replica.look(
                    entry, config=config, api=api, tokenizers=tokenizers, deadline=deadline
                ),
                name=entry.name,
            )
            for entry in entries
        ]
    return together.with_owners([task.result() for task in looking], config.events)


async def _look_at_pools(
    config: Config, replicas: Sequence[ReplicaSeen], deadline: Deadline
) -> tuple[PoolSeen, ...]:
    async with asyncio.TaskGroup() as tg:
        looking = [
            tg.create_task(
                mooncake.look(each, config.mooncake, replicas=replicas, deadline=deadline),
                name=f"pool {each.name}",
            )
            for each in config.mooncake.each
        ]
    return tuple(task.result() for task in looking)
