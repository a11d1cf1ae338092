"""One policy, from cold caches to the last turn: replicas, router and agents in one event loop.

The router is the one that `warmroute serve` runs, the replicas are those of `warmroute emulate`.
Only their surroundings differ: `virtual_time` for the clock, `memory_wires` for TCP,
`memory_events` for ZeroMQ.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import re
import secrets
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from loadtest.demo.memory_events import MemoryEvents, MemoryPublisher
from loadtest.demo.memory_wires import Wires
from loadtest.demo.run import Ended, Job
from loadtest.demo.virtual_time import Clock, VirtualLoop
from loadtest.demo.workload import NUM_REPLICAS, SESSION_HEADER
from loadtest.emulator import replica as emulated
from loadtest.emulator.emulator import Emulator
from loadtest.results import TurnResult
from loadtest.runner.sending import make_client
from loadtest.runner.sessions import drive
from router import config
from router.assembly import Router
from router.cluster import candidate_source
from router.run import run

_READY_S: Final = 60.0
_LOOK_S: Final = 0.05
_SILENT_S: Final = 600.0  # longest silence of an answer
_STATE: Final = re.compile(r'^warmroute_replica_state\{replica="([^"]+)",state="(\w+)"\} 1', re.M)


def play(job: str, clock: Clock, wires: Wires) -> None:
    """Do a `Job` (JSON), then wait to be ended; with `keep` the router serves meanwhile."""
    asked = msgspec.json.decode(job, type=Job)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    random.seed(asked.workload.seed)
    # The router draws the seed of its policies from here.
    random.SystemRandom = lambda: random.Random(asked.workload.seed)  # type: ignore[assignment,misc]
    emulated.EventPublisher = MemoryPublisher  # type: ignore[attr-defined]
    candidate_source.EngineEvents = MemoryEvents  # type: ignore[attr-defined]
    gc.disable()  # it ends before memory matters
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock, wires)) as runner:
        runner.run(_play(asked, clock))


async def _play(job: Job, clock: Clock) -> None:
    async with AsyncExitStack() as stack:
        options = job.workload.replica_options(job.num_gpu_blocks)
        replicas = [await stack.enter_async_context(Emulator(options)) for _ in range(NUM_REPLICAS)]
        router = Router(_config(job, [replica.url for replica in replicas]))
        urls: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        group = await stack.enter_async_context(asyncio.TaskGroup())
        group.create_task(
            run(router, asyncio.Event(), lambda *both: urls.set_result(both)), name="router"
        )
        router_url, admin_url = await urls
        await _wait_ready(router)
        begin_s = time.monotonic()
        await _drive(job, router_url)
        ended = Ended(
            cache_views=await _cache_views(router_url),
            elapsed_s=time.monotonic() - begin_s,
            router_url=router_url,
            admin_url=admin_url,
            replica_urls=tuple(replica.url for replica in replicas),
        )
        gc.enable()
        clock.go_live()
        _write_ended(job, ended)
        await asyncio.get_running_loop().create_future()  # until the demo ends this process


def _config(job: Job, replica_urls: list[str]) -> config.Config:
    token = Path(job.ended_file).with_suffix(".admin-token")
    token.unlink(missing_ok=True)
    opened = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(opened, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return config.load(
        flags={
            ("replicas",): [{"url": url} for url in replica_urls],
            ("policy", "name"): job.policy,
            ("listen", "host"): "127.0.0.1",
            ("listen", "port"): job.port,
            ("admin", "port"): 0,
            ("admin", "token_file"): str(token),
        }
    )


async def _wait_ready(router: Router) -> None:
    async with asyncio.timeout(_READY_S):
        while router.readiness.not_ready() is not None:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(_LOOK_S)


async def _drive(job: Job, router_url: str) -> None:
    """Let the agents work; write every turn as it ends."""
    with _open_turns(job) as turns:

        def write(result: TurnResult) -> None:
            turns.write(msgspec.json.encode(result) + b"\n")
            turns.flush()

        await drive(
            router_url,
            job.workload.sessions(),
            concurrency=job.workload.num_sessions,
            session_header=SESSION_HEADER,
            timeout_s=_SILENT_S,
            on_result=write,
        )


def _open_turns(job: Job) -> BinaryIO:
    return Path(job.turns_file).open("wb")


def _write_ended(job: Job, ended: Ended) -> None:
    """Write it in one step: the demo waits for the file."""
    draft = Path(f"{job.ended_file}.draft")
    draft.write_bytes(msgspec.json.encode(ended))
    draft.rename(job.ended_file)


async def _cache_views(router_url: str) -> dict[str, str]:
    """Ask the router how well it knows each replica's cache."""
    async with (
        make_client(timeout_s=_SILENT_S) as client,
        client.get(f"{router_url}/metrics") as page,
    ):
        return {match[1]: match[2] for match in _STATE.finditer(await page.text())}
