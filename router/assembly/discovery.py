"""Builds what finds replicas, and what follows each."""

from __future__ import annotations

import time

from policies.view import CandidateId
from router.assembly.parts import Parts
from router.cluster.sharing import Sharing
from router.config.hosts import HostRules
from router.discovery.find import build_sources
from router.discovery.model_watch import ModelWatch
from router.discovery.probes import Probes
from router.discovery.prompter_loader import PrompterLoader
from router.discovery.rank_streams import RankStreams
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.discovery.sources import Sources
from router.discovery.watches import ReplicaWatch, Watches, WatchTools
from router.replicas.fleet import Fleet
from router.replicas.replica import Entry, EventOwners, Replica


class Discovery:
    """Follows the configured replicas, and those that `replica_sources` find.

    sharing: Redis. None: there is none, or `Cluster` is not built yet.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.sharing: Sharing | None = None
        config, fleet, metrics = parts.config, parts.fleet, parts.metrics
        self._event_owners = _EventOwners(fleet)
        self.served_models = ServedModels(parts.engine_api, fleet=fleet, prompters=parts.prompters)
        self.sleepers = Sleepers(fleet, parts.caches, parts.upstream)
        self.loader = PrompterLoader(parts.prompters, parts.config.tokens, parts.threads.load)
        self._tools = WatchTools(
            config=config,
            engine_api=parts.engine_api,
            fleet=fleet,
            waiting=parts.waiting,
            models=self._model_watch(),
            probes=Probes(
                config.health,
                engine_api=parts.engine_api,
                fleet=fleet,
                upstream=parts.upstream,
                served_models=self.served_models,
                sleepers=self.sleepers,
            ),
            on_restart=parts.deaths.restarted,
        )
        self.watches = Watches(
            parts.registry,
            fleet=fleet,
            upstream=parts.upstream,
            waiting=parts.waiting,
            watch=self._watch,
            count_failure=parts.count_failure,
            on_gone=metrics.drop_replica,
        )
        self.replica_sources = build_sources(config.discovery, parts.threads.files)
        self.sources = Sources(
            [source.name for source in self.replica_sources],
            hosts=HostRules(config.discovery.hosts),
            pools=config.mooncake.names,
            follow=self.watches.follow,
            waiting=parts.waiting,
            count=lambda source, result: metrics.discovery.labels(source, result).inc(),
        )
        if self.replica_sources:
            metrics.watch_sources(self.sources.states)

    def _model_watch(self) -> ModelWatch:
        parts = self._parts
        mismatches = parts.metrics.token_mismatches
        return ModelWatch(
            parts.config,
            engine_api=parts.engine_api,
            prompters=parts.prompters,
            loader=self.loader,
            served_models=self.served_models,
            count_other_ids=lambda model: mismatches.labels(model, "ids").inc(),
        )

    def _watch(self, entry: Entry) -> ReplicaWatch:
        parts = self._parts
        return ReplicaWatch(
            entry.name,
            entry.replica,
            self._tools,
            is_offered=lambda: self.watches.is_offered(entry.name),
            streams=RankStreams(
                parts.config,
                caches=parts.caches,
                why_foreign=self._event_owners.why_foreign,
                stored_by=parts.pools.stored_by,
                sharing=self.sharing,
                count_failure=parts.count_failure,
                names=parts.names,
            ),
            pools=parts.pools,
        )


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
