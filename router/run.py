"""Runs a router: one TaskGroup, every task named; its reloads and its end.

    watch NAME    discover a replica, follow its events, probe it; again when it restarts
    pool NAME     look at its Mooncake master, list its keys
    pool NAME questions
                  ask it about the blocks that requests would fetch
    configuration read it again, at SIGHUP or when its file changes
    discovery NAME
                  follow a source of replicas
    tenants       read the tenants' file again when it changes
    sweep         end claims whose events came; free what retired epochs left, in slices;
                  drop removed replicas that are idle
    loop lag      measure what blocks the event loop
    garbage       collect it often and briefly
    watchdog      tell systemd that the loop turns, if its unit has WatchdogSec
    early         have next prompts computed by idle replicas; see router.observers.early.early
    redis         share state with other routers; see router.cluster
    records       write decision records

A replica's own tasks are started by router.discovery.watches.

Signals:

    SIGTERM       drain in three phases: a supervisor's (router.http.server)
    SIGINT        without the first phase: a person at a terminal has no front end
    either        a second time: end now; a third time: the system's default action
                  SIGTERM within 2 s of the first is the same order: a supervisor may send it twice,
                  or after the SIGINT of its terminal
    SIGHUP        read files again
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop

from router.assembly import Router, build_listeners
from router.assembly.reload import Reload
from router.base import logs
from router.base.errors import ConfigError
from router.base.garbage import collect_garbage
from router.base.listening import raise_descriptor_limit
from router.base.supervisor import ignore, keep_running
from router.base.system import notify, watchdog_s
from router.config import Config, redis_password
from router.config.exposure import announce
from router.http.admin_token import with_token
from router.metrics import Metrics
from router.tenants import Tenants

logger = logging.getLogger(__name__)

_SWEEP_S: Final = 0.05
_LAG_S: Final = 0.1
_READY_S: Final = 0.05  # between two looks whether a router may join others on their port
_SAME_ORDER_S: Final = 2.0  # a supervisor's SIGTERM to the group comes beside that to the process
_TENANTS_S: Final = 1.0  # a change of the tenants' file is in force within twice that


def serve(
    config: Config,
    load: Callable[[], Config] | None = None,
    file: Path | None = None,
    *,
    greet: Callable[[str, str], None] = lambda data_url, admin_url: None,
) -> None:
    """Run one router until SIGINT or SIGTERM.

    Args:
        load: Reads the configuration again; None: it cannot be.
        file: The file that it is read from, if there is one.
        greet: Takes the data and the admin URL once both listen; it must not wait.

    Raises:
        ConfigError: the configuration cannot be put into effect; nothing was served.
    """
    config = with_token(config, os.environ)
    router = Router(config, redis_password=redis_password(config.redis, os.environ))
    raise_descriptor_limit()
    log_writer = logs.start(
        level=config.log.level, as_json=config.log.json, lost=router.metrics.log_lines_lost.inc
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signalled(router, load, file, greet))
    except* ConfigError as group:
        raise group.exceptions[0] from None
    finally:
        log_writer.stop()


async def _until_signalled(
    router: Router,
    load: Callable[[], Config] | None,
    file: Path | None,
    greet: Callable[[str, str], None],
) -> None:
    stop = asyncio.Event()
    config_reload = None
    if load is not None:
        follows = router.config.discovery.follow_config
        config_reload = Reload(lambda: with_token(load(), os.environ), file if follows else None)
    _handle_signals(router, stop, config_reload)

    def ready(data_url: str, admin_url: str) -> None:
        announce(router.config, data_url, admin_url)
        greet(data_url, admin_url)
        notify(os.environ, "READY=1")

    await run(router, stop, ready, owns_process=True, config_reload=config_reload)


async def run(
    router: Router,
    stop: asyncio.Event,
    on_ready: Callable[[str, str], None],
    *,
    owns_process: bool = False,
    config_reload: Reload | None = None,
) -> None:
    """Serve until `stop`; `on_ready` gets the data and the admin URL once both listen.

    Args:
        owns_process: Whether the garbage collector is this router's to steer.
        config_reload: Reads the configuration again; None: it stays.

    Raises:
        ConfigError: a port cannot be bound, a file cannot be read.
    """
    config = router.config
    async with AsyncExitStack() as stack:
        stack.callback(router.threads.close)
        # Late: answers in flight at the end have records.
        stack.callback(router.story.steps.observers.close)
        for part in router.observers.values():
            if part.start is not None:
                part.start()
        stack.callback(router.story.steps.settling.close)  # and before that, what is late
        for client in router.clients:
            await stack.enter_async_context(client)
        router.listeners = public, admin = build_listeners(router)
        listen = config.listen
        data_url = public.bind(listen.host, listen.port, shared=listen.shared)
        stack.callback(public.close)
        admin_url = admin.bind(config.admin.host, config.admin.port)
        stack.callback(admin.close)
        async with asyncio.TaskGroup() as tg:
            router.discovery.watches.start(tg)
            loops = _loops(router, config_reload, owns_process=owns_process)
            tasks = [tg.create_task(loop, name=name) for name, loop in loops]
            await admin.start(tg)
            if listen.shared:
                await _until_ready(router, stop)
            await public.start(tg)
            if not stop.is_set():
                on_ready(data_url, admin_url)
            await stop.wait()
            if owns_process:
                notify(os.environ, "STOPPING=1")
            await router.draining.run(public)
            for each in router.listeners:
                await each.end()
            router.discovery.watches.stop()
            for task in tasks:
                task.cancel()


async def _until_ready(router: Router, stop: asyncio.Event) -> None:
    """Wait for what makes a router ready, or that it should end."""
    while router.readiness.not_ready() is not None and not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                await stop.wait()


def _loops(
    router: Router, config_reload: Reload | None, *, owns_process: bool
) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
    """Name what runs beside requests, but for the watches."""

    def kept(
        follower: str,
        loop: Callable[[], Awaitable[None]],
        on_failure: Callable[[str], None] = ignore,
    ) -> Coroutine[Any, Any, None]:
        return keep_running(
            loop, follower=follower, count=router.metrics.count_failure, on_failure=on_failure
        )

    yield "sweep", kept("upkeep", partial(_sweep, router))
    yield "files", kept("upkeep", router.read_files.run)
    yield "loop lag", kept("upkeep", partial(_measure_lag, router.metrics))
    for part in router.observers.values():
        for name, run_part in part.loops.items():
            yield name, kept(name, run_part)
    if router.cluster.sharing is not None:
        yield "redis", kept("redis", router.cluster.sharing.run)
    for pool in router.pools.values():
        name = f"pool {pool.name}".strip()
        yield name, kept("pool", pool.follower.run, pool.catalog.lost)
        yield f"{name} questions", kept("pool_questions", pool.questions.run)
    for source in router.discovery.replica_sources:
        failed = partial(router.discovery.sources.failed, source.name)
        run_source = partial(source.run, router.discovery.sources)
        yield f"discovery {source.name}", kept("discovery", run_source, failed)
    if router.tenants is not None:
        follow = partial(_follow_tenants, router.tenants, router.threads.files)
        yield "tenants", kept("tenants", follow)
    if owns_process:
        yield "garbage", collect_garbage(router.is_idle)
        if (pause_s := watchdog_s(os.environ)) is not None:
            yield "watchdog", _ping_watchdog(pause_s)
    if config_reload is not None:
        yield "configuration", kept("configuration", partial(config_reload.run, router))
    for each in router.listeners:
        yield f"{each.name} connections", each.watch()


async def _sweep(router: Router) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        router.caches.expire_claims(time.monotonic())
        router.story.steps.settling.sweep(time.monotonic())
        router.caches.index.sweep()
        router.discovery.sources.sweep()
        for part in router.observers.values():
            if part.sweep is not None:
                part.sweep(time.monotonic())
        router.discovery.watches.sweep()


async def _follow_tenants(tenants: Tenants, files: Executor) -> None:
    """Read the tenants' file again when it changes; off the loop, it may be large or far."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_TENANTS_S)
        tenants.follow(await loop.run_in_executor(files, tenants.look))


async def _ping_watchdog(pause_s: float) -> None:
    """Tell the service manager that the loop turns; it kills a router that says so no longer."""
    while True:
        notify(os.environ, "WATCHDOG=1")
        await asyncio.sleep(pause_s)


async def _measure_lag(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _LAG_S
        await asyncio.sleep(_LAG_S)
        metrics.loop_lag.observe(max(0.0, loop.time() - due_s))


def _handle_signals(router: Router, stop: asyncio.Event, config_reload: Reload | None) -> None:
    """Handle signals from now on, on the running loop."""
    loop = asyncio.get_running_loop()
    ordered_s = 0.0  # when the first signal came

    def end(number: signal.Signals) -> None:
        nonlocal ordered_s
        if not stop.is_set():
            if number == signal.SIGINT:
                router.draining.skip_grace()
            ordered_s = loop.time()
            stop.set()
            return
        if number == signal.SIGTERM and loop.time() - ordered_s < _SAME_ORDER_S:
            return
        router.draining.end_now()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)

    def read_again() -> None:
        router.read_files.want()
        if config_reload is not None:
            config_reload.want()

    loop.add_signal_handler(signal.SIGHUP, read_again)
