"""Builds a router's parts, by subject; router.run runs them."""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from policies.policy import Policy
from policies.registry import create
from router.api.clients import Clients
from router.api.outliner import Outliner
from router.api.routes import Routes
from router.api.withheld import Withheld
from router.cluster import PoolShare, Sharing
from router.cluster.candidate_names import CandidateNames
from router.cluster.peers import NULL_PEERS, NullPeers, Peers
from router.cluster.redis_store import RedisStore
from router.config import Config
from router.config.hosts import HostRules
from router.data_path.admit import Admission
from router.data_path.decide import Decider
from router.data_path.engine_tokens import EngineTokenizer
from router.data_path.explain import Explainer
from router.data_path.forward import Forwarder
from router.data_path.headers import RequestHeaders
from router.data_path.lookup import Lookup
from router.data_path.match import Matcher
from router.data_path.observe import Observer
from router.data_path.overdue import Patience
from router.data_path.pipeline import Pipeline, Steps
from router.data_path.read import Reader
from router.data_path.relay import Relay
from router.data_path.retry import Retries
from router.data_path.shadow import Shadows
from router.data_path.token_audit import TokenAudit
from router.data_path.tokenize import Tokenizer
from router.data_path.verify import PoolVerifier
from router.discovery.engine_api import EngineApi
from router.discovery.readiness import Readiness
from router.discovery.status import PoolStatus, Status, Waiting
from router.discovery.watch import ReplicaWatch
from router.discovery.watches import Watches
from router.engine_key import EngineKey
from router.errors import ConfigError, RouterError
from router.experiments import Experiments
from router.experiments.trials import Trials
from router.http.admin import AdminApp
from router.http.app import DataApp
from router.http.control import Control
from router.http.draining import Draining
from router.http.guard import Guard
from router.http.server import Listener, room_for_connections
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.pool.catalog import PoolCatalog
from router.pool.follower import PoolFollower
from router.pool.master import MasterApi
from router.pool.readers import PoolReaders
from router.records.log import DecisionLog
from router.replicas.fleet import Fleet
from router.replicas.registry import Entry, Registry
from router.replicas.sessions import Sessions
from router.secret_file import read_secret
from router.tenants import Tenants
from router.tls import ServerTls, client_tls, server_tls
from router.tokens import Prompters
from router.upstream import Upstream

_ADMIN_CONNECTIONS: Final = 256


class Threads:
    """Where what would hold the event loop runs; one thread for each kind of work."""

    def __init__(self) -> None:
        self.encode = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self.heavy = ThreadPoolExecutor(1, thread_name_prefix="heavy")
        # Of its own: a model hub that does not answer must not hold up prompts of other models.
        self.load = ThreadPoolExecutor(1, thread_name_prefix="load")
        self.files = ThreadPoolExecutor(1, thread_name_prefix="files")
        self.outliner = Outliner()

    def close(self) -> None:
        """End them without waiting."""
        for executor in (self.encode, self.heavy, self.load, self.files):
            executor.shutdown(wait=False, cancel_futures=True)
        self.outliner.close()


class Router:
    """One router process's parts; `router.run` runs them.

    Args:
        redis_password: Of the Redis that is configured; None: it needs none.
        peer_name: What other routers call this one, unique to the process; None: a new name
            where there is a Redis, else there are no others.

    Raises:
        ConfigError: a policy or one of its parameters is unknown, a file cannot be used.
    """

    def __init__(
        self, config: Config, *, redis_password: str | None = None, peer_name: str | None = None
    ) -> None:
        _check_files(config)
        self.config = config
        self.metrics = Metrics()
        self.draining = Draining(config.listen)
        self.listeners: tuple[Listener, ...] = ()  # the public port's and the admin port's
        self.certificates = dict(_certificates(config))
        self.threads = Threads()
        self.registry = Registry(config.replicas, hosts=HostRules(config.admin.replica_hosts))
        self.fleet = Fleet(order=[entry.name for entry in self.registry.entries])
        self.caches = CacheView(BlockIndex())
        self.sessions = Sessions(
            ttl_s=config.session.ttl_s, max_sessions=config.session.max_sessions
        )
        self.prompters = Prompters()
        tls = client_tls(config.forward)
        self._upstream = Upstream(config.forward, tls)
        key = read_secret(config.engine.api_key_file, "engine.api_key_file")
        engine_key = EngineKey.of(config, key)
        self._engine_api = EngineApi(
            timeout_s=config.health.timeout_s,
            tls=tls,
            key=engine_key,
        )
        self.decision_log = (
            DecisionLog(config.log.decisions, self.metrics.records_dropped.inc)
            if config.log.decisions is not None
            else None
        )
        names = CandidateNames(self.registry, self.fleet)
        name = peer_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._store = (
            RedisStore(config.redis, router=name, password=redis_password)
            if config.redis.is_configured
            else None
        )
        self.peers: Peers | NullPeers = NULL_PEERS
        if self._store is not None or peer_name is not None:
            self.peers = Peers(
                name,
                fleet=self.fleet,
                caches=self.caches,
                sessions=self.sessions,
                names=names,
                metrics=self.metrics,
                lease_s=config.redis.lease_s,
            )
        self.pool = PoolCatalog()
        self._readers = readers = PoolReaders(
            {e.name: e.replica.pool for e in self.registry.entries if e.replica.pool is not None}
        )
        self._master: MasterApi | None = None
        self.pool_follower: PoolFollower | None = None
        verifier: PoolVerifier | None = None
        if config.mooncake.master is not None:
            self._master = MasterApi(config.mooncake.master, timeout_s=config.mooncake.timeout_s)
            self.pool_follower = PoolFollower(
                self.pool, self._master, config.mooncake, self.metrics
            )
            verifier = PoolVerifier(
                pool=self.pool,
                readers=readers,
                api=self._master,
                config=config.mooncake,
                metrics=self.metrics,
            )
        self.trials = Trials(Experiments(), metrics=self.metrics)
        for definition in config.experiment.definitions:
            self.trials.start(definition, configured=True)
        self.metrics.watch_experiments(self.trials.metric_states)
        self.shadows = Shadows(
            [create(shadow.name, shadow.params) for shadow in config.shadow.policies],
            share=config.shadow.share,
            metrics=self.metrics,
        )
        self.tenants = (
            Tenants(
                config.tenants.file,
                now_s=time.monotonic(),
                on_reload=lambda result: self.metrics.tenants_read.labels(result).inc(),
            )
            if config.tenants.file is not None
            else None
        )
        self.pipeline = self._pipeline(
            engine_key, verifier, self._lookup(names) if config.index.mode == "redis" else None
        )
        self._waiting: Waiting = {}
        self.watches = Watches(
            self.registry,
            fleet=self.fleet,
            upstream=self._upstream,
            waiting=self._waiting,
            watch=self._watch,
            count_failure=self.count_failure,
        )
        self.readiness = Readiness(
            fleet=self.fleet, prompters=self.prompters, waiting=self._waiting
        )
        self.sharing = self._share(name, names)
        if self.sharing is not None:
            self.metrics.watch_sharing(self.sharing.state)
        pool_status = (
            PoolStatus(self.pool, readers, self.fleet, url=config.mooncake.master)
            if config.mooncake.master is not None
            else None
        )
        self._status = Status(
            self.registry,
            fleet=self.fleet,
            caches=self.caches,
            waiting=self._waiting,
            pool=pool_status,
            sharing=self.sharing.state if self.sharing is not None else None,
        )
        self.metrics.watch(self._status)

    def _pipeline(
        self, engine_key: EngineKey, verifier: PoolVerifier | None, lookup: Lookup | None
    ) -> Pipeline:
        """Put the steps of a request together."""
        config, metrics = self.config, self.metrics
        tokenizer = Tokenizer(
            config=config.tokens,
            prompters=self.prompters,
            encoders=self.threads.encode,
            heavy=self.threads.heavy,
            engine=EngineTokenizer(
                self._engine_api, self._engine_address, timeout_s=config.tokens.engine_timeout_s
            ),
            max_tokens=self._max_tokens,
            metrics=metrics,
        )
        matcher = Matcher(
            fleet=self.fleet,
            caches=self.caches,
            lookup=lookup,
            pool=verifier,
            encoders=self.threads.encode,
            first_blocks_tokens=config.policy.first_blocks_tokens,
        )
        decider = Decider(
            fleet=self.fleet,
            matcher=matcher,
            sessions=self.sessions,
            trials=self.trials,
            policy=_policy(config.policy.name, config.policy.params),
            seed=random.SystemRandom().getrandbits(63),
        )
        admission = Admission(
            fleet=self.fleet,
            caches=self.caches,
            sessions=self.sessions,
            peers=self.peers,
            pool=verifier,
            metrics=metrics,
        )
        retries = Retries(config.forward, fleet=self.fleet, pool=verifier, metrics=metrics)
        steps = Steps(
            reader=Reader(
                self.threads.outliner,
                fleet=self.fleet,
                forward=config.forward,
                session_headers=config.session.headers,
            ),
            tokenizer=tokenizer,
            matcher=matcher,
            verifier=verifier,
            decider=decider,
            admission=admission,
            forwarder=Forwarder(
                self._upstream,
                headers=RequestHeaders(engine_key, config.forward.client_fields),
                retries=retries,
                patience=Patience(
                    config.forward,
                    fleet=self.fleet,
                    decider=decider,
                    retries=retries,
                    metrics=metrics,
                ),
                metrics=metrics,
            ),
            retries=retries,
            relay=Relay(tokenizer=tokenizer, retries=retries, admission=admission, metrics=metrics),
            observer=Observer(
                metrics=metrics,
                caches=self.caches,
                token_audit=TokenAudit(
                    self.prompters,
                    prove_ratio=config.tokens.prove_ratio,
                    encoders=self.threads.encode,
                    metrics=metrics,
                ),
                pool=verifier,
                decision_log=self.decision_log,
                trials=self.trials,
                shadows=self.shadows,
            ),
        )
        return Pipeline(steps)

    def _share(self, name: str, names: CandidateNames) -> Sharing | None:
        """Put together what several routers share; None: there is only this one."""
        if self._store is None or not isinstance(self.peers, Peers):
            return None
        return Sharing(
            self._store,
            me=name,
            caches=self.caches,
            names=names,
            peers=self.peers,
            registry=self.registry,
            apply_records=self.watches.apply,
            pool=PoolShare(self.pool, self.pool_follower) if self.pool_follower else None,
            lease_s=self.config.redis.lease_s,
            session_ttl_s=self.config.session.ttl_s,
            keeps_blocks=self.config.index.mode == "local",
            trials=self.trials,
            accounts=self.tenants.accounts if self.tenants is not None else None,
            count_failure=self.count_failure,
        )

    def _lookup(self, names: CandidateNames) -> Lookup:
        assert self._store is not None  # the configuration says so
        return Lookup(
            self._store,
            names=names,
            caches=self.caches,
            is_up=lambda: self.sharing is not None and self.sharing.link.is_up,
            metrics=self.metrics,
        )

    def build_listeners(self) -> tuple[Listener, Listener]:
        """Build the public port and the admin port; neither is bound yet.

        Raises:
            ConfigError: the file of the admin token cannot be read.
        """
        limits = self.config.limits
        public = Listener(
            "public",
            self._data_app().build(),
            limits=limits,
            max_connections=room_for_connections(limits.connections),
            metrics=self.metrics,
            tls=self.certificates.get("listen"),
        )
        admin = Listener(
            "admin",
            self._admin_app().build(),
            limits=limits,
            max_connections=_ADMIN_CONNECTIONS,
            metrics=self.metrics,
            tls=self.certificates.get("admin"),
        )
        return public, admin

    def _data_app(self) -> DataApp:
        return DataApp(
            pipeline=self.pipeline,
            fleet=self.fleet,
            metrics=self.metrics,
            limits=self.config.limits,
            routes=Routes(self.config.forward.routes),
            clients=Clients(
                details=self.config.listen.detail_headers,
                trusted=self.config.listen.trusted,
                proxies=self.config.forward.trusted_proxies,
            ),
            withheld=Withheld(self.config.forward.client_fields),
            readiness=self.readiness,
            draining=self.draining,
            tenants=self.tenants,
        )

    def _admin_app(self) -> AdminApp:
        token = read_secret(self.config.admin.token_file, "admin.token_file")
        return AdminApp(
            explainer=Explainer(self.pipeline, self.caches),
            registry=self.registry,
            watches=self.watches,
            trials=self.trials,
            status=self._status,
            config=self.config,
            control=Control(self._engine_api, self.registry),
            guard=Guard(token, self.config.admin.hosts),
            tenants=self.tenants,
        )

    @property
    def clients(self) -> Iterator[AbstractAsyncContextManager[Any]]:
        """What has connections while the router runs."""
        yield self._upstream
        yield self._engine_api
        if self._master is not None:
            yield self._master

    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return all(self.fleet.is_idle(replica.name) for replica in self.fleet.replicas)

    def count_failure(self, follower: str) -> None:
        """Count a follower that failed and starts again."""
        self.metrics.follower_failures.labels(follower).inc()

    def _watch(self, entry: Entry) -> ReplicaWatch:
        return ReplicaWatch(
            entry.name,
            entry.replica,
            config=self.config,
            fleet=self.fleet,
            caches=self.caches,
            prompters=self.prompters,
            upstream=self._upstream,
            engine_api=self._engine_api,
            loaders=self.threads.load,
            waiting=self._waiting,
            is_offered=lambda: self.watches.is_offered(entry.name),
            sharing=self.sharing,
            pool=self.pool if self._master is not None else None,
            readers=self._readers,
            count_failure=self.count_failure,
        )

    def _engine_address(self, model: str) -> tuple[str, str] | None:
        """Choose the replica to ask for tokens: the least busy of those that serve the model."""
        try:
            candidates = self.fleet.candidates(model, time.monotonic())
        except RouterError:
            return None
        views = self.fleet.views(candidates, {}, time.monotonic())
        least = min(zip(views, candidates, strict=True), key=lambda pair: pair[0].num_requests)
        return least[1].replica.name, least[1].replica.url

    def _max_tokens(self, model: str) -> int | None:
        """Find the longest prompt a model takes; an adapter's is its base model's."""
        served = self.fleet.model(model)
        if served is not None and served.max_model_len is None and served.parent is not None:
            served = self.fleet.model(served.parent)
        return served.max_model_len if served is not None else None


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


def _policy(name: str, params: dict[str, Any]) -> Policy:
    try:
        return create(name, params)
    except ValueError as exc:
        raise ConfigError(f"policy: {exc}", param="policy.name") from exc
