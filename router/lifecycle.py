"""Builds the router's parts and owns what runs beside requests: one TaskGroup, every task named.

    watch NAME    discover a replica, follow its events, probe it; anew when it restarts
    sweep         end claims whose events came; free what retired epochs left, in slices
    loop lag      measure what blocks the event loop
    garbage       collect it often and briefly
    records       write decision records

A replica's life: discover (until it answers) -> register -> [follow ranks | probe] -> gone or
restarted -> drop its blocks -> discover again. Its configuration stays; its facts are its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from policies.registry import create
from policies.view import CandidateId
from router import logs
from router.api.openai import parse_chat
from router.config import Config, ReplicaConfig, TokensConfig
from router.errors import (
    ConfigError,
    RouterError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.fleet.fleet import CandidateStatus, EngineLoad, Fleet
from router.fleet.health import ProbeFailure
from router.fleet.replica import Replica, ServedModel, candidates_of
from router.fleet.sessions import Sessions
from router.garbage import collect_garbage
from router.http.admin import AdminApp
from router.http.app import DataApp
from router.index.block_index import BlockIndex
from router.index.caches import Caches
from router.index.rank_stream import RankStream
from router.ingest import follow
from router.io.decision_log import DecisionLog
from router.io.engine_api import EngineApi, EngineFacts, EventSource
from router.io.engine_events import EngineEvents, reachable_endpoint
from router.io.upstream import Upstream
from router.metrics import Metrics, RankState
from router.pipeline import Pipeline
from router.prompt import NeedsEngine, Prompter, Prompters, load_prompter
from router.stages.observe import Observer
from router.stages.tokenize import Tokenizer

logger = logging.getLogger(__name__)

_SWEEP_S: Final = 0.05
_LAG_S: Final = 0.1
_DISCOVER_S: Final = (0.2, 5.0)  # first and longest pause between attempts
_HISTORY_S: Final = 5.0  # readiness waits this long for a replica's event history
_DRAIN_S: Final = 10.0  # answers in flight at the end get this long
_DEFAULT_BLOCK_SIZE: Final = 16
_DEFAULT_CAPACITY: Final = 8192  # blocks guessed for a replica that does not tell


class Router:
    """One router process's parts. `run` is its life.

    Args:
        owns_process: Whether the garbage collector is this router's to steer.

    Raises:
        ConfigError: a policy or one of its parameters is unknown, a file cannot be used.
    """

    def __init__(self, config: Config, *, owns_process: bool = False) -> None:
        _check_files(config)
        self._config = config
        self._owns_process = owns_process
        self.metrics = Metrics()
        self.fleet = Fleet(order=[name for name, _ in _named(config.replicas)])
        self.caches = Caches(BlockIndex())
        self.prompters = Prompters()
        self._upstream = Upstream(config.forward)
        self._engine_api = EngineApi(
            timeout_s=config.health.timeout_s,
            ca_file=str(config.forward.ca_file) if config.forward.ca_file else None,
        )
        self._encoders = ThreadPoolExecutor(1, thread_name_prefix="encode")
        # Of its own: a model hub that does not answer must not hold up prompts of other models.
        self._loaders = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._decision_log = (
            DecisionLog(config.log.decisions, self.metrics.records_dropped.inc)
            if config.log.decisions is not None
            else None
        )
        tokenizer = Tokenizer(
            config=config.tokens,
            prompters=self.prompters,
            encoders=self._encoders,
            engine_api=self._engine_api,
            engine_address=self._engine_address,
            max_tokens=self._max_tokens,
            metrics=self.metrics,
        )
        self.pipeline = Pipeline(
            config=config,
            fleet=self.fleet,
            sessions=Sessions(ttl_s=config.session.ttl_s, max_sessions=config.session.max_sessions),
            caches=self.caches,
            tokenizer=tokenizer,
            policy=_policy(config.policy.name, config.policy.params),
            plain_policy=_policy("session_sticky", {}),
            upstream=self._upstream,
            observer=Observer(
                metrics=self.metrics,
                caches=self.caches,
                tokenizer=tokenizer,
                decision_log=self._decision_log,
            ),
            metrics=self.metrics,
            seed=random.SystemRandom().getrandbits(63),
        )
        self.metrics.watch(self)
        self._waiting_for: dict[str, str] = {
            name: "not discovered yet" for name, _ in _named(config.replicas)
        }

    # ---------------------------------------------------------------- life

    async def run(self, stop: asyncio.Event, on_ready: Callable[[str, str], None]) -> None:
        """Serve until `stop`; `on_ready` gets the data and the admin URL once both listen.

        Raises:
            ConfigError: a port cannot be bound, a file cannot be read.
        """
        async with AsyncExitStack() as stack:
            if self._decision_log is not None:  # last: answers in flight at the end have records
                stack.callback(self._decision_log.close)
            await stack.enter_async_context(self._upstream)
            await stack.enter_async_context(self._engine_api)
            data_url = await self._listen(
                stack, self._data_app(), self._config.listen.host, self._config.listen.port
            )
            admin_url = await self._listen(
                stack, self._admin_app(), self._config.admin.host, self._config.admin.port
            )
            async with asyncio.TaskGroup() as tg:
                tasks = [
                    tg.create_task(self._watch(name, replica), name=f"watch {name}")
                    for name, replica in _named(self._config.replicas)
                ]
                tasks.append(tg.create_task(self._sweep(), name="sweep"))
                tasks.append(tg.create_task(self._measure_lag(), name="loop lag"))
                if self._owns_process:
                    tasks.append(tg.create_task(collect_garbage(self.is_idle), name="garbage"))
                if self._decision_log is not None:
                    tasks.append(tg.create_task(self._decision_log.run(), name="records"))
                on_ready(data_url, admin_url)
                await stop.wait()
                for task in tasks:
                    task.cancel()
        for executor in (self._encoders, self._loaders):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _listen(
        self, stack: AsyncExitStack, app: web.Application, host: str, port: int
    ) -> str:
        runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that leaves cancels its request at once
            access_log=None,
            logger=_http_logger(),
            auto_decompress=False,  # the body goes on as it came
            shutdown_timeout=_DRAIN_S,
            max_line_size=self._config.limits.header_bytes,
            max_field_size=self._config.limits.header_bytes,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, host, port, reuse_address=True, backlog=1024)
        try:
            await site.start()
        except OSError as exc:
            raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
        bound = runner.addresses[0][1]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://{shown}:{bound}"

    def _data_app(self) -> web.Application:
        return DataApp(
            pipeline=self.pipeline,
            fleet=self.fleet,
            metrics=self.metrics,
            limits=self._config.limits,
            not_ready=self.not_ready,
        ).build()

    def _admin_app(self) -> web.Application:
        token = None
        if self._config.admin.token_file is not None:
            try:
                token = self._config.admin.token_file.read_text(encoding="utf-8").strip()
            except OSError as exc:
                raise ConfigError(
                    f"admin.token_file: {exc.strerror}", param="admin.token_file"
                ) from exc
            if not token:
                raise ConfigError("admin.token_file: the file is empty", param="admin.token_file")
        return AdminApp(
            pipeline=self.pipeline,
            fleet=self.fleet,
            config=self._config,
            describe=self.describe,
            token=token,
        ).build()

    def is_idle(self) -> bool:
        """Say whether no request is in flight."""
        return all(self.fleet.is_idle(replica.name) for replica in self.fleet.replicas)

    def not_ready(self) -> str | None:
        """Say why requests should not come yet; None: they may."""
        if not self.fleet.replicas:
            first = next(iter(self._waiting_for.items()), None)
            return f"no replica yet: {first[0]}: {first[1]}" if first else "no replica"
        loading = self.prompters.loading()
        return f"loading tokenizers: {', '.join(loading)}" if loading else self._history_missing()

    def _history_missing(self) -> str | None:
        for name, reason in self._waiting_for.items():
            if reason == _HISTORY:
                return f"{name}: {reason}"
        return None

    # ---------------------------------------------------------------- one replica's life

    async def _watch(self, name: str, config: ReplicaConfig) -> None:
        """Live through a replica's lives."""
        while True:
            facts = await self._discover(name, config)
            replica = self._register(name, config, facts)
            unloaded = self._claim_prompters(replica)
            try:
                async with asyncio.TaskGroup() as tg:
                    followers = [
                        tg.create_task(work, name=f"follow {candidate}")
                        for candidate, work in self._followers(replica, config, facts)
                    ]
                    tg.create_task(self._load_prompters(unloaded), name=f"tokenizer {name}")
                    tg.create_task(self._await_history(replica), name=f"history {name}")
                    await self._probe(replica, facts)
                    for follower in followers:
                        follower.cancel()
            finally:
                for candidate in candidates_of(replica):
                    self.caches.drop(candidate.id)
            logger.warning("replica restarted", extra={"replica": name})

    async def _discover(self, name: str, config: ReplicaConfig) -> EngineFacts:
        """Ask until the replica answers; each new reason for not knowing it is logged once."""
        pause_s, longest_s = _DISCOVER_S
        said = ""
        while True:
            try:
                return await self._engine_api.facts(name, config.url.rstrip("/"))
            except UpstreamError as exc:
                self._waiting_for[name] = exc.message
                if exc.message != said:
                    said = exc.message
                    logger.warning(
                        "replica not usable yet", extra={"replica": name, "reason": said}
                    )
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(pause_s * 1.6, longest_s)

    def _register(self, name: str, config: ReplicaConfig, facts: EngineFacts) -> Replica:
        """Put a discovered replica into the fleet, its ranks' caches unknown as yet.

        One that was draining when it went away drains on: whoever restarts it wants to say when.
        """
        known = {replica.name: replica for replica in self.fleet.replicas}.get(name)
        replica = Replica(
            name=name,
            url=config.url.rstrip("/"),
            models=tuple(
                ServedModel(id=m.id, root=m.root, parent=m.parent, max_model_len=m.max_model_len)
                for m in facts.models
            ),
            num_ranks=facts.num_ranks,
            block_size=facts.block_size,
            num_blocks=facts.num_gpu_blocks,
            version=facts.version,
            publishes_events=bool(self._sources(config, facts)),
            cost_class=facts.models[0].id,
            draining=known is not None and known.draining,
        )
        self.fleet.add(replica)
        self.fleet.probe_ok(name, self._now())
        for candidate in candidates_of(replica):
            self.caches.add(candidate.id, self._stream(candidate.id, replica))
        if replica.publishes_events:
            self._waiting_for[name] = _HISTORY
        else:
            self._waiting_for.pop(name, None)
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

    def _sources(self, config: ReplicaConfig, facts: EngineFacts) -> dict[int, EventSource]:
        """Choose where each rank's events come from: configured, else what the replica says."""
        if not self._config.events.enabled:
            return {}
        if config.events:
            replay = config.replay or (None,) * len(config.events)
            return {
                rank: EventSource(endpoint=endpoint, replay_endpoint=replay[rank])
                for rank, endpoint in enumerate(config.events)
            }
        return facts.event_sources

    def _stream(self, candidate: CandidateId, replica: Replica) -> RankStream:
        return RankStream(
            candidate,
            self.caches.index,
            block_size=replica.block_size or _DEFAULT_BLOCK_SIZE,
            capacity_blocks=replica.num_blocks or _DEFAULT_CAPACITY,
            seeds=self._config.hash.seeds,
            lora_paths={m.id: m.root for m in replica.models if m.parent and m.root},
        )

    def _followers(
        self, replica: Replica, config: ReplicaConfig, facts: EngineFacts
    ) -> Iterator[tuple[CandidateId, Any]]:
        sources = self._sources(config, facts)
        for rank, candidate in enumerate(candidates_of(replica)):
            source, stream = sources.get(rank), self.caches.stream(candidate.id)
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
        streams = [self.caches.stream(c.id) for c in candidates_of(replica)]
        while self._now() < deadline_s:
            if all(stream is None or stream.has_history for stream in streams):
                break
            await asyncio.sleep(0.02)
        self._waiting_for.pop(replica.name, None)

    def _claim_prompters(self, replica: Replica) -> list[ServedModel]:
        """List the models whose tokenizer nobody loads yet; at once, so that readiness waits."""
        self.prompters.adapt({m.id: m.parent for m in replica.models if m.parent is not None})
        bases = [m for m in replica.models if m.parent is None]
        return [m for m in bases if self.prompters.begin(m.id)]

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
            self.prompters.finish(model.id, prompter)
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
                self.fleet.probe_failed(
                    name, _probe_failure(exc), self._now(), jitter=random.random()
                )
                if was_up and not self.fleet.is_up(name, self._now()):
                    was_up = False
                    logger.warning("replica down", extra={"replica": name, "reason": exc.message})
                if not was_up:
                    self._upstream.abort(name)
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
                        self.fleet.note_engine_load(
                            candidate.id,
                            EngineLoad(
                                num_running=load.num_running.get(rank, 0),
                                num_waiting=load.num_waiting.get(rank, 0),
                                at_s=self._now(),
                            ),
                        )
            self.fleet.probe_ok(name, self._now())
            if not was_up:
                was_up = True
                logger.info("replica up again", extra={"replica": name})

    # ---------------------------------------------------------------- beside

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.caches.settle(self._now())
            self.caches.index.sweep()

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self.metrics.loop_lag.observe(max(0.0, loop.time() - due_s))

    def _now(self) -> float:
        return time.monotonic()

    # ---------------------------------------------------------------- what it tells

    def rank_states(self) -> Iterator[RankState]:
        """Describe every candidate, for /metrics."""
        now_s = self._now()
        for status in self.fleet.status(now_s):
            stream = self.caches.stream(status.id)
            yield RankState(
                replica=status.id,
                state=self.caches.state(status.id),
                healthy=self.fleet.is_up(status.replica, now_s) and not status.draining,
                num_requests=status.num_requests,
                num_queued_tokens=status.num_queued_tokens,
                queue_ms=status.queue_ms,
                num_blocks={
                    "gpu": self.caches.index.num_blocks(status.id, "gpu"),
                    "cpu": self.caches.index.num_blocks(status.id, "cpu"),
                },
                events=_event_counts(stream) if stream is not None else {},
                cost_error_ms=status.cost.error_ms,
                trust=self.caches.trust(status.id),
            )

    def describe(self) -> list[dict[str, Any]]:
        """Describe every replica, for /admin/replicas; those never reached included."""
        statuses = {status.id: status for status in self.fleet.status(self._now())}
        found = {replica.name: replica for replica in self.fleet.replicas}
        described: list[dict[str, Any]] = []
        for name, config in _named(self._config.replicas):
            replica = found.get(name)
            if replica is None:
                waiting = self._waiting_for.get(name, "not discovered yet")
                described.append({"name": name, "url": config.url, "waiting_for": waiting})
                continue
            ranks = [self._describe_rank(statuses[c.id]) for c in candidates_of(replica)]
            described.append({"replica": replica, "ranks": ranks})
        return described

    def _describe_rank(self, status: CandidateStatus) -> dict[str, Any]:
        stream = self.caches.stream(status.id)
        return {
            "status": status,
            "cache": self.caches.state(status.id),
            "reason": stream.reason if stream is not None else "",
            "contract": stream.contract if stream is not None else None,
            "num_gpu_blocks": self.caches.index.num_blocks(status.id, "gpu"),
            "num_cpu_blocks": self.caches.index.num_blocks(status.id, "cpu"),
            "trust": self.caches.trust(status.id),
            "events": _event_counts(stream) if stream is not None else {},
        }


_HISTORY: Final = "its event history is being replayed"


def _named(replicas: tuple[ReplicaConfig, ...]) -> Iterator[tuple[str, ReplicaConfig]]:
    for i, replica in enumerate(replicas):
        yield replica.name or f"r{i + 1}", replica


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


class _WithoutBytes(logging.Filter):
    """Keeps the client's bytes out of the log: an error of the HTTP parser quotes them."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "not HTTP", None
            record.reason = type(error).__name__
        return True


def _http_logger() -> logging.Logger:
    """Give the HTTP server a logger fit for what clients may send."""
    http_logger = logging.getLogger("router.http.server")
    if not http_logger.filters:
        http_logger.addFilter(_WithoutBytes())
    return http_logger


def _check_files(config: Config) -> None:
    """Refuse files that could only fail later: certificates, chat templates."""
    if config.forward.ca_file is not None:
        try:
            ssl.create_default_context(cafile=config.forward.ca_file)
        except OSError as exc:  # ssl.SSLError among them
            reason = "no certificates in it" if isinstance(exc, ssl.SSLError) else exc.strerror
            raise ConfigError(f"forward.ca_file: {reason}", param="forward.ca_file") from exc
    for model, file in config.tokens.chat_templates.items():
        if not file.is_file():
            param = f"tokens.chat_templates.{model}"
            raise ConfigError(f"{param}: {str(file)!r} is not a file", param=param)


def _policy(name: str, params: dict[str, Any]) -> Any:
    try:
        return create(name, params)
    except ValueError as exc:
        raise ConfigError(f"policy: {exc}", param="policy.name") from exc


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


def _event_counts(stream: RankStream) -> dict[str, int]:
    """Count what happened to a stream's events; `num_` cut off: labels of one metric."""
    counters = msgspec.structs.asdict(stream.counters)
    return {name.removeprefix("num_"): value for name, value in counters.items()}


def _probe_failure(error: UpstreamError) -> ProbeFailure:
    if isinstance(error, UpstreamUnreachable):
        return ProbeFailure.REFUSED
    if isinstance(error, UpstreamTimeout):
        return ProbeFailure.TIMEOUT
    return ProbeFailure.BAD_STATUS


def serve(config: Config) -> None:
    """Run one router until SIGINT or SIGTERM.

    Raises:
        ConfigError: the configuration cannot be put into effect; nothing was served.
    """
    router = Router(config, owns_process=True)
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
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def ready(data_url: str, admin_url: str) -> None:
        print(f"warmroute listens on {data_url} (admin: {admin_url})", file=sys.stderr, flush=True)

    await router.run(stop, ready)
