"""Looks at Redis, and at the Mooncake master."""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec.structs import replace

from router.check.deadline import Deadline
from router.check.ports import reach
from router.check.seen import FeedSeen, PatternSeen, PoolSeen, RedisSeen
from router.cluster.pool_share import LISTER
from router.cluster.redis_look import StoreLook, look
from router.config import MooncakeConfig, RedisConfig
from router.errors import PoolError, StoreError, StoreRefused
from router.messages import ReplicaRecord
from router.pool.catalog import PoolCatalog
from router.pool.master import MasterApi
from router.replicas.registry import Registry

_CONNECT_S: Final = 2.0
_SLICE: Final = 10_000


async def look_at_redis(
    config: RedisConfig, registry: Registry, *, password: str | None, deadline: Deadline
) -> tuple[RedisSeen, dict[str, ReplicaRecord]]:
    """Read what several routers share, and what operators ordered; nothing is written."""
    seen = RedisSeen(
        address=config.url or f"{config.sentinel_service} at {', '.join(config.sentinels)}",
        namespace=config.namespace,
    )
    with deadline.waiting("redis"):
        try:
            async with asyncio.timeout(deadline.left_s):
                found = await look(config, password=password, leases=(LISTER,))
        except StoreError as exc:
            return replace(seen, error=exc.message, is_refused=isinstance(exc, StoreRefused)), {}
        except TimeoutError:
            return replace(seen, error="it did not answer in time"), {}
    return _as_seen(seen, found, registry), found.records


def _as_seen(seen: RedisSeen, found: StoreLook, registry: Registry) -> RedisSeen:
    info = found.info
    stops = info.get("rdb_last_bgsave_status", "ok") != "ok"
    return replace(
        seen,
        address=found.server.address,
        server=found.server.name,
        version=found.server.version,
        mode=found.server.mode,
        round_trip_ms=round(found.round_trip_ms, 3),
        schema=found.schema,
        used_bytes=_number(info.get("used_memory")),
        max_bytes=_number(info.get("maxmemory")),
        policy=info.get("maxmemory_policy"),
        save_error=stops,
        routers=found.routers,
        feeds=tuple(
            FeedSeen(
                id=name,
                number=state.number,
                sequence=state.position.sequence if state.position is not None else None,
                state=state.standing.state if state.standing is not None else None,
                reason=state.standing.reason if state.standing is not None else None,
                leader=found.leaders.get(name),
            )
            for name, state in sorted(found.feeds.items())
        ),
        pool_lister=found.leaders.get(LISTER),
        num_log_entries=found.num_log_entries,
        num_sessions=found.num_sessions,
        refused=tuple(
            f"{name}: {why}"
            for name, record in sorted(found.records.items())
            if (why := registry.refused(name, record)) is not None
        ),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


# -- the pool ------------------------------------------------------------------------------------


async def look_at_pool(
    config: MooncakeConfig, *, pool: PoolCatalog, block_sizes: dict[str, int], deadline: Deadline
) -> PoolSeen:
    """Ask the master, and list its keys to learn what they look like.

    Args:
        pool: Knows the models, and what replicas said to have stored.
        block_sizes: Base model to tokens a block.
    """
    assert config.master is not None
    seen = PoolSeen(url=config.master.rstrip("/"), events_configured=config.events is not None)
    timeout_s = deadline.at_most(config.timeout_s)
    with deadline.waiting("pool"):
        async with MasterApi(config.master, timeout_s=timeout_s) as api:
            try:
                async with asyncio.timeout(deadline.left_s):
                    seen = await _with_figures(seen, api, pool)
            except PoolError as exc:
                return replace(seen, error=exc.message)
            except TimeoutError:
                return replace(seen, error=f"{seen.url} was silent")
            seen = await _with_words(seen, api, config, deadline)
            seen = await _with_keys(seen, api, pool, deadline)
    return replace(
        seen,
        models=tuple(
            _pattern(pool, model, block_sizes.get(model)) for model in sorted(pool.directories)
        ),
    )


async def _with_figures(seen: PoolSeen, api: MasterApi, pool: PoolCatalog) -> PoolSeen:
    figures = await api.figures()
    pool.bytes_per_object = figures.bytes_per_object
    return replace(
        seen,
        num_objects=figures.num_keys,
        used_bytes=figures.allocated_bytes,
        max_bytes=figures.capacity_bytes,
        num_evicted=figures.num_evicted_keys,
    )


async def _with_words(
    seen: PoolSeen, api: MasterApi, config: MooncakeConfig, deadline: Deadline
) -> PoolSeen:
    """Ask for what only some releases tell."""
    try:
        async with asyncio.timeout(deadline.left_s):
            seen = replace(seen, num_segments=len(await api.segments()))
            seen = replace(seen, publishes_events=await api.publishes_events())
    except (PoolError, TimeoutError):
        pass
    if config.events is None:
        return seen
    timeout_s = deadline.at_most(_CONNECT_S)
    return replace(seen, events_reach=await reach(config.events, timeout_s=timeout_s))


async def _with_keys(
    seen: PoolSeen, api: MasterApi, pool: PoolCatalog, deadline: Deadline
) -> PoolSeen:
    pool.begin_listing()
    try:
        async with asyncio.timeout(deadline.left_s):
            await api.list_keys(pool.listed)
            is_done = False
            while not is_done:
                await asyncio.sleep(0)
                is_done = not pool.reconcile(_SLICE)
    except PoolError as exc:
        pool.abandon_listing()
        return replace(seen, list_error=exc.message)
    except TimeoutError:
        pool.abandon_listing()
        return replace(seen, list_error="its keys could not be listed in time")
    return replace(seen, is_listed=True, num_unknown_keys=pool.counters.num_unknown_keys)


def _pattern(pool: PoolCatalog, model: str, block_size: int | None) -> PatternSeen:
    pattern = pool.patterns.get(model)
    if pattern is None:
        return PatternSeen(model=model, text=None)
    size = pool.bytes_per_block(model)
    return PatternSeen(
        model=model,
        text=pattern.text,
        num_ranks=pattern.num_ranks,
        num_blocks=len(pool.directory(model)),
        bytes_per_token=round(size / block_size, 1) if size and block_size else None,
    )
