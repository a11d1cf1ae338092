"""A running replica: `async with Emulator(options) as replica: ... replica.url`."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Self

import zmq
from aiohttp import web

from loadtest.emulator.app import App, make_request
from loadtest.emulator.faults import Fault, hang_up
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.replica import Replica
from router.base.addresses import own_url_host
from router.base.listening import BACKLOG, listen

PORT_PATIENCE_S = 5.0


class Emulator:
    """One emulated replica, serving from entry to exit of the context.

    `num_lives` counts starts: 1, and one more after each restart; `changed` is set at each
    restart and death.

    Raises (on entry):
        ValueError: Options that contradict each other.
        OSError, zmq.ZMQError: A port is taken, or the model directory has no tokenizer.
    """

    def __init__(self, options: EmulatorOptions | None = None) -> None:
        self.options = options or EmulatorOptions()
        self.port = self.options.port
        self.num_lives = 0
        self.changed = asyncio.Event()
        self.replica: Replica
        self.app: App
        self._faults: asyncio.Queue[Fault] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._keeper: asyncio.Task[None]
        self._group = asyncio.TaskGroup()
        self._server: web.Server
        self._runner: web.ServerRunner
        self._sites: list[web.SockSite] = []

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash; its port changes if a restart says so."""
        return f"http://{own_url_host(self.options.host)}:{self.port}"

    async def __aenter__(self) -> Self:
        self.replica = Replica(self.options)
        self.app = App(self.replica, self._faults.put_nowait)
        self.replica.faults.on_kill = lambda: self._faults.put_nowait(Fault(kind="kill"))
        self._server = web.Server(
            self._handle,
            request_factory=make_request,
            handler_cancellation=True,
            access_log=None,
        )
        self._runner = web.ServerRunner(self._server)
        await self._group.__aenter__()
        try:
            await self._runner.setup()
            self.replica.start()
            await self._open()
        except BaseException:
            await self.close()
            await self._runner.cleanup()
            await self._group.__aexit__(None, None, None)
            raise
        self._keeper = self._group.create_task(self._keep(), name="emulator-faults")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeper.cancel()
        await self.close()
        if self.replica.pool is not None:
            await self.replica.pool.close()
        await self._runner.cleanup()
        await self._group.__aexit__(None, None, None)

    @property
    def is_dead(self) -> bool:
        """Whether a fault has killed it."""
        return self._keeper.done()

    async def serve(self) -> None:
        """Wait until the replica is dead (`kill`) or the caller is cancelled."""
        await asyncio.wait([self._keeper])

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, unless the replica is down: a connection may come as it closes."""
        if not self._sites:
            await hang_up(request)
        return await self.app.handle(request)

    async def _open(self) -> None:
        """Start the ranks' tasks and listen."""
        for number, rank in enumerate(self.replica.ranks):
            self._tasks.append(
                self._group.create_task(rank.engine.run(), name=f"emulator-engine-{number}")
            )
            if rank.publisher is not None:
                self._tasks.append(
                    self._group.create_task(
                        rank.publisher.serve_replays(), name=f"emulator-replay-{number}"
                    )
                )
        sockets = listen(self.options.host, self.port)
        self._sites = [web.SockSite(self._runner, one, backlog=BACKLOG) for one in sockets]
        for site in self._sites:
            await site.start()
        self.port = sockets[0].getsockname()[1]
        self.num_lives += 1
        self.changed.set()

    async def close(self) -> list[tuple[int, int]]:
        """Stop listening, cut all connections, end the ranks; return their event ports."""
        for site in self._sites:
            await site.stop()
        self._sites.clear()
        for connection in list(self._server.connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        return self.replica.stop()

    async def _keep(self) -> None:
        """Apply the faults of the whole replica."""
        while True:
            fault = await self._faults.get()
            if fault.kind == "kill":
                if self.options.may_kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                await self.close()
                self.changed.set()
                return
            ports = await self.close()
            await asyncio.sleep(fault.down_s)
            if fault.port is not None:
                self.port = fault.port
            await self._start_again(ports)
            await self._open()

    async def _start_again(self, ports: list[tuple[int, int]]) -> None:
        """Bind the same event ports, which libzmq frees in its own time after a close."""
        async with asyncio.timeout(PORT_PATIENCE_S):
            while True:
                try:
                    return self.replica.start(ports)
                except zmq.ZMQError as error:
                    if error.errno != zmq.EADDRINUSE:
                        raise
                await asyncio.sleep(0.005)
