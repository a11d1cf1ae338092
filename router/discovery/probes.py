"""Probes of replicas: their health, their load, and whether it is still the same process."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress

from router.config import HealthConfig
from router.discovery.engine_api import EngineApi
from router.discovery.engine_facts import EngineFacts, RankLoads
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.errors import NotAsked, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from router.replicas.fleet import Fleet
from router.replicas.health import ProbeFailure
from router.replicas.replica import Replica, candidates_of
from router.upstream import Upstream

logger = logging.getLogger(__name__)


class Probes:
    """Probes replicas, and puts the results into the fleet."""

    def __init__(
        self,
        health: HealthConfig,
        *,
        engine_api: EngineApi,
        fleet: Fleet,
        upstream: Upstream,
        served_models: ServedModels,
        sleepers: Sleepers,
    ) -> None:
        self._health = health
        self._engine_api = engine_api
        self._fleet = fleet
        self._upstream = upstream
        self._served_models = served_models
        self._sleepers = sleepers

    async def run(self, replica: Replica, facts: EngineFacts) -> None:
        """Probe health and load until another process answers at the replica's address."""
        name, health = replica.name, self._health
        load_due_s = time.monotonic()
        self._sleepers.forget(name)
        self._sleepers.note(name, facts.sleep, load_due_s)
        was_up, suspected, signs = True, asyncio.Event(), self._fleet.signs(name)
        signs.on_doubt, signs.has_broken = suspected.set, False
        while True:
            await _pause(suspected, health.interval_s * random.uniform(0.9, 1.1))
            has_broken, signs.has_broken = signs.has_broken, False
            is_suspect = suspected.is_set() and not has_broken
            suspected.clear()
            is_silent = False
            try:
                await self._engine_api.ping(name, replica.url)
            except NotAsked:
                continue
            except UpstreamError as exc:
                is_silent = was_up and self._shows_life(name, exc)
                is_up = self.is_up_after(name, exc, has_broken=has_broken)
                if was_up and not is_up:
                    was_up = False
                    logger.warning("replica down", extra={"replica": name, "reason": exc.message})
                if not is_silent:
                    continue
            if time.monotonic() >= load_due_s or not was_up or is_suspect:
                load_due_s = time.monotonic() + health.load_interval_s
                if not await self._read_load(replica, facts, was_up=was_up):
                    return
            if is_silent:
                continue
            self._fleet.probe_ok(name, time.monotonic())
            if not was_up:
                was_up = True
                logger.info("replica up again", extra={"replica": name})

    async def _read_load(self, replica: Replica, facts: EngineFacts, *, was_up: bool) -> bool:
        """Read a replica's load; False: ask it for everything, it may be another process."""
        name, fleet = replica.name, self._fleet
        asked_s, num_sent = time.monotonic(), fleet.num_sent(name)
        load = await self._engine_api.load(
            name, replica.url, names_sources=facts.names_sources, shows_pause=facts.shows_pause
        )
        if load is None:
            self._sleepers.look_again(name, asked_s)
        figures = load.figures if load is not None else None
        num_sent = min(num_sent, fleet.num_sent(name))
        fleet.signs(name).read(figures, num_sent, time.monotonic())
        if not was_up and (load is None or load.started_s is None):
            return False
        if load is not None:
            if _is_another(load, facts):
                return False
            if load.rank_numbers and load.rank_numbers != facts.rank_numbers:
                fields = {"replica": name, "ranks": len(load.rank_numbers)}
                logger.warning("ranks of the replica changed", extra=fields)
                return False  # scaled: ranks that went are dropped, those that came are found
            if load.sleep is not None:
                self._sleepers.note(name, load.sleep, asked_s)
            for candidate in candidates_of(replica):
                if (reading := load.ranks.get(candidate.rank or 0)) is not None:
                    fleet.note_engine_load(candidate.id, reading)
        return await self._serves_the_same(name)

    def _shows_life(self, name: str, failure: UpstreamError) -> bool:
        """Return whether bytes of answers came recently from a replica that answered no probe."""
        lately_s = self._health.interval_s + self._health.timeout_s
        alive_s = self._fleet.signs(name).alive_s
        return isinstance(failure, UpstreamTimeout) and alive_s >= time.monotonic() - lately_s

    async def _serves_the_same(self, name: str) -> bool:
        """Refresh the adapters; False: its base models are others, so it is another process."""
        try:
            return await self._served_models.refresh(name)
        except UpstreamError:
            return True  # health is judged by probes

    def is_up_after(self, name: str, failure: UpstreamError, *, has_broken: bool = False) -> bool:
        """Count a failed probe; if the replica is down now, waiting requests move on at once.

        A probe without an answer does not count while bytes of answers come. If a request has
        broken off there, one probe that says that it is not healthy is enough: an engine whose core
        died answers 503 until its process ends.
        """
        now_s = time.monotonic()
        if self._shows_life(name, failure):
            self._fleet.probe_excused(name)
            return True
        how = _probe_failure(failure)
        if has_broken and how is ProbeFailure.BAD_STATUS:
            how = ProbeFailure.REFUSED
        self._fleet.probe_failed(name, how, now_s, jitter=random.random())
        is_up = self._fleet.is_up(name, now_s)
        if not is_up:
            self._upstream.abort(name)
        return is_up


async def _pause(suspected: asyncio.Event, pause_s: float) -> None:
    """Wait until a probe is due, or a request suspects that the replica hangs."""
    with suppress(TimeoutError):
        async with asyncio.timeout(pause_s):
            await suspected.wait()


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
