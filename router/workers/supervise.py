"""The parent of several workers."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final

from router.base import logs
from router.base.addresses import own_url_host
from router.base.errors import ConfigError
from router.base.listening import cannot_listen, listen, why_not
from router.config import AdminConfig, Config, ListenConfig, private_server
from router.config.exposure import announce
from router.config.worker import Worker
from router.http.admin_token import with_token
from router.workers.child import Child
from router.workers.private_redis import PrivateRedis

_LATE_S: Final = 10.0  # after a worker should have drained, it is killed
_ALL_UP_S: Final = 60.0  # a worker that takes longer does not delay the others' announcement
_LOOK_S: Final = 0.02
_MAX_PATH_BYTES: Final = 60  # of the folder: a socket's whole path may have 107


def supervise(
    config: Config,
    arguments: Sequence[str],
    *,
    greet: Callable[[str, str], None] = lambda data_url, admin_url: None,
) -> int:
    """Run `listen.workers` workers until SIGINT or SIGTERM; return the exit status.

    Args:
        arguments: Of `serve`, as they were typed.
        greet: Takes the data and the admin URL once all workers listen; it must not wait.

    Raises:
        ConfigError: a port cannot be had, there is no Redis; nothing was served.
    """
    config = with_token(config, os.environ)
    program = None
    if not config.redis.is_configured and (program := private_server()) is None:
        raise ConfigError(
            "listen.workers: several workers share a Redis: install redis-server or "
            "valkey-server, or set redis.url (--redis)",
            param="listen.workers",
        )
    listening, admin = config.listen, config.admin
    if listening.port and listening.port == admin.port:
        raise ConfigError(f"admin.port: {admin.port} is listen.port already", param="admin.port")
    with (
        _reserved(listening.host, listening.port, shared=listening.shared) as port,
        _reserved(admin.host, admin.port) as admin_port,
        _private_folder() as folder,
    ):
        redis = PrivateRedis(program, folder) if program is not None else None
        parent = _Parent(config, arguments, folder, redis, port, admin_port, greet)
        log_writer = logs.start(level=config.log.level, as_json=config.log.json)
        try:
            return asyncio.run(parent.run())
        finally:
            log_writer.stop()


class _Parent:
    """What runs, and what becomes of signals."""

    def __init__(
        self,
        config: Config,
        arguments: Sequence[str],
        folder: Path,
        redis: PrivateRedis | None,
        port: int,
        admin_port: int,
        greet: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._arguments = arguments
        self._folder = folder
        self._redis = redis
        self._ports = port, admin_port
        self._greet = greet
        self._starts = count(1)
        self._workers: list[Child] = []
        self._ending = asyncio.Event()

    async def run(self) -> int:
        """Start all, wait for the end; return the exit status.

        Raises:
            ConfigError: the private Redis does not start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if self._redis is None:
            return await self._serve()
        status = 0
        with self._redis.log.open("wb") as log:
            redis = Child("redis", self._redis.command, self._redis.is_up, output=log)
            async with asyncio.TaskGroup() as tg:
                tg.create_task(redis.run(), name="redis")
                await self._until(lambda: redis.is_settled)
                if redis.failed is None:
                    status = await self._serve()
                redis.end(signal.SIGKILL)  # nothing of it is saved
        if redis.failed is not None:
            raise ConfigError(
                "listen.workers: the Redis of the workers does not start: "
                f"{redis.failed}: {self._redis.last_words()}",
                param="listen.workers",
            )
        return status

    async def _serve(self) -> int:
        """Run the workers until they have drained."""
        total, listening = self._config.listen.workers, self._config.listen
        async with asyncio.TaskGroup() as tg:
            # One first: what it cannot start with none can, and this is said once.
            first = self._worker(1)
            running = [tg.create_task(first.run(), name="worker 1")]
            await self._until(lambda: first.is_settled)
            if first.failed is not None:
                return max(1, first.status)
            for number in range(2, total + 1):
                if not self._ending.is_set():
                    child = self._worker(number)
                    running.append(tg.create_task(child.run(), name=f"worker {number}"))
            await self._until(lambda: all(each.was_up for each in self._workers), _ALL_UP_S)
            if not self._ending.is_set():
                self._say_ready()
            await self._ending.wait()
            drain_s = listening.drain_grace_s + listening.drain_s + _LATE_S
            await asyncio.wait(running, timeout=drain_s)
            for each in self._workers:
                each.signal(signal.SIGKILL)
        return 0

    def _worker(self, number: int) -> Child:
        """Add a worker; only the first gives up where it cannot start."""
        file: Path | None = None

        def command(is_again: bool) -> Sequence[str]:
            nonlocal file
            port, admin_port = self._ports
            worker = Worker(
                number=number,
                total=self._config.listen.workers,
                start=next(self._starts),
                is_again=is_again,
                folder=self._folder,
                port=port,
                admin_port=admin_port,
                redis_url=self._redis.url if self._redis is not None else None,
            )
            file = worker.socket
            program = [sys.executable, "-m", "router.cli", "serve"]
            return [*program, *self._arguments, "--worker", worker.packed()]

        def is_up() -> bool:
            return file is not None and file.exists()

        def on_end() -> None:
            if file is not None:  # one that was killed has left it
                file.unlink(missing_ok=True)

        child = Child(f"worker {number}", command, is_up, on_end=on_end, gives_up=number == 1)
        self._workers.append(child)
        return child

    async def _until(self, is_so: Callable[[], bool], longest_s: float = math.inf) -> None:
        """Wait while something starts; or until all should end."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + longest_s
        while not (is_so() or self._ending.is_set() or loop.time() > end_s):
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._ending.wait()

    def _say_ready(self) -> None:
        config, (port, admin_port) = self._config, self._ports
        data_url, admin_url = _url(config.listen, port), _url(config.admin, admin_port)
        announce(config, data_url, admin_url, f", {config.listen.workers} workers")
        self._greet(data_url, admin_url)

    def _end(self, number: signal.Signals) -> None:
        """Pass the signal on; the second one is the last that we take."""
        if self._ending.is_set():
            loop = asyncio.get_running_loop()
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)
        self._ending.set()
        for worker in self._workers:
            worker.end(number)

    def _reload(self) -> None:
        for worker in self._workers:
            worker.reload()


def _url(section: ListenConfig | AdminConfig, port: int) -> str:
    scheme = "https" if section.tls_cert is not None else "http"
    return f"{scheme}://{own_url_host(section.host)}:{port}"


@contextmanager
def _reserved(host: str, port: int, *, shared: bool = False) -> Iterator[int]:
    """Keep a port for workers within the block; nothing is accepted here.

    Args:
        shared: Other routers may have it, too.

    Raises:
        ConfigError: it cannot be had.
    """
    sockets: list[socket.socket] = []
    try:
        if port and not shared:
            for one in listen(host, port):  # fails if another process listens there
                one.close()
        sockets = listen(host, port, shared=True)
    except OSError as exc:
        raise ConfigError(cannot_listen(host, port, why_not(host, exc))) from exc
    try:
        yield int(sockets[0].getsockname()[1])
    finally:
        for one in sockets:
            one.close()


@contextmanager
def _private_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, for sockets; gone at the end."""
    base = tempfile.gettempdir()
    is_long = len(os.fsencode(base)) > _MAX_PATH_BYTES
    folder = Path(tempfile.mkdtemp(prefix="warmroute-", dir="/tmp" if is_long else base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
