"""The shared Mooncake pool: its master, what is in it, and which replicas take part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router.check.deadline import Deadline
from router.check.finding import Finding, Subject, size
from router.check.replica import ReplicaSeen
from router.config import MooncakeConfig, PoolConfig
from router.errors import PoolError
from router.pool.catalog import PoolCatalog, Unreadable
from router.pool.leader import find_leader
from router.pool.master import MasterApi, masters

CONNECTOR_FLAG: Final = (
    '--kv-transfer-config \'{"kv_connector": "MooncakeStoreConnector", "kv_role": '
    '"kv_both", "kv_load_failure_policy": "recompute"}\''
)
_SLICE: Final = 10_000  # keys
_LISTED: Final = 0.8  # of the objects; fewer are no race


class PatternSeen(Struct, frozen=True, kw_only=True):
    """How a model's objects in the pool are named."""

    model: str
    text: str | None  # None: not learned
    num_ranks: int = 0
    num_blocks: int = 0
    bytes_per_token: float | None = None


class PoolSeen(Struct, frozen=True, kw_only=True):
    """The Mooncake master. `error` says why nothing else is known; None: not reported."""

    url: str
    name: str = ""  # "": the only one
    leader: str | None = None  # of several masters, the one that serves
    error: str | None = None
    num_objects: int | None = None
    used_bytes: int | None = None
    max_bytes: int | None = None
    num_evicted: int | None = None
    num_segments: int | None = None
    is_listed: bool = False  # its keys could be listed
    list_error: str | None = None
    num_listed: int | None = None
    num_unknown_keys: int = 0
    models: tuple[PatternSeen, ...] = ()
    unreadable: tuple[tuple[str, Unreadable], ...] = ()  # directory, and why none is credited
    weights: tuple[tuple[str, str, str], ...] = ()  # head of keys, field that differs, whose value


# -- look ----------------------------------------------------------------------------------------


async def look(
    which: PoolConfig,
    config: MooncakeConfig,
    *,
    pool: PoolCatalog,
    replicas: Sequence[ReplicaSeen],
    deadline: Deadline,
) -> PoolSeen:
    """Ask a pool's master, and list its keys to learn how they are built.

    Args:
        pool: Has the models, and what replicas reported as stored.
        replicas: As they were seen; some are in it.
    """
    seen = PoolSeen(
        url=", ".join(masters(which.master)),
        name=which.name,
    )
    timeout_s = deadline.at_most(config.timeout_s)
    with deadline.waiting(_subject(seen).name):
        async with MasterApi(which.master, timeout_s=timeout_s) as api:
            try:
                async with asyncio.timeout(deadline.left_s):
                    await find_leader(api)
                    seen = await _with_figures(replace(seen, leader=api.url), api, pool)
            except PoolError as exc:
                return replace(seen, error=exc.message)
            except TimeoutError:
                return replace(seen, error=f"{seen.url} did not answer")
            seen = await _with_optional(seen, api, deadline)
            seen = await _with_keys(seen, api, pool, deadline)
    block_sizes = {each.models[0].id: each.block_size for each in replicas if each.models}
    return replace(
        seen,
        models=tuple(
            _pattern(pool, name, block_sizes.get(name.partition("@@")[0]))
            for name in sorted(pool.directories)
        ),
        unreadable=tuple(sorted(pool.unreadable.items())),
        weights=tuple(differing_weights(each for each in replicas if each.pool == which.name)),
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


async def _with_optional(seen: PoolSeen, api: MasterApi, deadline: Deadline) -> PoolSeen:
    """Ask for what only some releases report."""
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
            await api.list_keys(pool.listed)
            for _ in pool.reconcile(_SLICE):
                await asyncio.sleep(0)
    except PoolError as exc:
        pool.abandon_listing()
        return replace(seen, list_error=exc.message)
    except TimeoutError:
        pool.abandon_listing()
        return replace(seen, list_error="its keys were not listed in time")
    counted = pool.counters
    return replace(
        seen,
        is_listed=True,
        num_listed=counted.num_objects,
        num_unknown_keys=counted.num_unknown_keys,
    )


def _pattern(pool: PoolCatalog, name: str, block_size: int | None) -> PatternSeen:
    layout = pool.layouts.get(name)
    if layout is None:
        return PatternSeen(model=name, text=None)
    block_bytes = pool.bytes_per_block(name)
    return PatternSeen(
        model=name,
        text=layout.text,
        num_ranks=layout.num_ranks,
        num_blocks=len(pool.directory(name)),
        bytes_per_token=(
            round(block_bytes / block_size, 1) if block_bytes and block_size else None
        ),
    )


def differing_weights(replicas: Iterable[ReplicaSeen]) -> Iterator[tuple[str, str, str]]:
    """Find replicas of a pool that name their objects alike and have other weights.

    By what engines say, so before anything is stored: an engine that says its weights says how its
    keys begin, too. Blocks of another size have other names, whatever the weights.

    Returns:
        How their keys begin, the field that differs, and its values with the replicas of each.
    """
    found: dict[tuple[str, int, str], dict[str, list[str]]] = {}
    for replica in replicas:
        if replica.key_head is None:
            continue
        for field, value in replica.weights.items():
            at = (replica.key_head, replica.block_size or 0, field)
            found.setdefault(at, {}).setdefault(value, []).append(replica.name)
    for (head, _, field), by_value in sorted(found.items()):
        if len(by_value) > 1:
            each = (f"{value} ({', '.join(names)})" for value, names in sorted(by_value.items()))
            yield head, field, ", ".join(each)


# -- judge ---------------------------------------------------------------------------------------


def judge(seen: PoolSeen, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Judge a Mooncake master, and the replicas that take part."""
    pool = _subject(seen)
    if seen.error is not None:
        yield pool.error(
            "reachable",
            seen.error,
            "--mooncake names the master's --metrics_port (9003 by default), not its --rpc_port",
        )
        return
    is_one = seen.leader in (None, seen.url)
    yield pool.ok("reachable", seen.url if is_one else f"{seen.leader} is the leader of {seen.url}")
    yield from _contents(seen)
    for model in seen.models:
        yield _keys(model, seen)
    for name, why in seen.unreadable:
        create = pool.error if why.engines_fail else pool.warning
        yield create(why.about, f"{name}: {why.text}", why.hint)
    for name, field, values in seen.weights:
        yield pool.error(
            "weights",
            f"{name}: replicas whose weights differ in {field}, {values}, use the same "
            "object names, so engines answer from KV blocks that another model computed",
            'the same weights for all, or a "cache_prefix" for each in kv_connector_extra_config',
        )
    yield from _members(seen, replicas)
    yield pool.note(
        "load failures",
        "the reaction of engines to a vanished object is not visible; by default the client gets a "
        "500",
        '"kv_load_failure_policy": "recompute" in --kv-transfer-config',
    )


def _subject(seen: PoolSeen) -> Subject:
    return Subject(f"pool {seen.name}".strip())


def _contents(seen: PoolSeen) -> Iterator[Finding]:
    pool = _subject(seen)
    if seen.max_bytes == 0 or seen.num_segments == 0:
        yield pool.warning(
            "contents",
            "no engine gives it memory, so nothing can be stored",
            f"{CONNECTOR_FLAG}, and global_segment_size in mooncake.json",
        )
        return
    limit = f" of {size(seen.max_bytes)}" if seen.max_bytes else ""
    evicted = f", {seen.num_evicted:,} evicted so far" if seen.num_evicted else ""
    used = size(seen.used_bytes or 0)
    yield pool.ok("contents", f"{seen.num_objects or 0:,} objects, {used}{limit}{evicted}")
    if seen.list_error is not None:
        yield pool.warning(
            "keys",
            f"not listed: {seen.list_error}",
            "blocks stored before a router starts are then unknown; use a longer --wait",
        )
    elif seen.num_listed is not None and seen.num_listed < _LISTED * (seen.num_objects or 0):
        yield pool.warning(
            "tenants",
            f"{seen.num_objects or 0:,} objects exist, {seen.num_listed:,} are listed: the master "
            "lists only tenant `default` (or it evicts now)",
            "a master without --enable_multi_tenants, and a cache_prefix for each deployment",
        )


def _keys(model: PatternSeen, seen: PoolSeen) -> Finding:
    pool = _subject(seen)
    if model.text is None:
        text = f"{model.model}: it has no blocks there yet, or its keys are unknown"
        if not seen.num_objects:
            return pool.ok("keys", text)
        return pool.note(
            "keys", text, "send a prompt through a router: it shows how the keys are built"
        )
    ranks = f", {model.num_ranks} objects a block" if model.num_ranks > 1 else ""
    each = f", {size(round(model.bytes_per_token))} a token" if model.bytes_per_token else ""
    text = f"{model.model}: {model.num_blocks:,} blocks{ranks}{each}, {model.text}@DIGEST"
    return pool.ok("keys", text)


def _members(seen: PoolSeen, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    pool = _subject(seen)
    there = [r for r in replicas if r.error is None and r.pool in (seen.name, None)]
    members = [r for r in there if r.pool == seen.name]
    known = [r.name for r in members if _takes_part(r)]
    unknown = [r.name for r in there if r.name not in known and r.pool == seen.name]
    excluded = [r.name for r in there if r.reads_pool is False]
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
    if any(
        rank.algorithm == "warmroute" and rank.has_handshake and rank.is_verified
        for replica in there
        if replica.reads_pool is not False
        for rank in replica.ranks
    ):
        yield pool.warning(
            "hashes",
            "hashes that cannot be computed do not match the pool's keys",
            "PYTHONHASHSEED=SEED for the engines and --hash-seeds SEED here",
        )


def _takes_part(replica: ReplicaSeen) -> bool:
    has_connector = replica.has_pool_connector or "store" in replica.transfers
    return has_connector or any(rank.num_pooled for rank in replica.ranks)
