"""Builds what a router is made of, before any request: by subject, in the order of their needs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

from policies.view import CandidateId
from router.api.body import Withheld
from router.base.errors import ConfigError
from router.base.host_names import Names
from router.config import Config
from router.config.hosts import HostRules
from router.config.secrets import read_secret
from router.config.tls import Tls, client_tls, server_tls
from router.discovery.engine_api import EngineApi
from router.discovery.status import Waiting
from router.http.server import Draining
from router.index.behind import Behind
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.pool.pools import Pools
from router.replicas.deaths import Deaths
from router.replicas.fleet import Fleet
from router.replicas.registry import EngineKey, Registry
from router.replicas.response_owners import ResponseOwners
from router.request.fetch import Fetches
from router.scheduling.conversations import Conversations
from router.tenants import Tenants
from router.tokens import Prompters
from router.tokens.hand_over import HandOver
from router.upstream import Upstream
from router.upstream.session import Strays


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
    """What the rest of a router is built from: `Discovery`, `Cluster`, the steps and the ports."""

    def __init__(self, config: Config) -> None:
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
        self._build_tenants()
        self._build_upstream()
        self._build_pool()

    def _build_state(self) -> None:
        """Build what is known of replicas."""
        config = self.config
        self.registry = Registry(
            config.replicas,
            hosts=HostRules(config.admin.replica_hosts),
            pools=config.mooncake.names,
        )
        self.conversations = Conversations(ttl_s=config.session.ttl_s)
        self.deaths, self.caches = Deaths(), CacheView(BlockIndex())
        self.waiting: Waiting = {}
        self.fleet = Fleet(
            order=[entry.name for entry in self.registry.entries],
            conversations=self.conversations,
            waiting=self.waiting,
            layout_of=self.caches.index.groups_of,
            behind=self._behind,
            deaths=self.deaths,
        )
        self.responses = ResponseOwners()
        self.prompters = Prompters()
        self.hand_over = HandOver(
            config.tokens.hand_over,
            self.prompters,
            on_suspended=lambda model, reason: self.metrics.hand_over_ended.labels(
                model, reason
            ).inc(),
        )

    def _build_tenants(self) -> None:
        self.tenants: Tenants | None = None
        if self.config.tenants.file is not None:
            self.tenants = Tenants(
                self.config.tenants.file,
                on_reload=lambda result: self.metrics.tenants_read.labels(result).inc(),
            )

    def _build_upstream(self) -> None:
        """Build what speaks to replicas."""
        config = self.config
        self.client_tls = tls = client_tls(config.forward)
        key = read_secret(config.engine.api_key_file, "engine.api_key_file")
        self.engine_key = EngineKey.of(config, key)
        self.strays = Strays(lambda server: self.metrics.strays.labels(server).inc())
        self.upstream = Upstream(
            config.forward, tls, self.fleet.members, names=self.names, strays=self.strays
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

    def _behind(self, candidate: CandidateId) -> Behind:
        """Return what a candidate reads from when its cache has evicted it: a pool, or its tier."""
        if self.fetches is not None:
            behind = self.fetches.behind(
                candidate, [state.candidate for state in self.fleet.members.states.values()]
            )
            if behind is not None:
                return behind
        return self.caches.behind(candidate)

    @property
    def clients(self) -> Iterator[AbstractAsyncContextManager[Any]]:
        """What has connections while the router runs."""
        yield self.upstream
        yield self.engine_api
        for pool in self.pools.values():
            yield pool.master

    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return all(self.fleet.load.is_idle(replica.name) for replica in self.fleet.members.replicas)


def _certificates(config: Config) -> Iterator[tuple[str, Tls]]:
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
