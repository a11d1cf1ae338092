"""The check from beginning to end: look at everything at once, then judge."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from router.check import host, mooncake, redis, replica, sources
from router.check.deadline import Deadline
from router.check.finding import Finding
from router.check.host import HostSeen
from router.check.mooncake import PoolSeen
from router.check.redis import RedisSeen
from router.check.replica import ReplicaSeen
from router.check.report import Report
from router.check.sources import SourceSeen
from router.check.tokenizer import Tokenizers
from router.config import Config
from router.config.hosts import HostRules
from router.config.secrets import read_secret
from router.discovery.engine_api import EngineApi
from router.errors import ConfigError
from router.pool.catalog import PoolCatalog
from router.replicas.engine_key import EngineKey
from router.replicas.registry import Entry, Registry
from router.tls import client_tls

_PROGRESS_S: Final = (2.0, 0.25)  # before the first message, and between looks


async def check(
    config: Config,
    *,
    redis_password: str | None = None,
    admin_token: str | None = None,
    wait_s: float = 10.0,
    on_waiting: Callable[[list[str]], None] = lambda awaited: None,
) -> Report:
    """Look at all that a router would use; the package describes what others see of it.

    Args:
        admin_token: Of a router that may run here.
        wait_s: What has not answered by then is reported as silent.
        on_waiting: Takes what is awaited, after two seconds and whenever it changes.
    """
    deadline = Deadline(wait_s)
    async with asyncio.TaskGroup() as tg:
        progress = tg.create_task(_report_progress(deadline, on_waiting), name="progress")
        looking = tg.create_task(host.look(config, deadline, admin_token=admin_token), name="host")
        names = config.mooncake.names
        registry = Registry(
            config.replicas, hosts=HostRules(config.admin.replica_hosts), pools=names
        )
        store = None
        if config.redis.is_configured:  # first: it may have further replicas
            store, records = await redis.look(
                config.redis, registry, password=redis_password, deadline=deadline
            )
            registry.apply(records)
        found = await sources.look(config.discovery, registry, names, deadline)
        catalogs = {name: PoolCatalog() for name in names}
        seen = await _look_at_replicas(registry.entries, config, catalogs, deadline)
        replicas = replica.with_owners(seen)
        async with asyncio.TaskGroup() as pool_tg:  # last: replicas report what is theirs in them
            looking_at_pools = [
                pool_tg.create_task(
                    mooncake.look(
                        each,
                        config.mooncake,
                        pool=catalogs[each.name],
                        replicas=replicas,
                        deadline=deadline,
                    ),
                    name=f"pool {each.name}",
                )
                for each in config.mooncake.each
            ]
        pools = tuple(task.result() for task in looking_at_pools)
        here = await looking
        progress.cancel()
    findings = tuple(_judge(config, found, replicas, store, pools, here))
    return Report(findings=findings, sources=found, replicas=replicas, redis=store, pools=pools)


async def _look_at_replicas(
    entries: Sequence[Entry], config: Config, pools: Mapping[str, PoolCatalog], deadline: Deadline
) -> tuple[ReplicaSeen, ...]:
    key, tls = _usable(config)
    api = EngineApi(
        timeout_s=deadline.at_most(config.health.timeout_s),
        tls=tls,
        key=EngineKey.of(config, key),
    )
    tokenizers = Tokenizers(config.tokens, deadline)
    async with api, asyncio.TaskGroup() as tg:
        looking = [
            tg.create_task(
                replica.look(
                    entry,
                    config=config,
                    api=api,
                    tokenizers=tokenizers,
                    pools=pools,
                    deadline=deadline,
                ),
                name=entry.name,
            )
            for entry in entries
        ]
    return tuple(task.result() for task in looking)


def _judge(
    config: Config,
    found: tuple[SourceSeen, ...],
    replicas: tuple[ReplicaSeen, ...],
    store: RedisSeen | None,
    pools: tuple[PoolSeen, ...],
    here: HostSeen,
) -> Iterator[Finding]:
    yield from sources.judge(found)
    for seen in replicas:
        yield from replica.judge(seen)
    yield from replica.judge_together(replicas, host.proven(here))
    if store is not None:
        yield from redis.judge(store, config=config.redis, index=config.index, replicas=replicas)
    for pool in pools:
        yield from mooncake.judge(pool, replicas)
    yield from host.judge(here, config=config, replicas=replicas)


async def _report_progress(deadline: Deadline, on_waiting: Callable[[list[str]], None]) -> None:
    first_s, pause_s = _PROGRESS_S
    await asyncio.sleep(first_s)
    reported: list[str] = []
    while True:
        awaited = deadline.awaited()
        if awaited and awaited != reported:
            reported = awaited
            on_waiting(awaited)
        await asyncio.sleep(pause_s)


def _usable(config: Config) -> tuple[str | None, ssl.SSLContext | None]:
    """Read the engines' key and certificates; what is wrong with a file is a finding of its own."""
    key = tls = None
    try:
        key = read_secret(config.engine.api_key_file, "engine.api_key_file")
    except ConfigError:
        pass
    try:
        tls = client_tls(config.forward)
    except ConfigError:
        pass
    return key, tls
