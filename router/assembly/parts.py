"""Builds what a router is made of, before any request: by subject, in the order of their needs."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

from router.api.withheld import Withheld
from router.base.errors import ConfigError
from router.base.names import Names
from router.cluster import OrderShare, PoolShare, RecordShare, Shares, Sharing
from router.cluster.candidate_names import CandidateNames
from router.cluster.death_share import share_deaths
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_store import RedisStore
from router.config import Config
from router.config.hosts import HostRules
from router.config.secrets import read_secret
from router.config.tls import ServerTls, client_tls, server_tls
from router.discovery.engine_api import EngineApi
from router.discovery.event_owners import FleetEventOwners
from router.discovery.find import build_sources
from router.discovery.model_watch import ModelWatch
from router.discovery.probes import Probes
from router.discovery.prompter_loader import PrompterLoader
from router.discovery.rank_streams import RankStreams
from router.discovery.readiness import Readiness
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.discovery.sources import Sources
from router.discovery.status import Status, Waiting
from router.discovery.watch import ReplicaWatch, WatchTools
from router.discovery.watches import Watches
from router.experiments.runner import ExperimentRunner
from router.http.draining import Draining
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.pool.pools import Pools
from router.pool.status import PoolStatus
from router.replicas.conversations import Conversations
from router.replicas.deaths import Deaths
from router.replicas.engine_key import EngineKey
from router.replicas.entry import Entry
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.response_owners import ResponseOwners
from router.request.fetch import Fetches
from router.tenants import Tenants
from router.tokens import Prompters
from router.tokens.hand_over import HandOver
from router.upstream import Upstream
from router.upstream.connections import Strays


class Threads:
    """Where what would hold the event loop runs; one thread for each kind of work."""

    def __init__(self) -> None:
        self.encode = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self.heavy = ThreadPoolExecutor(1, thread_name_prefix="heavy")
        # Of its own: a model hub that does not answer must not hold up prompts of other models.
        self.load = ThreadPoolExecutor(1, thread_name_prefix="load")
        self.files = ThreadPoolExecutor(1, thread_name_prefix="files")

    def close(self) -> None:
        """End them without waiting."""
        for executor in (self.encode, self.heavy, self.load, self.files):
            executor.shutdown(wait=False, cancel_futures=True)


class Parts:
    """All but the steps of a request and the ports; see `Router` for the arguments."""

    def __init__(
        self, config: Config, *, redis_password: str | None, peer_name: str | None
    ) -> None:
        _check_files(config)
        self.config = config
        self.metrics = Metrics()
        self.threads = Threads()
        self.names = Names()
        self.metrics.unresolved_names.set_function(lambda: len(self.names.failing))
        self.draining = Draining(config.listen)
        self.certificates = dict(_certificates(config))
        self.withheld = Withheld(config.forward.client_fields)
        self._build_state()
        self._build_experiments()
        self._build_tenants()
        self._build_upstream()
        self._build_pool()
        self._build_watches()
        self._build_sources()
        self._build_cluster(redis_password, peer_name)
        self._build_status()

    def _build_state(self) -> None:
        """Build what is known of replicas."""
        config = self.config
        self.registry = Registry(
            config.replicas,
            hosts=HostRules(config.admin.replica_hosts),
            pools=config.mooncake.names,
        )
        self.sessions = Conversations(
            ttl_s=config.session.ttl_s, max_sessions=config.session.max_sessions
        )
        self.fleet = Fleet(
            order=[entry.name for entry in self.registry.entries], conversations=self.sessions
        )
        self.deaths = Deaths()
        self.fleet.on_down, self.fleet.on_restart = self.deaths.went_down, self.deaths.restarted
        self.caches = CacheView(BlockIndex())
        self.event_owners = FleetEventOwners(self.fleet)
        self.fleet.layout_of = self.caches.index.groups_of
        self.responses = ResponseOwners(max_responses=config.session.max_sessions)
        self.prompters = Prompters()
        self.hand_over = HandOver(
            config.tokens.hand_over,
            self.prompters,
            on_suspended=lambda model, reason: self.metrics.hand_over_ended.labels(
                model, reason
            ).inc(),
        )

    def _build_experiments(self) -> None:
        """Build what compares policies, and what records decisions."""
        config = self.config
        self.experiments = ExperimentRunner(self.metrics)
        for definition in config.experiment.definitions:
            self.experiments.start(definition, time.time(), configured=True)
        self.metrics.watch_experiments(lambda: self.experiments.metric_states(time.time()))

    def _build_tenants(self) -> None:
        self.tenants: Tenants | None = None
        if self.config.tenants.file is not None:
            self.tenants = Tenants(
                self.config.tenants.file,
                now_s=time.monotonic(),
                on_reload=lambda result: self.metrics.tenants_read.labels(result).inc(),
            )

    def _build_upstream(self) -> None:
        """Build what speaks to replicas."""
        config = self.config
        tls = client_tls(config.forward)
        key = read_secret(config.engine.api_key_file, "engine.api_key_file")
        self.engine_key = EngineKey.of(config, key)
        self.strays = Strays(lambda server: self.metrics.strays.labels(server).inc())
        self.upstream = Upstream(
            config.forward, tls, self.fleet.signs, names=self.names, strays=self.strays
        )
        self.engine_api = EngineApi(
            timeout_s=config.health.timeout_s,
            tls=tls,
            key=self.engine_key,
            names=self.names,
            strays=self.strays,
        )

    def _build_pool(self) -> None:
        """Build what knows the shared pools, and what asks their masters."""
        config = self.config.mooncake
        self.pools = Pools(
            config,
            self.registry.entries,
            metrics=self.metrics,
            names=self.names,
            strays=self.strays,
        )
        self.fetches: Fetches | None = None
        if self.pools:
            self.fetches = Fetches(self.pools, self.pools.readers, config, self.metrics)

    def _build_watches(self) -> None:
        """Build what follows replicas."""
        self.served_models = ServedModels(
            self.engine_api, fleet=self.fleet, prompters=self.prompters
        )
        self.waiting: Waiting = {}
        self.sleepers = Sleepers(self.fleet, self.caches, self.upstream)
        self.probes = Probes(
            self.config.health,
            engine_api=self.engine_api,
            fleet=self.fleet,
            upstream=self.upstream,
            served_models=self.served_models,
            sleepers=self.sleepers,
        )
        self.model_watch = ModelWatch(
            self.config,
            engine_api=self.engine_api,
            prompters=self.prompters,
            loader=PrompterLoader(self.prompters, self.config.tokens, self.threads.load),
            hand_over=self.hand_over,
            served_models=self.served_models,
            count_other_ids=lambda model: self.metrics.token_mismatches.labels(model, "ids").inc(),
        )
        self.watches = Watches(
            self.registry,
            fleet=self.fleet,
            upstream=self.upstream,
            waiting=self.waiting,
            watch=self._watch,
            count_failure=self.count_failure,
            on_gone=self.metrics.drop_replica,
        )

    def _build_sources(self) -> None:
        """Build what finds replicas besides those configured."""
        config = self.config.discovery
        self.replica_sources = build_sources(config, self.threads.files)
        self.sources = Sources(
            [source.name for source in self.replica_sources],
            hosts=HostRules(config.hosts),
            pools=self.config.mooncake.names,
            empty_s=config.empty_s,
            follow=self.watches.follow,
            waiting=self.waiting,
            count=lambda source, result: self.metrics.discovery.labels(source, result).inc(),
        )
        if self.replica_sources:
            self.metrics.watch_sources(self.sources.states)

    def _watch(self, entry: Entry) -> ReplicaWatch:
        return ReplicaWatch(
            entry.name,
            entry.replica,
            WatchTools(
                config=self.config,
                engine_api=self.engine_api,
                fleet=self.fleet,
                waiting=self.waiting,
                models=self.model_watch,
                probes=self.probes,
            ),
            is_offered=lambda: self.watches.is_offered(entry.name),
            streams=RankStreams(
                self.config,
                caches=self.caches,
                why_foreign=self.event_owners.why_foreign,
                stored_by=self.pools.stored_by,
                sharing=self.sharing,
                count_failure=self.count_failure,
                names=self.names,
            ),
            pools=self.pools,
        )

    def _build_cluster(self, redis_password: str | None, peer_name: str | None) -> None:
        """Build what is shared with other routers."""
        config = self.config
        self.candidate_names = CandidateNames(self.registry, self.fleet)
        self.peers: Peers | None = None
        self.outbox: Outbox | None = None
        self.store: RedisStore | None = None
        self.sharing: Sharing | None = None
        if not config.redis.is_configured and peer_name is None:
            return
        name = peer_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.peers = Peers(
            name,
            fleet=self.fleet,
            caches=self.caches,
            sessions=self.sessions,
            names=self.candidate_names,
            metrics=self.metrics,
            lease_s=config.redis.lease_s,
        )
        self.outbox = Outbox(
            caches=self.caches,
            sessions=self.sessions,
            names=self.candidate_names,
            metrics=self.metrics,
        )
        share_deaths(self.deaths, names=self.candidate_names, outbox=self.outbox, peers=self.peers)
        if config.redis.is_configured:
            self.store = RedisStore(
                config.redis, router=name, password=redis_password, names=self.names
            )
            self.sharing = Sharing(
                self.store,
                self._shares(self.store, self.peers, self.outbox),
                caches=self.caches,
                names=self.candidate_names,
                lease_s=config.redis.lease_s,
                count_failure=self.count_failure,
            )
            self.metrics.watch_sharing(self.sharing.state)

    def _shares(self, store: RedisStore, peers: Peers, outbox: Outbox) -> Shares:
        return Shares(
            peers=peers,
            outbox=outbox,
            orders=OrderShare(
                store,
                registry=self.registry,
                experiments=self.experiments,
                apply_records=self.watches.apply,
            ),
            records=RecordShare(
                store,
                peers=peers,
                outbox=outbox,
                responses=self.responses,
                ttl_s=self.config.session.ttl_s,
            ),
            pools=[
                PoolShare(pool.catalog, pool.follower, pool.name) for pool in self.pools.values()
            ],
            accounts=self.tenants.accounts if self.tenants is not None else None,
        )

    def _build_status(self) -> None:
        """Build what describes the rest, for /readyz, /metrics and the admin API."""
        self.readiness = Readiness(fleet=self.fleet, prompters=self.prompters, waiting=self.waiting)
        self.fleet.absent = self.readiness.absent
        self.status = Status(
            self.registry,
            fleet=self.fleet,
            caches=self.caches,
            waiting=self.waiting,
            pools=PoolStatus(self.pools, self.fleet),
            sharing=self.sharing.state if self.sharing is not None else None,
            sources=self.sources.states,
        )
        self.metrics.watch(self.status)
        self.metrics.watch_places(self.status.places)
        self.metrics.watch_models(lambda: self.fleet.available(time.monotonic()))

    @property
    def clients(self) -> Iterator[AbstractAsyncContextManager[Any]]:
        """What has connections while the router runs."""
        yield self.upstream
        yield self.engine_api
        for pool in self.pools.values():
            yield pool.master

    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return all(self.fleet.is_idle(replica.name) for replica in self.fleet.replicas)

    def count_failure(self, follower: str) -> None:
        """Count a follower that failed and starts again."""
        self.metrics.follower_failures.labels(follower).inc()


def _certificates(config: Config) -> Iterator[tuple[str, ServerTls]]:
    """Read the certificates of the ports that speak TLS, by section."""
    for section, files in (("listen", config.listen), ("admin", config.admin)):
        tls = server_tls(files, section)
        if tls is not None:
            yield section, tls


def _check_files(config: Config) -> None:
    """Refuse files that could only fail later: chat templates."""
    for model, file in config.tokens.chat_templates.items():
        if not file.is_file():
            param = f"tokens.chat_templates.{model}"
            raise ConfigError(f"{param}: {str(file)!r} is not a file", param=param)
