"""Builds the router's parts and owns what runs beside requests: one TaskGroup, every task named.

    watch NAME    discover a replica, follow its events, probe it; anew when it restarts
    sweep         end claims whose events came; free what retired epochs left, in slices
    loop lag      measure what blocks the event loop
    garbage       collect it often and briefly
    records       write decision records

A replica's life is told in router.watch.
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
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from policies.registry import create
from router import logs
from router.config import Config, ReplicaConfig
from router.errors import (
    ConfigError,
    RouterError,
)
from router.fleet.fleet import Fleet
from router.fleet.sessions import Sessions
from router.garbage import collect_garbage
from router.http.admin import AdminApp
from router.http.app import DataApp
from router.index.block_index import BlockIndex
from router.index.caches import Caches
from router.io.decision_log import DecisionLog
from router.io.engine_api import EngineApi
from router.io.upstream import Upstream
from router.metrics import Metrics
from router.pipeline import Pipeline
from router.prompt import Prompters
from router.stages.observe import Observer
from router.stages.tokenize import Tokenizer
from router.status import Status, Waiting
from router.watch import HISTORY, ReplicaWatch

logger = logging.getLogger(__name__)

_SWEEP_S: Final = 0.05
_LAG_S: Final = 0.1
_READ_BYTES: Final = 1024 * 1024  # of a body before its socket is paused: most come in one piece
_DRAIN_S: Final = 10.0  # answers in flight at the end get this long


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
            api_key=_secret(config.engine.api_key_file, "engine.api_key_file"),
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
        self._waiting: Waiting = dict.fromkeys(
            (name for name, _ in _named(config.replicas)), "not discovered yet"
        )
        self._status = Status(
            list(_named(config.replicas)),
            fleet=self.fleet,
            caches=self.caches,
            waiting=self._waiting,
        )
        self.metrics.watch(self._status)

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
                    tg.create_task(self._watch(name, replica).run(), name=f"watch {name}")
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
            read_bufsize=_READ_BYTES,
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
        token = _secret(self._config.admin.token_file, "admin.token_file")
        return AdminApp(
            pipeline=self.pipeline,
            fleet=self.fleet,
            config=self._config,
            describe=self._status.describe,
            token=token,
        ).build()

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

    def _history_missing(self) -> str | None:
        for name, reason in self._waiting.items():
            if reason == HISTORY:
                return f"{name}: {reason}"
        return None

    def _watch(self, name: str, replica: ReplicaConfig) -> ReplicaWatch:
        return ReplicaWatch(
            name,
            replica,
            config=self._config,
            fleet=self.fleet,
            caches=self.caches,
            prompters=self.prompters,
            upstream=self._upstream,
            engine_api=self._engine_api,
            loaders=self._loaders,
            waiting=self._waiting,
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


def _named(replicas: tuple[ReplicaConfig, ...]) -> Iterator[tuple[str, ReplicaConfig]]:
    for i, replica in enumerate(replicas):
        yield replica.name or f"r{i + 1}", replica


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


def _secret(file: Path | None, key: str) -> str | None:
    """Read a secret from its file; None: none is configured.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if file is None:
        return None
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigError(f"{key}: {reason}", param=key) from exc
    if not secret:
        raise ConfigError(f"{key}: the file is empty", param=key)
    return secret


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
