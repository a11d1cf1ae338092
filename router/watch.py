"""One replica's life, as the router sees it from beside the requests.

    discover (until it answers) -> register -> [follow its ranks | load tokenizers | probe it]
    -> gone or restarted -> drop its blocks -> discover again

Its configuration stays; its facts are its own, and another process has others.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from policies.view import CandidateId
from router.api.openai import parse_chat
from router.config import Config, ReplicaConfig, TokensConfig
from router.errors import (
    ConfigError,
    RouterError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.fleet.fleet import EngineLoad, Fleet
from router.fleet.health import ProbeFailure
from router.fleet.replica import Replica, ServedModel, candidates_of
from router.index.caches import Caches
from router.index.rank_stream import RankStream
from router.ingest import follow
from router.io.engine_api import EngineApi, EngineFacts, EventSource
from router.io.engine_events import EngineEvents, reachable_endpoint
from router.io.upstream import Upstream
from router.prompt import NeedsEngine, Prompter, Prompters, load_prompter
from router.status import Waiting

logger = logging.getLogger(__name__)

HISTORY: Final = "its event history is being replayed"

_DISCOVER_S: Final = (0.2, 5.0)  # first and longest pause between attempts
_HISTORY_S: Final = 5.0  # readiness waits this long for a replica's event history
_DEFAULT_BLOCK_SIZE: Final = 16
_DEFAULT_CAPACITY: Final = 8192  # blocks guessed for a replica that does not tell


class ReplicaWatch:
    """Lives through the lives of one configured replica.

    Args:
        waiting: Why the replica is not usable (yet); read by readiness and the admin API.
        loaders: Where tokenizers are loaded: a hub may take its time.
    """

    def __init__(
        self,
        name: str,
        replica: ReplicaConfig,
        *,
        config: Config,
        fleet: Fleet,
        caches: Caches,
        prompters: Prompters,
        upstream: Upstream,
        engine_api: EngineApi,
        loaders: Executor,
        waiting: Waiting,
    ) -> None:
        self._name = name
        self._replica = replica
        self._url = replica.url.rstrip("/")
        self._config = config
        self._fleet = fleet
        self._caches = caches
        self._prompters = prompters
        self._upstream = upstream
        self._engine_api = engine_api
        self._loaders = loaders
        self._waiting = waiting

    async def run(self) -> None:
        """Live through a replica's lives."""
        while True:
            facts = await self._discover()
            replica = self._register(facts)
            unloaded = self._claim_prompters(replica)
            try:
                async with asyncio.TaskGroup() as tg:
                    followers = [
                        tg.create_task(work, name=f"follow {candidate}")
                        for candidate, work in self._followers(replica, facts)
                    ]
                    tg.create_task(self._load_prompters(unloaded), name=f"tokenizer {self._name}")
                    tg.create_task(self._await_history(replica), name=f"history {self._name}")
                    await self._probe(replica, facts)
                    for follower in followers:
                        follower.cancel()
            finally:
                for candidate in candidates_of(replica):
                    self._caches.drop(candidate.id)
            logger.warning("replica restarted", extra={"replica": self._name})

    async def _discover(self) -> EngineFacts:
        """Ask until the replica answers; each new reason for not knowing it is logged once."""
        pause_s, longest_s = _DISCOVER_S
        said = ""
        while True:
            try:
                return await self._engine_api.facts(self._name, self._url)
            except UpstreamError as exc:
                self._is_up_after(exc)  # one found before may still have requests waiting
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

        One that was draining when it went away drains on: whoever restarts it wants to say when.
        """
        name = self._name
        known = {replica.name: replica for replica in self._fleet.replicas}.get(name)
        replica = Replica(
            name=name,
            url=self._url,
            models=tuple(
                ServedModel(id=m.id, root=m.root, parent=m.parent, max_model_len=m.max_model_len)
                for m in facts.models
            ),
            num_ranks=facts.num_ranks,
            block_size=facts.block_size,
            num_blocks=facts.num_gpu_blocks,
            version=facts.version,
            publishes_events=bool(self._sources(facts)),
            cost_class=facts.models[0].id,
            draining=known is not None and known.draining,
        )
        self._fleet.add(replica)
        self._fleet.probe_ok(name, self._now())
        for candidate in candidates_of(replica):
            self._caches.add(candidate.id, self._stream(candidate.id, replica))
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
        if facts.prefix_caching is False:
            logger.warning("prefix caching is off", extra={"replica": name})
        return replica

    def _sources(self, facts: EngineFacts) -> dict[int, EventSource]:
        """Choose where each rank's events come from: configured, else what the replica says."""
        if not self._config.events.enabled:
            return {}
        if self._replica.events:
            replay = self._replica.replay or (None,) * len(self._replica.events)
            return {
                rank: EventSource(endpoint=endpoint, replay_endpoint=replay[rank])
                for rank, endpoint in enumerate(self._replica.events)
            }
        return facts.event_sources

    def _stream(self, candidate: CandidateId, replica: Replica) -> RankStream:
        return RankStream(
            candidate,
            self._caches.index,
            block_size=replica.block_size or _DEFAULT_BLOCK_SIZE,
            capacity_blocks=replica.num_blocks or _DEFAULT_CAPACITY,
            seeds=self._config.hash.seeds,
            lora_paths={m.id: m.root for m in replica.models if m.parent and m.root},
        )

    def _followers(self, replica: Replica, facts: EngineFacts) -> Iterator[tuple[CandidateId, Any]]:
        sources = self._sources(facts)
        for rank, candidate in enumerate(candidates_of(replica)):
            source, stream = sources.get(rank), self._caches.stream(candidate.id)
            if source is None or stream is None:
                continue
            try:
                events = _events(source, replica.url, self._config.events.replay_timeout_s)
            except (ValueError, ConfigError) as exc:  # what an engine says must not end the router
                logger.warning(
                    "event stream not usable: routing to it is approximate",
                    extra={"candidate": candidate.id, "reason": str(exc)},
                )
                continue
            yield candidate.id, follow(stream, events)

    async def _await_history(self, replica: Replica) -> None:
        """Hold readiness back for the replica's event history, but not for ever."""
        if not replica.publishes_events:
            return
        deadline_s = self._now() + _HISTORY_S
        streams = [self._caches.stream(c.id) for c in candidates_of(replica)]
        while self._now() < deadline_s:
            if all(stream is None or stream.has_history for stream in streams):
                break
            await asyncio.sleep(0.02)
        self._waiting.pop(replica.name, None)

    def _claim_prompters(self, replica: Replica) -> list[ServedModel]:
        """List the models whose tokenizer nobody loads yet; at once, so that readiness waits."""
        self._prompters.adapt({m.id: m.parent for m in replica.models if m.parent is not None})
        bases = [m for m in replica.models if m.parent is None]
        return [m for m in bases if self._prompters.begin(m.id)]

    async def _load_prompters(self, models: list[ServedModel]) -> None:
        """Load the tokenizer and template of each model."""
        for model in models:
            tokens = self._config.tokens
            source = tokens.models.get(model.id) or model.root or model.id
            started_s = self._now()
            prompter = await asyncio.get_running_loop().run_in_executor(
                self._loaders,
                partial(_warm_prompter, source, tokens.chat_templates.get(model.id), tokens),
            )
            self._prompters.finish(model.id, prompter)
            fields = {
                "model": model.id,
                "source": source,
                "seconds": round(self._now() - started_s, 1),
            }
            if prompter.engine_only is None:
                logger.info("tokenizer ready", extra=fields)
            else:
                logger.warning(
                    "the engine must tokenize", extra={**fields, "reason": prompter.engine_only}
                )

    async def _probe(self, replica: Replica, facts: EngineFacts) -> None:
        """Probe health and load until another process answers at the replica's address."""
        name, health = replica.name, self._config.health
        load_due_s = self._now()
        was_up = True
        while True:
            await asyncio.sleep(health.interval_s * random.uniform(0.9, 1.1))
            try:
                await self._engine_api.ping(name, replica.url)
            except UpstreamError as exc:
                is_up = self._is_up_after(exc)
                if was_up and not is_up:
                    was_up = False
                    logger.warning("replica down", extra={"replica": name, "reason": exc.message})
                continue
            if self._now() >= load_due_s or not was_up:
                load_due_s = self._now() + health.load_interval_s
                load = await self._engine_api.load(name, replica.url)
                if not was_up and (load is None or load.started_s is None):
                    return  # it does not say whether it is another process: ask for everything
                if load is not None:
                    if load.started_s != facts.started_s:
                        return
                    for candidate in candidates_of(replica):
                        rank = candidate.rank or 0
                        self._fleet.note_engine_load(
                            candidate.id,
                            EngineLoad(
                                num_running=load.num_running.get(rank, 0),
                                num_waiting=load.num_waiting.get(rank, 0),
                                at_s=self._now(),
                            ),
                        )
            self._fleet.probe_ok(name, self._now())
            if not was_up:
                was_up = True
                logger.info("replica up again", extra={"replica": name})

    def _is_up_after(self, failure: UpstreamError) -> bool:
        """Count a failed probe; where it was one too many, who waits there moves on at once."""
        now_s = self._now()
        self._fleet.probe_failed(self._name, _probe_failure(failure), now_s, jitter=random.random())
        is_up = self._fleet.is_up(self._name, now_s)
        if not is_up:
            self._upstream.abort(self._name)
        return is_up

    def _now(self) -> float:
        return time.monotonic()


def _events(source: EventSource, url: str, replay_timeout_s: float) -> EngineEvents:
    """Open a rank's event stream.

    Raises:
        ValueError, ConfigError: the endpoint is none.
    """
    replay = source.replay_endpoint
    return EngineEvents(
        reachable_endpoint(source.endpoint, url),
        reachable_endpoint(replay, url) if replay else None,
        topic=source.topic,
        replay_timeout_s=replay_timeout_s,
    )


def _warm_prompter(source: str, chat_template: Path | None, config: TokensConfig) -> Prompter:
    """Load a model's prompter and use it once: the first request need not compile a template.

    Whatever a model directory does to the libraries that read it, the engine can tokenize.
    """
    request = parse_chat({"model": source, "messages": [{"role": "user", "content": "warm up"}]})
    try:
        prompter = load_prompter(
            source,
            chat_template=chat_template,
            trust_request_chat_template=config.trust_request_chat_template,
            cache_tokens=config.cache_tokens,
        )
        with suppress(NeedsEngine, RouterError):
            prompter.plan_chat(request).encode()
    except Exception as exc:
        return Prompter(None, None, reason=f"{type(exc).__name__}: {exc}")
    return prompter


def _probe_failure(error: UpstreamError) -> ProbeFailure:
    if isinstance(error, UpstreamUnreachable):
        return ProbeFailure.REFUSED
    if isinstance(error, UpstreamTimeout):
        return ProbeFailure.TIMEOUT
    return ProbeFailure.BAD_STATUS
