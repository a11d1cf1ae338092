"""Builds the router's parts and owns what runs beside requests: one TaskGroup, every task named.

    watch NAME    discover a replica, follow its events, probe it; anew when it restarts
    pool          look at the Mooncake master, list its keys
    tenants       read the tenants' file anew when it changes
    sweep         end claims whose events came; free what retired epochs left, in slices;
                  let go of removed replicas that are idle
    loop lag      measure what blocks the event loop
    garbage       collect it often and briefly
    redis         share state with other routers; see router.cluster
    records       write decision records

A replica's life is told in router.discovery.watch, who has one in router.discovery.watches.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, Final

import uvloop
from aiohttp import web

from policies.registry import create
from router import logs
from router.api.clients import Clients
from router.api.outliner import Outliner
from router.api.routes import Routes
from router.api.withheld import Withheld
from router.cluster import PoolShare, Sharing
from router.cluster.candidate_names import Feeds
from router.cluster.peers import ALONE, Alone, Peers
from router.cluster.redis_store import RedisStore
from router.config import Config, redis_password
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
from router.discovery.status import UNDISCOVERED, PoolStatus, Status, Waiting
from router.discovery.watch import HISTORY, ReplicaWatch
from router.discovery.watches import Watches
from router.engine_key import EngineKey
from router.errors import ConfigError, RouterError
from router.experiments import Experiments
from router.experiments.trials import Trials
from router.garbage import collect_garbage
from router.http.admin import AdminApp
from router.http.admin_token import with_token
from router.http.app import DataApp
from router.http.control import Control
from router.http.draining import Draining
from router.http.guard import Guard
from router.http.server import Listener, raise_descriptor_limit, room_for_connections
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
from router.signals import handle_signals
from router.supervisor import ignore, keep_running
from router.tenants import Tenants
from router.tls import client_tls, server_tls
from router.tokens import Prompters
from router.upstream import Upstream

logger = logging.getLogger(__name__)

_SWEEP_S: Final = 0.05
_LAG_S: Final = 0.1
_TENANTS_S: Final = 1.0  # a change of the tenants' file is in force within twice that
_ADMIN_CONNECTIONS: Final = 256


class Router:
    """One router process's parts. `run` is its life.

    Args:
        owns_process: Whether the garbage collector is this router's to steer.
        redis_password: Of the Redis that is configured; None: it needs none.
        peer_name: What other routers call this one, unique to the process; None: it is made up
            where there is a Redis, else there are no others.

    Raises:
        ConfigError: a policy or one of its parameters is unknown, a file cannot be used.
    """

    def __init__(
        self,
        config: Config,
        *,
        owns_process: bool = False,
        redis_password: str | None = None,
        peer_name: str | None = None,
    ) -> None:
        _check_files(config)
        self._config = config
        self._owns_process = owns_process
        self.metrics = Metrics()
        self.draining = Draining(config.listen)
        self.listeners: tuple[Listener, ...] = ()  # the public port's and the admin port's
        self._tls = {
            "listen": server_tls(config.listen, "listen"),
            "admin": server_tls(config.admin, "admin"),
        }
        # What SIGHUP makes us read again: name -> what reads it, or raises ConfigError.
        self.reloads: dict[str, Callable[[], None]] = {
            f"{section}.tls_cert": tls.reload
            for section, tls in self._tls.items()
            if tls is not None
        }
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
        self._encoders = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._heavy = ThreadPoolExecutor(1, thread_name_prefix="heavy")
        self._outliner = Outliner()
        # Of its own: a model hub that does not answer must not hold up prompts of other models.
        self._loaders = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._decision_log = (
            DecisionLog(config.log.decisions, self.metrics.records_dropped.inc)
            if config.log.decisions is not None
            else None
        )
        feeds = Feeds(self.registry, self.fleet)
        name = peer_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._store = (
            RedisStore(config.redis, router=name, password=redis_password)
            if config.redis.is_configured
            else None
        )
        self.peers: Peers | Alone = ALONE
        if self._store is not None or peer_name is not None:
            self.peers = Peers(
                name,
                fleet=self.fleet,
                caches=self.caches,
                sessions=self.sessions,
                feeds=feeds,
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
        self._shadows = Shadows(
            [create(shadow.name, shadow.params) for shadow in config.shadow.policies],
            share=config.shadow.share,
            metrics=self.metrics,
        )
        self.tenants = (
            Tenants(
                config.tenants.file,
                now_s=self._now(),
                on_reload=lambda result: self.metrics.tenants_read.labels(result).inc(),
            )
            if config.tenants.file is not None
            else None
        )
        self.pipeline = self._pipeline(
            engine_key, verifier, self._lookup(feeds) if config.index.mode == "redis" else None
        )
        self._waiting: Waiting = {}
        self.watches = Watches(
            self.registry,
            fleet=self.fleet,
            upstream=self._upstream,
            waiting=self._waiting,
            watch=self._watch,
            count_failure=self._count_failure,
        )
        self.sharing = self._share(name, feeds)
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
        config, metrics = self._config, self.metrics
        tokenizer = Tokenizer(
            config=config.tokens,
            prompters=self.prompters,
            encoders=self._encoders,
            heavy=self._heavy,
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
            encoders=self._encoders,
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
                self._outliner,
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
                    encoders=self._encoders,
                    metrics=metrics,
                ),
                pool=verifier,
                decision_log=self._decision_log,
                trials=self.trials,
                shadows=self._shadows,
            ),
        )
        return Pipeline(steps)

    def _share(self, name: str, feeds: Feeds) -> Sharing | None:
        """Put together what several routers share; None: there is only this one."""
        if self._store is None or not isinstance(self.peers, Peers):
            return None
        return Sharing(
            self._store,
            me=name,
            caches=self.caches,
            feeds=feeds,
            peers=self.peers,
            registry=self.registry,
            apply_records=self.watches.apply,
            pool=PoolShare(self.pool, self.pool_follower) if self.pool_follower else None,
            lease_s=self._config.redis.lease_s,
            session_ttl_s=self._config.session.ttl_s,
            keeps_blocks=self._config.index.mode == "local",
            trials=self.trials,
            accounts=self.tenants.accounts if self.tenants is not None else None,
            count_failure=self._count_failure,
        )

    def _lookup(self, feeds: Feeds) -> Lookup:
        assert self._store is not None  # the configuration says so
        return Lookup(
            self._store,
            feeds=feeds,
            caches=self.caches,
            is_up=lambda: self.sharing is not None and self.sharing.link.is_up,
            metrics=self.metrics,
        )

    # ---------------------------------------------------------------- life

    async def run(self, stop: asyncio.Event, on_ready: Callable[[str, str], None]) -> None:
        """Serve until `stop`; `on_ready` gets the data and the admin URL once both listen.

        Raises:
            ConfigError: a port cannot be bound, a file cannot be read.
        """
        async with AsyncExitStack() as stack:
            if self._decision_log is not None:  # last: answers in flight at the end have records
                stack.callback(self._decision_log.close)
            stack.callback(self._shadows.close)  # before that: what they have to say is recorded
            await stack.enter_async_context(self._upstream)
            await stack.enter_async_context(self._engine_api)
            if self._master is not None:
                await stack.enter_async_context(self._master)
            self.listeners = listener, admin = self._listeners()
            data_url = listener.bind(self._config.listen.host, self._config.listen.port)
            stack.callback(listener.close)
            admin_url = admin.bind(self._config.admin.host, self._config.admin.port)
            stack.callback(admin.close)
            async with asyncio.TaskGroup() as tg:
                self.watches.start(tg)
                tasks = [
                    tg.create_task(self._kept("upkeep", self._sweep), name="sweep"),
                    tg.create_task(self._kept("upkeep", self._measure_lag), name="loop lag"),
                ]
                if self.sharing is not None:
                    tasks.append(
                        tg.create_task(self._kept("redis", self.sharing.run), name="redis")
                    )
                if self.pool_follower is not None:
                    tasks.append(
                        tg.create_task(
                            self._kept("pool", self.pool_follower.run, self.pool.lost), name="pool"
                        )
                    )
                if self.tenants is not None:
                    tasks.append(
                        tg.create_task(self._kept("tenants", self._follow_tenants), name="tenants")
                    )
                if self._owns_process:
                    tasks.append(tg.create_task(collect_garbage(self.is_idle), name="garbage"))
                if self._decision_log is not None:
                    tasks.append(tg.create_task(self._decision_log.run(), name="records"))
                for each in (listener, admin):
                    await each.start(tg)
                    tasks.append(tg.create_task(each.watch(), name=f"{each.name} connections"))
                on_ready(data_url, admin_url)
                await stop.wait()
                await self.draining.run(listener)
                for each in (listener, admin):
                    await each.end()
                self.watches.stop()
                for task in tasks:
                    task.cancel()
        for executor in (self._encoders, self._heavy, self._loaders, self._files):
            executor.shutdown(wait=False, cancel_futures=True)
        self._outliner.close()

    def _listeners(self) -> tuple[Listener, Listener]:
        """Make the public port and the admin port; neither is taken yet."""
        limits = self._config.limits
        public = Listener(
            "public",
            self._data_app(),
            limits=limits,
            max_connections=room_for_connections(limits.connections),
            metrics=self.metrics,
            tls=self._tls["listen"],
        )
        admin = Listener(
            "admin",
            self._admin_app(),
            limits=limits,
            max_connections=_ADMIN_CONNECTIONS,
            metrics=self.metrics,
            tls=self._tls["admin"],
        )
        return public, admin

    def _data_app(self) -> web.Application:
        return DataApp(
            pipeline=self.pipeline,
            fleet=self.fleet,
            metrics=self.metrics,
            limits=self._config.limits,
            routes=Routes(self._config.forward.routes),
            clients=Clients(
                details=self._config.listen.detail_headers,
                trusted=self._config.listen.trusted,
                proxies=self._config.forward.trusted_proxies,
            ),
            withheld=Withheld(self._config.forward.client_fields),
            not_ready=self.not_ready,
            is_starting=self.is_starting,
            draining=self.draining,
            tenants=self.tenants,
        ).build()

    def _admin_app(self) -> web.Application:
        token = read_secret(self._config.admin.token_file, "admin.token_file")
        return AdminApp(
            explainer=Explainer(self.pipeline, self.caches),
            registry=self.registry,
            watches=self.watches,
            trials=self.trials,
            status=self._status,
            config=self._config,
            control=Control(self._engine_api, self.registry),
            guard=Guard(token, self._config.admin.hosts),
            tenants=self.tenants,
        ).build()

    def reload(self) -> None:
        """Read again what may change while the router runs; what is wrong with it is logged."""
        for name, read in self.reloads.items():
            try:
                read()
            except ConfigError as exc:
                logger.error("not reloaded", extra={"what": name, "reason": exc.message})
            else:
                logger.info("reloaded", extra={"what": name})
        if not self.reloads:
            logger.info("nothing to reload")

    def is_idle(self) -> bool:
        """Say whether no request is in flight."""
        return all(self.fleet.is_idle(replica.name) for replica in self.fleet.replicas)

    def not_ready(self) -> str | None:
        """Say why requests should not come yet; None: they may."""
        if not self.fleet.replicas:
            first = next(iter(self._waiting.items()), None)
            return f"no replica yet: {first[0]}: {first[1]}" if first else "no replica"
        loading = self.prompters.loading()
        return f"loading tokenizers: {', '.join(loading)}" if loading else self._history_missing()

    def is_starting(self) -> bool:
        """Say whether requests will be served, or served better, in a moment."""
        if self.fleet.replicas:
            return self.not_ready() is not None
        return any(reason == UNDISCOVERED for reason in self._waiting.values())

    def _history_missing(self) -> str | None:
        for name, reason in self._waiting.items():
            if reason == HISTORY:
                return f"{name}: {reason}"
        return None

    def _watch(self, entry: Entry) -> ReplicaWatch:
        return ReplicaWatch(
            entry.name,
            entry.replica,
            config=self._config,
            fleet=self.fleet,
            caches=self.caches,
            prompters=self.prompters,
            upstream=self._upstream,
            engine_api=self._engine_api,
            loaders=self._loaders,
            waiting=self._waiting,
            is_offered=lambda: self.watches.is_offered(entry.name),
            sharing=self.sharing,
            pool=self.pool if self._master is not None else None,
            readers=self._readers,
            count_failure=self._count_failure,
        )

    def _engine_address(self, model: str) -> tuple[str, str] | None:
        """Choose whom to ask for tokens: whoever serves the model and is the least busy."""
        try:
            candidates = self.fleet.candidates(model, self._now())
        except RouterError:
            return None
        views = self.fleet.views(candidates, {}, self._now())
        least = min(zip(views, candidates, strict=True), key=lambda pair: pair[0].num_requests)
        return least[1].replica.name, least[1].replica.url

    def _max_tokens(self, model: str) -> int | None:
        """Find the longest prompt a model takes; an adapter's is its base model's."""
        served = self.fleet.model(model)
        if served is not None and served.max_model_len is None and served.parent is not None:
            served = self.fleet.model(served.parent)
        return served.max_model_len if served is not None else None

    # ---------------------------------------------------------------- beside

    async def _kept(
        self,
        follower: str,
        run: Callable[[], Awaitable[None]],
        on_failure: Callable[[str], None] = ignore,
    ) -> None:
        await keep_running(run, follower=follower, count=self._count_failure, on_failure=on_failure)

    def _count_failure(self, follower: str) -> None:
        self.metrics.follower_failures.labels(follower).inc()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.caches.expire_claims(self._now())
            self.caches.index.sweep()
            self.watches.sweep()

    async def _follow_tenants(self) -> None:
        """Read the tenants' file anew when it changes; off the loop, it may be large or far."""
        tenants, loop = self.tenants, asyncio.get_running_loop()
        assert tenants is not None
        while True:
            await asyncio.sleep(_TENANTS_S)
            tenants.follow(await loop.run_in_executor(self._files, tenants.look), self._now())

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self.metrics.loop_lag.observe(max(0.0, loop.time() - due_s))

    def _now(self) -> float:
        return time.monotonic()


def _check_files(config: Config) -> None:
    """Refuse files that could only fail later: chat templates."""
    for model, file in config.tokens.chat_templates.items():
        if not file.is_file():
            param = f"tokens.chat_templates.{model}"
            raise ConfigError(f"{param}: {str(file)!r} is not a file", param=param)


def _policy(name: str, params: dict[str, Any]) -> Any:
    try:
        return create(name, params)
    except ValueError as exc:
        raise ConfigError(f"policy: {exc}", param="policy.name") from exc


def serve(config: Config) -> None:
    """Run one router until SIGINT or SIGTERM.

    Raises:
        ConfigError: the configuration cannot be put into effect; nothing was served.
    """
    config = with_token(config, os.environ)
    router = Router(
        config, owns_process=True, redis_password=redis_password(config.redis, os.environ)
    )
    raise_descriptor_limit()
    log_writer = logs.start(level=config.log.level, as_json=config.log.json)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signalled(router))
    except* ConfigError as group:
        raise group.exceptions[0] from None
    finally:
        log_writer.stop()


async def _until_signalled(router: Router) -> None:
    stop = asyncio.Event()
    handle_signals(stop, router.draining, router.reload)

    def ready(data_url: str, admin_url: str) -> None:
        print(f"warmroute listens on {data_url} (admin: {admin_url})", file=sys.stderr, flush=True)

    await router.run(stop, ready)
