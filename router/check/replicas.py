"""Looks at one replica, in the way the router does when it finds one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from policies.view import CandidateId
from router.check.deadline import Deadline
from router.check.ports import reach
from router.check.seen import Publisher, RankSeen, ReplicaSeen
from router.check.tokenizers import Tokenizers
from router.cluster.candidate_source import CandidateSource
from router.config import Config
from router.contracts import BlockKey
from router.discovery.engine_api import EngineApi, EngineFacts
from router.errors import ConfigError, UpstreamError
from router.index.block_index import BlockIndex
from router.kv_events.follower import Pace, follow
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import EngineEvents, EventSource, Received, reachable_endpoint
from router.pool.catalog import PoolCatalog
from router.replicas.registry import Entry

_CONNECT_S: Final = 2.0
_HANDSHAKE_S: Final = 2.0  # of a publisher whose port is open
_SETTLE_S: Final = 0.3  # for a live batch, where there is no replay to wait for
_PACE: Final = Pace(tick_s=0.05, quiet_s=3600.0, subscribe_s=3600.0)


async def look_at_replica(
    entry: Entry,
    *,
    config: Config,
    api: EngineApi,
    tokenizers: Tokenizers,
    pool: PoolCatalog | None,
    deadline: Deadline,
) -> ReplicaSeen:
    """See what a router would; whatever does not answer is said in what comes back."""
    url = entry.replica.url.rstrip("/")
    seen = ReplicaSeen(
        name=entry.name,
        identity=entry.identity,
        url=url,
        wants_events=config.events.enabled,
        events_configured=bool(entry.replica.events),
        reads_pool=entry.replica.pool,
        is_added=not any(r.identity == entry.identity for r in config.replicas),
        order="remove" if entry.leaving else "drain" if entry.draining else "none",
    )
    if entry.leaving:
        return seen
    with deadline.waiting(entry.name):
        try:
            async with asyncio.timeout(deadline.left_s):
                facts = await api.facts(entry.name, url)
                publishers = await api.event_publishers(entry.name, url)
        except UpstreamError as exc:
            return replace(seen, error=exc.message)
        except TimeoutError:
            return replace(seen, error=f"{url} was silent")
    seen = _with_facts(seen, facts, publishers)
    if pool is not None:
        _name_models(pool, facts)
    async with asyncio.TaskGroup() as tg:
        models = [
            tg.create_task(
                tokenizers.look(
                    entry.name,
                    url,
                    model,
                    num_adapters=sum(other.parent == model.id for other in facts.models),
                    api=api,
                )
            )
            for model in facts.models
            if model.parent is None
        ]
        ranks = [
            tg.create_task(_look_at_rank(rank, source, entry, facts, config, pool, deadline))
            for rank, source in _sources(entry, facts, config).items()
        ]
    return replace(
        seen,
        models=tuple(task.result() for task in models),
        ranks=tuple(task.result() for task in ranks),
    )


def _with_facts(
    seen: ReplicaSeen, facts: EngineFacts, publishers: list[EventSource] | None
) -> ReplicaSeen:
    return replace(
        seen,
        version=facts.version,
        block_size=facts.block_size,
        num_blocks=facts.num_gpu_blocks,
        prefix_caching=facts.prefix_caching,
        started_s=facts.started_s,
        num_ranks=facts.num_ranks,
        has_source_route=publishers is not None,
        silent_publishers=tuple(
            Publisher(one.enable_kv_cache_events, one.publisher)
            for one in publishers or ()
            if not one.enable_kv_cache_events or one.publisher not in ("zmq", None)
        ),
        has_pool_connector=facts.has_pool_connector,
    )


def _sources(entry: Entry, facts: EngineFacts, config: Config) -> dict[int, EventSource]:
    """Choose endpoints as router.discovery.watch does."""
    if not config.events.enabled:
        return {}
    if not entry.replica.events:
        return facts.event_sources
    replay = entry.replica.replay or (None,) * len(entry.replica.events)
    return {
        rank: EventSource(endpoint=endpoint, replay_endpoint=replay[rank])
        for rank, endpoint in enumerate(entry.replica.events)
    }


def _base_model(facts: EngineFacts) -> str:
    return next((model.id for model in facts.models if model.parent is None), facts.models[0].id)


def _name_models(pool: PoolCatalog, facts: EngineFacts) -> None:
    """Say what the replica's objects in the pool may be called, as router.discovery.watch does."""
    own = [model for model in facts.models if model.parent is None]
    roots = [model.root for model in own if model.root]
    names = [model.id for model in own]
    pool.add_model(_base_model(facts), [*names, *roots, *(Path(root).name for root in roots)])


# -- events --------------------------------------------------------------------------------------


class _Heard(EngineEvents):
    """Events that remember whether their publisher ever answered."""

    is_up = False

    async def receive(self, timeout_s: float) -> Received:
        received = await super().receive(timeout_s)
        self.is_up = self.is_up or bool(received.is_up)
        return received


async def _look_at_rank(
    rank: int,
    source: EventSource,
    entry: Entry,
    facts: EngineFacts,
    config: Config,
    pool: PoolCatalog | None,
    deadline: Deadline,
) -> RankSeen:
    """Try a rank's endpoints, then follow its events until its history is known."""
    url = entry.replica.url.rstrip("/")
    seen = RankSeen(
        rank=rank, told=source.endpoint, endpoint=source.endpoint, reach="not an address"
    )
    try:
        endpoint = reachable_endpoint(source.endpoint, url)
        replay = reachable_endpoint(source.replay_endpoint, url) if source.replay_endpoint else None
    except ValueError as exc:
        return replace(seen, reason=str(exc))
    with deadline.waiting(f"{entry.name} events"):
        timeout_s = deadline.at_most(_CONNECT_S)
        seen = replace(
            seen,
            endpoint=endpoint,
            reach=await reach(endpoint, timeout_s=timeout_s),
            replay_endpoint=replay,
            replay_reach=await reach(replay, timeout_s=timeout_s) if replay else None,
        )
        if seen.reach != "open":
            return replace(seen, reason="publisher unreachable")
        index, candidate = BlockIndex(), CandidateId(entry.name)
        pooled = _Pooled(pool, _base_model(facts)) if pool is not None else None
        stream = CandidateSource(
            candidate,
            index,
            url=url,
            endpoint=source,
            replay_timeout_s=config.events.replay_timeout_s,
            block_size=facts.block_size,
            capacity_blocks=facts.num_gpu_blocks,
            seeds=config.hash.seeds,
            lora_paths={m.id: m.root for m in facts.models if m.parent and m.root},
            pool_stored=pooled.stored if pooled is not None else None,
        ).rank_stream()
        try:
            events = _Heard(
                endpoint,
                replay if seen.replay_reach == "open" else None,
                topic=source.topic,
                replay_timeout_s=deadline.at_most(config.events.replay_timeout_s),
            )
        except ConfigError as exc:
            return replace(seen, reach="not an address", reason=exc.message)
        await _history(stream, events, deadline)
    standing, counters = stream.standing_now(), stream.counters
    is_replayed = counters.num_replays > counters.num_failed_replays
    return replace(
        seen,
        has_handshake=events.is_up,
        has_replay=is_replayed if events.has_replay and events.is_up else None,
        state=standing.state,
        reason=standing.reason,
        algorithm=standing.contract.algorithm,
        seed=standing.contract.seed,
        block_size=standing.contract.block_size,
        is_verified=standing.is_verified,
        num_batches=counters.num_batches,
        num_blocks=index.num_blocks(candidate),
        num_pooled=pooled.num_blocks if pooled is not None else 0,
    )


class _Pooled:
    """Counts what a replica says to have written to the pool, and tells the pool's directory."""

    def __init__(self, pool: PoolCatalog, model: str) -> None:
        self._pool = pool
        self._model = model
        self.num_blocks = 0

    def stored(self, keys: Sequence[BlockKey]) -> None:
        self.num_blocks += len(keys)
        self._pool.stored(self._model, keys)


async def _history(stream: RankStream, events: _Heard, deadline: Deadline) -> None:
    """Follow until history is read, or there is none to read, or the time is over."""
    async with asyncio.TaskGroup() as tg:
        following = tg.create_task(follow(stream, events, pace=_PACE))
        await _until(lambda: events.is_up, deadline.at_most(_HANDSHAKE_S))
        if events.is_up and events.has_replay:
            await _until(lambda: _is_read(stream), deadline.left_s)
        elif events.is_up:
            await asyncio.sleep(deadline.at_most(_SETTLE_S))
        following.cancel()


async def _until(is_so: Callable[[], bool], timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not is_so():  # noqa: ASYNC110 (there is no event for what it asks)
                await asyncio.sleep(0.02)


def _is_read(stream: RankStream) -> bool:
    counters = stream.counters
    if counters.num_failed_replays:
        return True
    return counters.num_replays > 0 and stream.wanted_replay is None
