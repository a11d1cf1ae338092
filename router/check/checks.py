"""The check from beginning to end: look at everything at once, then judge."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from router.check.deadline import Deadline
from router.check.findings import Finding, Report
from router.check.here import look_here
from router.check.pool_rules import of_pool
from router.check.redis_rules import of_redis
from router.check.replica_rules import among_replicas, of_replica
from router.check.replicas import look_at_replica
from router.check.router_rules import of_router
from router.check.seen import PoolSeen, RedisSeen, ReplicaSeen, RouterSeen
from router.check.stores import look_at_pool, look_at_redis
from router.check.tokenizers import Tokenizers
from router.config import Config
from router.config.hosts import HostRules
from router.discovery.engine_api import EngineApi
from router.engine_key import EngineKey
from router.errors import ConfigError
from router.pool.catalog import PoolCatalog
from router.replicas.registry import Entry, Registry
from router.tls import client_tls

_PROGRESS_S: Final = (2.0, 0.25)  # the first word, and between looks


async def check(
    config: Config,
    *,
    redis_password: str | None = None,
    wait_s: float = 10.0,
    on_waiting: Callable[[list[str]], None] = lambda awaited: None,
) -> Report:
    """Look at all that a router would use; see the package for what that does to others.

    Args:
        wait_s: What has not answered by then is reported as silent.
        on_waiting: Told what is waited for, after two seconds and whenever it changes.
    """
    deadline = Deadline(wait_s)
    async with asyncio.TaskGroup() as tg:
        progress = tg.create_task(_tell(deadline, on_waiting), name="progress")
        here = tg.create_task(look_here(config, deadline), name="here")
        registry = Registry(config.replicas, hosts=HostRules(config.admin.replica_hosts))
        redis = None
        if config.redis.is_configured:  # first: it may know of further replicas
            redis, records = await look_at_redis(
                config.redis, registry, password=redis_password, deadline=deadline
            )
            registry.apply(records)
        pool = PoolCatalog() if config.mooncake.master is not None else None
        replicas = await _look_at_replicas(registry.entries, config, pool, deadline)
        pool_seen = None
        if pool is not None:  # last: replicas say what is theirs in it
            pool_seen = await look_at_pool(
                config.mooncake, pool=pool, block_sizes=_block_sizes(replicas), deadline=deadline
            )
        router = await here
        progress.cancel()
    findings = _judged(config, replicas, redis, pool_seen, router)
    return Report(findings=tuple(findings), replicas=replicas, redis=redis, pool=pool_seen)


async def _look_at_replicas(
    entries: Sequence[Entry], config: Config, pool: PoolCatalog | None, deadline: Deadline
) -> tuple[ReplicaSeen, ...]:
    api = EngineApi(
        timeout_s=deadline.at_most(config.health.timeout_s),
        tls=_usable_tls(config),
        key=EngineKey.of(config, _secret(config.engine.api_key_file)),
    )
    tokenizers = Tokenizers(config.tokens, deadline)
    async with api, asyncio.TaskGroup() as tg:
        looking = [
            tg.create_task(
                look_at_replica(
                    entry,
                    config=config,
                    api=api,
                    tokenizers=tokenizers,
                    pool=pool,
                    deadline=deadline,
                ),
                name=entry.name,
            )
            for entry in entries
        ]
    return tuple(task.result() for task in looking)


def _judged(
    config: Config,
    replicas: tuple[ReplicaSeen, ...],
    redis: RedisSeen | None,
    pool: PoolSeen | None,
    router: RouterSeen,
) -> Iterator[Finding]:
    for replica in replicas:
        yield from of_replica(replica)
    yield from among_replicas(replicas)
    if redis is not None:
        yield from of_redis(redis, config=config.redis, index=config.index, replicas=replicas)
    if pool is not None:
        yield from of_pool(pool, replicas)
    yield from of_router(router, config=config, replicas=replicas)


def _block_sizes(replicas: tuple[ReplicaSeen, ...]) -> dict[str, int]:
    return {
        replica.models[0].id: replica.block_size
        for replica in replicas
        if replica.models and replica.block_size
    }


async def _tell(deadline: Deadline, on_waiting: Callable[[list[str]], None]) -> None:
    first_s, pause_s = _PROGRESS_S
    await asyncio.sleep(first_s)
    said: list[str] = []
    while True:
        awaited = deadline.awaited()
        if awaited and awaited != said:
            said = awaited
            on_waiting(awaited)
        await asyncio.sleep(pause_s)


def _secret(file: Path | None) -> str | None:
    """Read a key; what is wrong with its file is a finding of its own."""
    try:
        return file.read_text(encoding="utf-8").strip() or None if file is not None else None
    except (OSError, UnicodeDecodeError):
        return None


def _usable_tls(config: Config) -> ssl.SSLContext | None:
    try:
        return client_tls(config.forward)
    except ConfigError:  # a finding of its own
        return None
