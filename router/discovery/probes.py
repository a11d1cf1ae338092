"""Probes of replicas: their health, their load, and whether it is still the same process."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress

from msgspec import Struct

from router.base.errors import (
    NotAsked,
    Stalled,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.config import HealthConfig
from router.discovery.engine_api import EngineApi
from router.discovery.engine_facts import EngineFacts, RankLoads
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.replicas.fleet import Fleet
from router.replicas.health import ProbeFailure
from router.replicas.replica import Replica, candidates_of
from router.upstream import Upstream

logger = logging.getLogger(__name__)


class _Reading(Struct, frozen=True):
    """A reading of a replica's load.

    load: None: it has no metrics, or did not answer.
    num_sent: Requests that it had when it was asked.
    """

    load: RankLoads | None
    num_sent: int
    asked_s: float


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
        self._fleet.members.note_signs(name, False, load_due_s)
        self._sleepers.forget(name)
        self._sleepers.note(name, facts.sleep, load_due_s)
        was_up, is_silent, suspected = True, False, asyncio.Event()
        signs = self._fleet.members.signs(name)
        signs.on_doubt, signs.has_broken = suspected.set, False
        while True:
            await _pause(suspected, health.interval_s * random.uniform(0.9, 1.1))
            has_broken, signs.has_broken = signs.has_broken, False
            is_doubted = suspected.is_set() and not has_broken
            is_due = not was_up or is_doubted or self._sleepers.is_away(name)
            suspected.clear()
            if is_silent or is_due or time.monotonic() >= load_due_s:
                load_due_s = time.monotonic() + health.load_interval_s
                failure, reading = await self._look(replica, facts)
            else:
                failure, reading = await self._ping(replica), None
            if isinstance(failure, NotAsked):
                continue
            is_silent = was_up and isinstance(failure, UpstreamTimeout)
            if reading is not None and (failure is None or is_silent):
                if not self._take(reading, replica, facts, was_up=was_up):
                    return
                if not is_silent and not await self._serves_the_same(name):
                    return
            if failure is not None:
                is_up = self.is_up_after(name, failure, has_broken=has_broken)
                if was_up and not is_up:
                    was_up = False
                    reason = failure.message
                    logger.warning("replica down", extra={"replica": name, "reason": reason})
                continue
            self._fleet.members.probe_ok(name, time.monotonic())
            if not was_up:
                was_up = True
                logger.info("replica up again", extra={"replica": name})

    async def _ping(self, replica: Replica) -> UpstreamError | None:
        """Probe a replica's health; return how that failed."""
        try:
            await self._engine_api.ping(replica.name, replica.url)
        except UpstreamError as exc:
            return exc
        return None

    async def _look(
        self, replica: Replica, facts: EngineFacts
    ) -> tuple[UpstreamError | None, _Reading | None]:
        """Probe a replica's health and read its load, at once: either may hang."""
        async with asyncio.TaskGroup() as tg:
            load = tg.create_task(self._read_load(replica, facts), name=f"load {replica.name}")
            failure = await self._ping(replica)
            if failure is not None and not isinstance(failure, UpstreamTimeout):
                load.cancel()
        return failure, None if load.cancelled() else load.result()

    async def _read_load(self, replica: Replica, facts: EngineFacts) -> _Reading | None:
        """Read a replica's load. None: this router could not ask."""
        name, asked_s = replica.name, time.monotonic()
        num_sent = self._fleet.load.num_sent(name)
        try:
            load = await self._engine_api.load(
                name, replica.url, names_sources=facts.names_sources, shows_pause=facts.shows_pause
            )
        except NotAsked:
            return None
        return _Reading(load=load, num_sent=num_sent, asked_s=asked_s)

    def _take(
        self, reading: _Reading, replica: Replica, facts: EngineFacts, *, was_up: bool
    ) -> bool:
        """Apply a reading of a replica's load; False: it may be another process."""
        name, fleet, load, asked_s = replica.name, self._fleet, reading.load, reading.asked_s
        if load is None:
            self._sleepers.look_again(name, asked_s)
        self._note_signs(replica, reading)
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
                if (rank := load.ranks.get(candidate.rank or 0)) is not None:
                    fleet.load.note_engine_load(candidate.id, rank)
        return True

    def _note_signs(self, replica: Replica, reading: _Reading) -> None:
        """Apply the signs of a replica's work; if it has stalled, requests leave it."""
        name, fleet, now_s = replica.name, self._fleet, time.monotonic()
        figures = reading.load.figures if reading.load is not None else None
        has_requests = figures is not None and figures.num_requests > 0
        is_stalled = fleet.members.signs(name).read(
            figures,
            min(reading.num_sent, fleet.load.num_sent(name)),
            now_s,
            is_excused=self._sleepers.is_away(name) or (replica.role == "decode" and has_requests),
        )
        if is_stalled is None:
            return
        is_new = fleet.members.note_signs(name, is_stalled, now_s)
        if is_stalled:
            self._upstream.abort(name, Stalled)
            if is_new:
                what = "replica stalled: it takes requests and computes nothing"
                logger.warning(what, extra={"replica": name})
        elif is_new:
            logger.info("replica computes again", extra={"replica": name})

    def _shows_life(self, name: str, failure: UpstreamError) -> bool:
        """Return whether a replica that answered no probe recently showed that it is alive."""
        lately_s = self._health.interval_s + self._health.timeout_s
        alive_s = self._fleet.members.signs(name).alive_s
        return isinstance(failure, UpstreamTimeout) and alive_s >= time.monotonic() - lately_s

    async def _serves_the_same(self, name: str) -> bool:
        """Refresh the adapters; False: its base models are others, so it is another process."""
        try:
            return await self._served_models.refresh(name)
        except UpstreamError:
            return True  # health is judged by probes

    def is_up_after(self, name: str, failure: UpstreamError, *, has_broken: bool = False) -> bool:
        """Count a failed probe; if the replica is down now, waiting requests move on at once.

        A probe without an answer does not count while the replica shows that it is alive. If a
        request has broken off there, one probe that says that it is not healthy is enough: an
        engine whose core died answers 503 until its process ends.
        """
        now_s = time.monotonic()
        if self._shows_life(name, failure):
            self._fleet.members.probe_excused(name)
            return True
        how = _probe_failure(failure)
        if has_broken and how is ProbeFailure.BAD_STATUS:
            how = ProbeFailure.REFUSED
        self._fleet.members.probe_failed(name, how, now_s, jitter=random.random())
        is_up = self._fleet.members.is_up(name, now_s)
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
