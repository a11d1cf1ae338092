"""The life of one replica, beside the requests.

    discover (until it answers) -> register -> [follow its ranks | load tokenizers | probe it]
    -> gone or restarted -> drop its blocks -> discover again

Its configuration stays; its facts belong to a process, and the next one may have others.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Final

from router.cluster import Sharing
from router.cluster.candidate_source import CandidateSource
from router.config import Config, ReplicaConfig, bootstrap_of, pool_of
from router.discovery.dates import DateWatch
from router.discovery.engine_api import EngineApi, EngineFacts, RankLoads
from router.discovery.hand_over_probe import WrongIds, takes_ids
from router.discovery.prompter_loader import PrompterLoader
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.discovery.status import Waiting
from router.errors import (
    ConfigError,
    NotAsked,
    RouterError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.index.cache_view import CacheView
from router.index.last_block import LastBlock
from router.kv_events.follower import follow
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import EventSource
from router.pool.keys import names_in_keys
from router.pool.pools import Pool
from router.pool.readers import PoolReaders
from router.replicas.fleet import EngineLoad, Fleet
from router.replicas.health import ProbeFailure
from router.replicas.replica import Candidate, Replica, candidates_of
from router.supervisor import keep_running
from router.tokens import NeedsEngine, Prompters
from router.tokens.hand_over import HandOver
from router.upstream import Upstream

logger = logging.getLogger(__name__)

HISTORY: Final = "its event history is being replayed"

_DISCOVER_S: Final = (0.2, 5.0)  # first and longest pause between attempts
_ASK_AGAIN_S: Final = 30.0
_LOADING_S: Final = 0.2  # pause between looks whether a tokenizer is loaded
_HISTORY_S: Final = 5.0  # readiness waits this long for a replica's event history


class ReplicaWatch:
    """Watches one configured replica, from process to process.

    Args:
        waiting: Why the replica is not usable (yet); read by readiness and the admin API.
        loaders: Where tokenizers are loaded: a hub may take its time.
        is_offered: Whether it may have requests once it is found; a draining one goes on draining.
        sharing: What several routers share; None: there is only this one.
    """

    def __init__(
        self,
        name: str,
        replica: ReplicaConfig,
        *,
        config: Config,
        fleet: Fleet,
        caches: CacheView,
        prompters: Prompters,
        hand_over: HandOver,
        upstream: Upstream,
        engine_api: EngineApi,
        served_models: ServedModels,
        loaders: Executor,
        waiting: Waiting,
        is_offered: Callable[[], bool],
        sharing: Sharing | None,
        sleepers: Sleepers,
        pools: Mapping[str, Pool],
        readers: PoolReaders,
        count_failure: Callable[[str], None],
    ) -> None:
        self._name = name
        self._replica = replica
        self._url = replica.url.rstrip("/")
        self._config = config
        self._fleet = fleet
        self._caches = caches
        self._prompters = prompters
        self._hand_over = hand_over
        self._upstream = upstream
        self._engine_api = engine_api
        self._served_models = served_models
        self._prompter_loader = PrompterLoader(prompters, config.tokens, loaders)
        self._waiting = waiting
        self._is_offered = is_offered
        self._sharing = sharing
        self._sleepers = sleepers
        self._pools = pools
        self._readers = readers
        self._count_failure = count_failure

    async def run(self) -> None:
        """Watch the replica until cancelled."""
        while True:
            facts = await self._discover()
            replica = self._register(facts)
            sources = self._sources(replica, facts)
            self._sleepers.forget(self._name)
            self._sleepers.note(self._name, facts.sleep, self._now())
            self._prompter_loader.load(replica)
            try:
                async with asyncio.TaskGroup() as tg:
                    followers = [
                        tg.create_task(self._follow(source), name=f"follow {source.candidate}")
                        for source in sources
                    ]
                    tg.create_task(self._await_history(replica), name=f"history {self._name}")
                    asides = [
                        tg.create_task(
                            self._ask_about_ids(replica), name=f"hand over {self._name}"
                        ),
                        *(
                            tg.create_task(self._watch_date(m.id, replica), name=f"date of {m.id}")
                            for m in replica.models
                            if m.parent is None and m.id not in self._config.tokens.start_dates
                        ),
                    ]
                    await self._probe(replica, facts)
                    for aside in asides:
                        aside.cancel()
                    for follower, source in zip(followers, sources, strict=True):
                        if self._sharing is not None:
                            self._sharing.following.restarted(source.candidate)
                        follower.cancel()
            finally:
                self._hand_over.forget(self._name)
                self._served_models.forget(self._name)
                for candidate in candidates_of(replica):
                    self._caches.drop(candidate.id)
            logger.warning("replica restarted", extra={"replica": self._name})

    async def _discover(self) -> EngineFacts:
        """Ask until the replica answers; each new reason for a failure is logged once."""
        pause_s, longest_s = _DISCOVER_S
        said = ""
        while True:
            try:
                return await self._engine_api.facts(self._name, self._url)
            except UpstreamError as exc:
                self._is_up_after(exc)  # requests may be waiting at one found before
                self._waiting[self._name] = exc.message
                if exc.message != said:
                    said = exc.message
                    logger.warning(
                        "replica not usable yet", extra={"replica": self._name, "reason": said}
                    )
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(pause_s * 1.6, longest_s)

    def _register(self, facts: EngineFacts) -> Replica:
        """Put a discovered replica into the fleet, its ranks' caches unknown as yet.

        One that was draining when it went away goes on draining: the operator decides when it ends.
        """
        name, transfer = self._name, self._replica.transfer or self._config.prefill.transfer
        has_bootstrap = (self._replica.role, transfer) == ("prefill", "mooncake")
        replica = Replica(
            name=name,
            url=self._url,
            models=facts.models,
            num_ranks=facts.num_ranks,
            block_size=facts.block_size,
            num_blocks=facts.num_gpu_blocks,
            num_cache_tokens=facts.num_cache_tokens,
            version=facts.version,
            publishes_events=bool(facts.endpoints(self._config.events, self._replica)),
            cost_class=self._replica.hardware or facts.models[0].id,
            weight=self._replica.weight,
            draining=not self._is_offered(),
            role=self._replica.role,
            transfer=transfer,
            bootstrap=bootstrap_of(self._replica) if has_bootstrap else None,
            seems=facts.seems,
            pool=pool_of(self._replica, tuple(self._pools)),
        )
        self._fleet.add(replica)
        self._fleet.probe_ok(name, self._now())
        self._attach_pool(replica)
        if replica.publishes_events:
            self._waiting[name] = HISTORY
        else:
            self._waiting.pop(name, None)
        logger.info(
            "replica found",
            extra={
                "replica": name,
                "url": replica.url,
                "models": ",".join(m.id for m in replica.models),
                "version": facts.version or "unknown",
                "ranks": facts.num_ranks,
                "block_size": facts.block_size,
                "blocks": facts.num_gpu_blocks,
                "events": "yes" if replica.publishes_events else "no: routing to it is approximate",
            },
        )
        if facts.seems not in (None, replica.role):
            logger.warning(
                "replica seems to have another role: set replicas[].role",
                extra={"replica": name, "role": replica.role, "seems": facts.seems},
            )
        if facts.prefix_caching is False:
            logger.warning("prefix caching is off", extra={"replica": name})
        return replica

    def _sources(self, replica: Replica, facts: EngineFacts) -> list[CandidateSource]:
        """Create each rank's stream; nothing is known of its cache yet."""
        endpoints = facts.endpoints(self._config.events, self._replica)
        lora_paths = self._served_models.lora_paths(replica)
        sources = [
            self._candidate_source(candidate, replica, endpoints.get(rank), lora_paths)
            for rank, candidate in enumerate(candidates_of(replica))
        ]
        eagle = self._replica.eagle
        for source in sources:
            last_block = None
            if eagle or (eagle is None and facts.speculates):
                last_block = LastBlock(eagle, speculates=facts.speculates)
            self._caches.add(source.candidate, source.rank_stream(), last_block)
        return sources

    def _attach_pool(self, replica: Replica) -> None:
        """Note what the replica's objects in the pool may be called; forget whether it reads it."""
        said = self._replica.pool
        self._readers.configure(self._name, said if isinstance(said, bool) else None)
        if replica.pool is not None:
            self._pools[replica.pool].catalog.add_model(
                replica.base_model,
                names_in_keys(replica.models),
                replica=self._name,
                layout=self._replica.pool_layout,
            )
        elif self._pools and said is not False:
            logger.warning(
                "replica names no pool: it is taken to read none; set replicas[].pool",
                extra={"replica": self._name, "pools": ",".join(self._pools)},
            )
        for candidate in candidates_of(replica):
            self._readers.forget(candidate.id)
            for pool in self._pools.values():
                pool.catalog.forget(candidate.id)

    def _candidate_source(
        self,
        candidate: Candidate,
        replica: Replica,
        endpoint: EventSource | None,
        lora_paths: Mapping[str, str],
    ) -> CandidateSource:
        return CandidateSource(
            candidate.id,
            self._caches.index,
            url=replica.url,
            endpoint=endpoint,
            replay_timeout_s=self._config.events.replay_timeout_s,
            block_size=replica.block_size,
            capacity_blocks=replica.num_blocks,
            seeds=self._config.hash.seeds,
            lora_paths=lora_paths,
            pool_stored=(
                partial(
                    self._pools[replica.pool].catalog.stored,
                    replica.base_model,
                    candidate=candidate.id,
                )
                if replica.pool is not None
                else None
            ),
        )

    async def _follow(self, source: CandidateSource) -> None:
        """Keep a candidate's blocks known, from its engine or from other routers."""
        if not source.has_events:
            return
        await keep_running(
            partial(self._follow_once, source),
            follower="events",
            count=self._count_failure,
            on_failure=partial(self._restart_stream, source),
            subject={"candidate": source.candidate},
        )

    async def _follow_once(self, source: CandidateSource) -> None:
        try:
            if self._sharing is not None:
                await self._sharing.following.follow(source)
                return
            stream = self._caches.stream(source.candidate)
            assert isinstance(stream, RankStream)
            await follow(stream, source.events())
        except ConfigError as exc:  # its endpoint is none: that stays so until it restarts
            logger.warning(
                "event stream not usable: routing to it is approximate",
                extra={"candidate": source.candidate, "reason": str(exc)},
            )

    def _restart_stream(self, source: CandidateSource, reason: str) -> None:
        """Forget a candidate's blocks: its follower failed, perhaps in the middle of a change."""
        stream = source.rank_stream()
        stream.failed(f"its follower failed: {reason}")
        self._caches.hand_over(source.candidate, stream)
        self._caches.index.clear(source.candidate)

    async def _await_history(self, replica: Replica) -> None:
        """Delay readiness until the replica's event history is read, but not for ever."""
        if not replica.publishes_events:
            return
        deadline_s = self._now() + _HISTORY_S
        while self._now() < deadline_s:
            streams = [self._caches.stream(c.id) for c in candidates_of(replica)]
            if all(stream is None or stream.has_history for stream in streams):
                break
            await asyncio.sleep(0.02)
        self._waiting.pop(replica.name, None)

    async def _ask_about_ids(self, replica: Replica) -> None:
        """Find out whether the replica takes token ids, where its models' are proven."""
        models = [model.id for model in replica.models if model.parent is None]
        pause_s = self._config.health.interval_s
        while True:
            await asyncio.sleep(pause_s * random.uniform(0.9, 1.1))
            pause_s = self._config.health.interval_s
            for model, path in self._hand_over.to_probe(self._name, models, self._now()):
                prompter = self._prompters.get(model)
                assert prompter is not None
                try:
                    takes = await takes_ids(
                        self._engine_api,
                        self._name,
                        replica.url,
                        model=model,
                        path=path,
                        prompter=prompter,
                    )
                except WrongIds:
                    self._hand_over.suspend(model, "ids", self._now())
                except UpstreamError as exc:
                    fields = {"replica": self._name, "reason": exc.message}
                    logger.warning("not known yet whether it takes token ids", extra=fields)
                    pause_s = _ASK_AGAIN_S
                except (NeedsEngine, RouterError):
                    self._hand_over.observe_probe(self._name, model, path, takes=False)
                else:
                    self._hand_over.observe_probe(self._name, model, path, takes=takes)

    async def _watch_date(self, model: str, replica: Replica) -> None:
        """Watch the date in a model's prompts, if there is one."""
        while True:
            prompter = self._prompters.get(model)
            if prompter is not None:
                break
            await asyncio.sleep(_LOADING_S)
        if prompter.is_dated:
            watch = DateWatch(
                model, prompter, replica=replica.name, url=replica.url, api=self._engine_api
            )
            await watch.run()

    async def _probe(self, replica: Replica, facts: EngineFacts) -> None:
        """Probe health and load until another process answers at the replica's address."""
        name, health = replica.name, self._config.health
        load_due_s = self._now()
        was_up = True
        while True:
            await asyncio.sleep(health.interval_s * random.uniform(0.9, 1.1))
            try:
                await self._engine_api.ping(name, replica.url)
            except NotAsked:
                continue
            except UpstreamError as exc:
                is_up = self._is_up_after(exc)
                if was_up and not is_up:
                    was_up = False
                    logger.warning("replica down", extra={"replica": name, "reason": exc.message})
                continue
            if self._now() >= load_due_s or not was_up:
                asked_s = self._now()
                load_due_s = asked_s + health.load_interval_s
                load = await self._engine_api.load(
                    name,
                    replica.url,
                    names_sources=facts.names_sources,
                    shows_pause=facts.shows_pause,
                )
                if not was_up and (load is None or load.started_s is None):
                    return  # it may be another process: ask for everything
                if load is not None:
                    if _is_another(load, facts):
                        return
                    if load.rank_numbers and load.rank_numbers != facts.rank_numbers:
                        fields = {"replica": name, "ranks": len(load.rank_numbers)}
                        logger.warning("replica has other ranks now", extra=fields)
                        return  # scaled: ranks that went are dropped, those that came are found
                    if load.sleep is not None:
                        self._sleepers.note(name, load.sleep, asked_s)
                    for candidate in candidates_of(replica):
                        rank = candidate.rank or 0
                        self._fleet.note_engine_load(
                            candidate.id,
                            EngineLoad(
                                num_running=load.num_running.get(rank, 0),
                                num_waiting=load.num_waiting.get(rank, 0),
                                kv_usage=load.kv_usage.get(rank),
                                token_s=load.token_s.get(rank, 0.0),
                                num_tokens=load.num_tokens.get(rank, 0),
                                at_s=self._now(),
                            ),
                        )
                if not await self._serves_the_same(name):
                    return
            self._fleet.probe_ok(name, self._now())
            if not was_up:
                was_up = True
                logger.info("replica up again", extra={"replica": name})

    async def _serves_the_same(self, name: str) -> bool:
        """Refresh the adapters; False: its base models are others, so it is another process."""
        try:
            return await self._served_models.refresh(name)
        except UpstreamError:
            return True  # health is judged by probes

    def _is_up_after(self, failure: UpstreamError) -> bool:
        """Count a failed probe; if the replica is down by it, waiting requests move on at once."""
        now_s = self._now()
        self._fleet.probe_failed(self._name, _probe_failure(failure), now_s, jitter=random.random())
        is_up = self._fleet.is_up(self._name, now_s)
        if not is_up:
            self._upstream.abort(self._name)
        return is_up

    def _now(self) -> float:
        return time.monotonic()


def _is_another(load: RankLoads, facts: EngineFacts) -> bool:
    """Return whether another process answers: it started later, or has another cache.

    Not every engine says when it started: with several API servers vLLM's metrics do not.
    """
    has_shapes = bool(load.cache_shapes and facts.cache_shapes)
    return load.started_s != facts.started_s or (
        has_shapes and load.cache_shapes != facts.cache_shapes
    )


def _probe_failure(error: UpstreamError) -> ProbeFailure:
    if isinstance(error, UpstreamUnreachable):
        return ProbeFailure.REFUSED
    if isinstance(error, UpstreamTimeout):
        return ProbeFailure.TIMEOUT
    return ProbeFailure.BAD_STATUS
