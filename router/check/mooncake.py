"""The shared Mooncake pool: its master, its contents, and which replicas take part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.base.errors import PoolError
from router.check.finding import Finding, Subject, size
from router.check.seen import Deadline, ReplicaSeen
from router.config import MooncakeConfig, PoolConfig
from router.pool.catalog import PoolCatalog, Unreadable
from router.pool.layouts import Layout, names_in_keys
from router.pool.master import SLICE, TIMEOUT_S, MasterApi, MasterFigures, find_leader, masters
from router.pool.pools import layout_of

CONNECTOR_FLAG: Final = (
    '--kv-transfer-config \'{"kv_connector": "MooncakeStoreConnector", "kv_role": '
    '"kv_both", "kv_load_failure_policy": "recompute"}\''
)
_LISTED: Final = 0.8  # of the objects; a smaller share is no race


class PoolModel(Struct, frozen=True, kw_only=True):
    """A model's blocks in the pool."""

    name: str
    layout: Layout | None  # None: unknown
    num_blocks: int
    bytes_per_token: float | None


class PoolSeen(Struct, frozen=True, kw_only=True):
    """A Mooncake pool. `error` says why nothing else is known."""

    url: str
    name: str = ""  # "": the only one
    leader: str | None = None  # of several masters, the one that serves
    error: str | None = None
    figures: MasterFigures | None = None
    num_segments: int | None = None  # None: not reported
    num_listed: int | None = None  # None: not listed
    list_error: str | None = None
    models: tuple[PoolModel, ...] = ()
    unreadable: Mapping[str, Unreadable] = {}


# -- look ----------------------------------------------------------------------------------------


async def look(
    which: PoolConfig,
    config: MooncakeConfig,
    *,
    replicas: Sequence[ReplicaSeen],
    deadline: Deadline,
) -> PoolSeen:
    """Ask a pool's master, and list its keys to learn their layout."""
    pool = _catalog_of([each for each in replicas if each.pool == which.name])
    seen = PoolSeen(url=", ".join(masters(which.master)), name=which.name)
    timeout_s = deadline.at_most(TIMEOUT_S)
    async with MasterApi(which.master, timeout_s=timeout_s) as api:
        try:
            async with asyncio.timeout(deadline.left_s):
                await find_leader(api)
                figures = await api.figures()
        except PoolError as exc:
            return replace(seen, error=exc.message)
        except TimeoutError:
            return replace(seen, error=f"{seen.url} did not answer")
        pool.figures = figures
        seen = replace(seen, leader=api.url, figures=figures)
        seen = await _with_segments(seen, api, deadline)
        seen = await _with_keys(seen, api, pool, deadline)
    sizes = {_model_of(each): each.facts.block_size for each in replicas if each.facts is not None}
    models = [_model(pool, name, sizes.get(name.partition("@@")[0])) for name in pool.directories]
    return replace(seen, models=tuple(models), unreadable=pool.unreadable)


def _catalog_of(replicas: Iterable[ReplicaSeen]) -> PoolCatalog:
    """Create the catalog that a router has for these replicas."""
    pool = PoolCatalog()
    for seen in replicas:
        if seen.facts is not None:
            pool.add_replica(
                seen.name,
                _model_of(seen),
                names_in_keys(seen.facts.models),
                layout=layout_of(seen.entry.replica, seen.info.key_head if seen.info else None),
                kv_dtype=seen.facts.kv_dtype,
            )
    return pool


def _model_of(seen: ReplicaSeen) -> str:
    return seen.models[0].id if seen.models else ""


async def _with_segments(seen: PoolSeen, api: MasterApi, deadline: Deadline) -> PoolSeen:
    """Ask for the memory that engines give; some releases do not report it."""
    try:
        async with asyncio.timeout(deadline.left_s):
            return replace(seen, num_segments=len(await api.segments()))
    except (PoolError, TimeoutError):
        return seen


async def _with_keys(
    seen: PoolSeen, api: MasterApi, pool: PoolCatalog, deadline: Deadline
) -> PoolSeen:
    pool.begin_listing()
    try:
        async with asyncio.timeout(deadline.left_s):
            num_listed = await api.list_keys(pool.listed)
            for _ in pool.reconcile(SLICE):
                await asyncio.sleep(0)
    except PoolError as exc:
        return replace(seen, list_error=exc.message)
    except TimeoutError:
        return replace(seen, list_error="its keys were not listed in time")
    return replace(seen, num_listed=num_listed)


def _model(pool: PoolCatalog, name: str, block_size: int | None) -> PoolModel:
    num_bytes = pool.bytes_per_block(name)
    return PoolModel(
        name=name,
        layout=pool.layouts.get(name),
        num_blocks=len(pool.directory(name)),
        bytes_per_token=round(num_bytes / block_size, 1) if num_bytes and block_size else None,
    )


# -- judge ---------------------------------------------------------------------------------------


def judge(seen: PoolSeen, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Judge a Mooncake master, and the replicas that take part."""
    pool = _subject(seen)
    if seen.figures is None:
        yield pool.error(
            "reachable",
            seen.error or "",
            "--mooncake names the master's --metrics_port (9003 by default), not its --rpc_port",
        )
        return
    is_one = seen.leader in (None, seen.url)
    yield pool.ok("reachable", seen.url if is_one else f"{seen.leader} is the leader of {seen.url}")
    yield from _contents(pool, seen, seen.figures)
    for model in seen.models:
        yield _keys(pool, model, num_objects=seen.figures.num_keys)
    for name, why in seen.unreadable.items():
        create = pool.error if why.engines_fail else pool.warning
        yield create(why.about, f"{name}: {why.text}", why.hint)
    there = [each for each in replicas if each.facts is not None]
    yield from _weights(pool, [each for each in there if each.pool == seen.name])
    yield from _members(pool, [each for each in there if each.pool in (seen.name, None)])


def _subject(seen: PoolSeen) -> Subject:
    return Subject(f"pool {seen.name}".strip())


def _contents(pool: Subject, seen: PoolSeen, figures: MasterFigures) -> Iterator[Finding]:
    if figures.capacity_bytes == 0 or seen.num_segments == 0:
        yield pool.warning(
            "contents",
            "no engine gives it memory, so nothing can be stored",
            f"{CONNECTOR_FLAG}, and global_segment_size in mooncake.json",
        )
        return
    num_objects = figures.num_keys or 0
    limit = f" of {size(figures.capacity_bytes)}" if figures.capacity_bytes else ""
    num_evicted = figures.num_evicted_keys
    evicted = f", {num_evicted:,} evicted so far" if num_evicted else ""
    used = size(figures.allocated_bytes or 0)
    yield pool.ok("contents", f"{num_objects:,} objects, {used}{limit}{evicted}")
    if seen.list_error is not None:
        yield pool.warning(
            "keys",
            f"not listed: {seen.list_error}",
            "blocks stored before a router starts are then unknown; use a longer --wait",
        )
    elif seen.num_listed is not None and seen.num_listed < _LISTED * num_objects:
        yield pool.warning(
            "tenants",
            f"{num_objects:,} objects exist, {seen.num_listed:,} are listed: the master "
            "lists only tenant `default` (or it evicts now)",
            "a master without --enable_multi_tenants, and a cache_prefix for each deployment",
        )


def _keys(pool: Subject, model: PoolModel, num_objects: int | None) -> Finding:
    layout = model.layout
    if layout is None:
        text = f"{model.name}: it has no blocks there yet, or its keys are unknown"
        if not num_objects:
            return pool.ok("keys", text)
        hint = "send a prompt through a router: a listing then shows how its keys are built"
        return pool.note("keys", text, hint)
    ranks = f", {layout.num_ranks} objects a block" if layout.num_ranks > 1 else ""
    each = f", {size(round(model.bytes_per_token))} a token" if model.bytes_per_token else ""
    text = f"{model.name}: {model.num_blocks:,} blocks{ranks}{each}, {layout.text}@DIGEST"
    return pool.ok("keys", text)


def _weights(pool: Subject, members: Iterable[ReplicaSeen]) -> Iterator[Finding]:
    """Find members that use the same object names for blocks of different weights.

    Engines in dev mode report their weights and how their keys begin. Blocks of another size have
    other names.
    """
    found: dict[tuple[str, int, str], dict[str, list[str]]] = {}
    for seen in members:
        if seen.info is None or seen.info.key_head is None or seen.facts is None:
            continue
        for field, value in seen.info.weights.items():
            names = (seen.info.key_head, seen.facts.block_size or 0, field)
            found.setdefault(names, {}).setdefault(value, []).append(seen.name)
    for (head, _, field), by_value in sorted(found.items()):
        if len(by_value) > 1:
            values = (f"{value} ({', '.join(names)})" for value, names in sorted(by_value.items()))
            yield pool.error(
                "weights",
                f"{head}: replicas whose weights differ in {field}, {', '.join(values)}, use the "
                "same object names, so engines answer from KV blocks that another model computed",
                'the same weights for all, or a "cache_prefix" for each in '
                "kv_connector_extra_config",
            )


def _members(pool: Subject, there: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Judge who takes part: the pool's members, and replicas in no pool."""
    members = [each for each in there if each.pool is not None]
    known = [each.name for each in members if _takes_part(each)]
    unknown = [each.name for each in members if each.name not in known]
    excluded = [each.name for each in there if each.entry.replica.pool is False]
    if known:
        yield pool.ok("members", f"take part: {', '.join(known)}")
    if unknown:
        yield pool.note(
            "members",
            f"unproven: {', '.join(unknown)}; counted as members until fetches do not happen",
            f"{CONNECTOR_FLAG}; or `pool: false` for the replica",
        )
    if excluded:
        yield pool.ok("members", f"excluded, as configured: {', '.join(excluded)}")
    statuses = (rank.status for each in members for rank in each.ranks if rank.is_publisher)
    if any(
        s is not None and s.is_verified and s.contract.algorithm == "warmroute" for s in statuses
    ):
        yield pool.warning(
            "hashes",
            "hashes that cannot be computed do not match the pool's keys",
            "PYTHONHASHSEED=SEED for the engines and --set hash.seeds=SEED here",
        )


def _takes_part(seen: ReplicaSeen) -> bool:
    reports_it = seen.facts is not None and seen.facts.has_pool_connector
    has_store = seen.info is not None and "store" in seen.info.transfers
    return reports_it or has_store or any(rank.num_pooled for rank in seen.ranks)
