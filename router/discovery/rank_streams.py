"""The event streams of one replica's ranks: created with it, followed until it is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from policies.view import CandidateId
from router.base.errors import ConfigError
from router.base.host_names import Names
from router.base.supervisor import keep_running
from router.cluster import Sharing
from router.cluster.candidate_source import CandidateSource, Publisher
from router.config import Config, ReplicaConfig
from router.discovery.engine_facts import EngineFacts
from router.index.cache_view import CacheView
from router.kv_events.follower import follow
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import EventSource
from router.metrics import Metrics
from router.pool.pools import Pools
from router.replicas.fleet import Fleet
from router.replicas.replica import Candidate, EventOwners, Replica, candidates_of

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0  # between two checks whether an endpoint is another replica's


class RankStreams:
    """Creates and follows them.

    sharing: What several routers share. None: there is only this one, or it is not built yet.
    """

    def __init__(
        self,
        config: Config,
        *,
        fleet: Fleet,
        caches: CacheView,
        pools: Pools,
        metrics: Metrics,
        names: Names,
    ) -> None:
        self._config = config
        self._caches = caches
        self._event_owners = _EventOwners(fleet)
        self._pools = pools
        self._metrics = metrics
        self._names = names
        self.sharing: Sharing | None = None

    def make(
        self,
        replica: Replica,
        facts: EngineFacts,
        *,
        configured: ReplicaConfig,
        lora_paths: Mapping[str, str],
    ) -> list[CandidateSource]:
        """Create each rank's stream; nothing is known of its cache yet."""
        endpoints = facts.endpoints(self._config.events, configured)
        sources = [
            self._candidate_source(candidate, replica, endpoints.get(rank), lora_paths)
            for rank, candidate in enumerate(candidates_of(replica))
        ]
        for source in sources:
            self._caches.add(source.candidate, source.rank_stream(), eagle=configured.eagle is True)
        return sources

    async def follow(self, source: CandidateSource) -> None:
        """Follow a candidate's blocks, from its engine or other routers, until cancelled."""
        if not source.has_events:
            return
        await keep_running(
            partial(self._follow_once, source),
            follower="events",
            count=self._metrics.count_failure,
            on_failure=partial(self._restart_stream, source),
            subject={"candidate": source.candidate},
        )

    def restarted(self, source: CandidateSource) -> None:
        """Publish that a candidate's engine is a new process."""
        if self.sharing is not None:
            self.sharing.following.restarted(source.candidate)

    def have_history(self, replica: Replica) -> bool:
        """Return whether the event history of its ranks was read, as far as it goes back."""
        streams = [self._caches.stream(c.id) for c in candidates_of(replica)]
        return all(stream is None or stream.has_history for stream in streams)

    def drop(self, replica: Replica) -> None:
        """Remove its ranks and their blocks."""
        for candidate in candidates_of(replica):
            self._caches.drop(candidate.id)

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
            publisher=(
                Publisher(endpoint, replica.url, self._names) if endpoint is not None else None
            ),
            block_size=replica.block_size,
            capacity_blocks=replica.num_blocks,
            seeds=self._config.hash.seeds,
            lora_paths=lora_paths,
            pool_stored=self._pools.stored_by(replica),
        )

    async def _follow_once(self, source: CandidateSource) -> None:
        """Follow a candidate, except while its endpoint is known to be another replica's."""
        candidate = source.candidate
        try:
            while True:
                if (reason := self._event_owners.why_foreign(candidate)) is not None:
                    _log_unusable(candidate, reason)
                    self._forget_blocks(source, reason)
                    await _until(lambda: self._event_owners.why_foreign(candidate) is None)
                async with asyncio.TaskGroup() as tg:
                    following = tg.create_task(
                        self._follow_stream(source), name=f"stream {candidate}"
                    )
                    await _until(lambda: self._event_owners.why_foreign(candidate) is not None)
                    following.cancel()
        except* ConfigError as group:  # its endpoint is invalid: that stays so until it restarts
            _log_unusable(candidate, str(group.exceptions[0]))

    async def _follow_stream(self, source: CandidateSource) -> None:
        if self.sharing is not None:
            await self.sharing.following.follow(source)
            return
        stream = self._caches.stream(source.candidate)
        assert isinstance(stream, RankStream)
        await follow(stream, source.events())

    def _restart_stream(self, source: CandidateSource, reason: str) -> None:
        """Clear a candidate's blocks: its follower failed, perhaps in the middle of a change."""
        self._forget_blocks(source, f"its follower failed: {reason}")

    def _forget_blocks(self, source: CandidateSource, reason: str) -> None:
        stream = source.rank_stream()
        stream.failed(reason)
        self._caches.hand_over(source.candidate, stream)
        self._caches.index.clear(source.candidate)


class _EventOwners:
    """Finds candidates whose endpoints are another replica's, as replicas come and go."""

    __slots__ = ("_fleet", "_known", "_owners")

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: tuple[Replica, ...] = ()  # whose endpoints are in:
        self._owners = EventOwners(())

    def why_foreign(self, candidate: CandidateId) -> str | None:
        """Return why a candidate's events are not to be followed; None: they are its own."""
        replicas = self._fleet.members.replicas
        if replicas is not self._known:  # each replica's streams ask once a second
            self._known = replicas
            self._owners = EventOwners(r.event_ports for r in replicas if r.event_ports is not None)
        name, _, rank = candidate.partition("#")
        now_s = time.monotonic()
        return self._owners.why_foreign(
            name, int(rank or 0), counts=lambda other: self._fleet.members.is_up(other, now_s)
        )


def _log_unusable(candidate: CandidateId, reason: str) -> None:
    logger.warning(
        "event stream not usable: routing to it is approximate",
        extra={"candidate": candidate, "reason": reason},
    )


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 (nothing says when a replica is up, or another one is)
        await asyncio.sleep(_LOOK_S)
