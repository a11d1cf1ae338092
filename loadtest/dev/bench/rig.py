"""A router process in front of fake replicas.

The router runs as in production: `python -m router.cli serve`, log level info into a file. Four
replicas, so that every request is a real decision; all of them EXACT.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from loadtest.dev.bench.client import Answer, Connection, request_bytes
from loadtest.dev.bench.conversations import Prepared, num_leading
from loadtest.dev.bench.fake_engine import BLOCK_SIZE
from loadtest.dev.bench.setting import Setting
from loadtest.runner.children import running
from loadtest.runner.stack import child_environment, start_router
from router.base.contracts import BlockKey

NUM_REPLICAS: Final = 4
_START_S: Final = 60.0
_ENCODERS: Final = ("fastokens proven", "tokenizers stays")  # one of them is logged at the start
_LINE: Final = re.compile(r"^.+$", re.MULTILINE)


class RigError(RuntimeError):
    """The router does not know its replicas, or does not answer as it should."""


class Rig:
    """What a benchmark does to the router, and to the replicas behind it.

    Attributes:
        port: The router's data port.
        direct_port: Of replica r1, for the same requests without the router.
        num_wrong: Predictions (`x-warmroute-cached`) that were not what the bench knew.
    """

    def __init__(self, router_pid: int, port: int, admin: Connection, ports: list[int]) -> None:
        self.port = port
        self.direct_port = ports[0]
        self.num_wrong = 0
        self.num_predicted = 0
        self._admin = admin
        self._process = psutil.Process(router_pid)
        self._ports = {f"r{i + 1}": port for i, port in enumerate(ports)}
        self._held: dict[str, set[BlockKey]] = {name: set() for name in self._ports}

    def cpu_s(self) -> float:
        """Read the CPU time that the router has used, all its threads."""
        return _cpu_s([self._process, *self._process.children(recursive=True)])

    def rss_bytes(self) -> int:
        """Read the router's resident memory."""
        return int(self._process.memory_info().rss)

    def num_cached_tokens(self, prepared: Prepared, replica: str) -> int:
        """Return how many of the prompt's tokens an engine would reuse at `replica`."""
        keys = prepared.keys[: prepared.num_reusable_blocks]
        return num_leading(keys, self._held[replica]) * BLOCK_SIZE

    def check(self, prepared: Prepared, answer: Answer, replica: str) -> None:
        """Count whether the router knew where the prompt's blocks are.

        Raises:
            RigError: it did not answer 200.
        """
        if answer.status != 200:
            raise RigError(f"the router answered {answer.status}: {answer.body[:300]!r}")
        num_cached = self.num_cached_tokens(prepared, replica)
        self.num_predicted += 1
        is_right = (
            answer.header("x-warmroute-replica") == replica
            and answer.header("x-warmroute-cached") == f"gpu={num_cached};cpu=0;pool=0"
        )
        self.num_wrong += not is_right

    @property
    def prediction_note(self) -> str:
        """Return how many predictions were right, for the table."""
        return f"{self.num_predicted - self.num_wrong} of {self.num_predicted} predictions exact"

    async def warm(self, connection: Connection, prepared: Prepared) -> str:
        """Send a request through the router, let its replica store it; return the replica."""
        answer = await connection.send(prepared.request())
        replica = answer.header("x-warmroute-replica")
        if answer.status != 200 or replica is None:
            raise RigError(f"the router answered {answer.status}: {answer.body[:300]!r}")
        await self.store(prepared, replica)
        return replica

    async def store(self, prepared: Prepared, replica: str) -> None:
        """Publish the prompt's blocks at `replica`, and wait until the router knows them."""
        held = self._held[replica]
        num_held = num_leading(prepared.keys, held)
        if num_held < len(prepared.keys):
            async with Connection(self._ports[replica]) as connection:
                await connection.send(request_bytes("/bench/publish", prepared.stored(num_held)))
            held.update(prepared.keys)
        num_blocks = len(held) + 1  # and the block that showed the contract
        deadline_s = time.monotonic() + 10.0
        while (await self._ranks())[replica]["num_gpu_blocks"] != num_blocks:
            if time.monotonic() > deadline_s:
                raise RigError(f"the router did not take over {replica}'s events")
            await asyncio.sleep(0.001)

    async def until_exact(self) -> None:
        """Wait until the router knows every replica EXACT and can tokenize.

        Raises:
            RigError: it does not get there.
        """
        deadline_s = time.monotonic() + _START_S
        async with Connection(self.port) as connection:
            while True:
                ready = await connection.send(request_bytes("/readyz"))
                ranks = await self._ranks() if ready.status == 200 else {}
                states = {name: rank["cache"] for name, rank in ranks.items()}
                if len(states) == len(self._ports) and set(states.values()) == {"exact"}:
                    return
                if time.monotonic() > deadline_s:
                    raise RigError(f"the router is not ready: {ready.body!r} {states}")
                await asyncio.sleep(0.05)

    async def _ranks(self) -> dict[str, dict[str, Any]]:
        answer = await self._admin.send(request_bytes("/admin/replicas"))
        described = msgspec.json.decode(answer.body)["replicas"]
        return {r["replica"]["name"]: r["ranks"][0] for r in described if "replica" in r}


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))


@asynccontextmanager
async def start_rig(setting: Setting, *flags: str) -> AsyncIterator[Rig]:
    """Start replicas and router; `flags` go to the router. Both end with the context.

    Raises:
        ChildDied, RigError: one of them does not start.
    """
    log_dir = setting.work_dir
    async with fake_replicas(NUM_REPLICAS, setting.model_dir, log_dir) as ports:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        async with start_router(urls, ["--set", "admin.open=true", *flags], log_dir) as router:
            admin_port = int(router.admin_url.rpartition(":")[2])
            async with Connection(admin_port) as admin:
                port = int(router.url.rpartition(":")[2])
                rig = Rig(router.child.pid, port, admin, ports)
                await rig.until_exact()
                await _until_proven(router.child.log)
                yield rig


@asynccontextmanager
async def fake_replicas(num: int, model_dir: Path, log_dir: Path) -> AsyncIterator[list[int]]:
    """Start fake replicas in one process, and yield their ports.

    Raises:
        ChildDied: they do not start.
    """
    module = "loadtest.dev.bench.fake_engine"
    argv = ["-m", module, "--replicas", str(num), "--model", str(model_dir)]
    env = child_environment(os.environ)
    log = log_dir / "replicas.log"
    async with running("the fake replicas", argv, log=log, env=env) as child:
        await child.wait_announced(_LINE, _START_S)
        yield msgspec.json.decode(child.announced[0])["ports"]


async def _until_proven(log: Path) -> None:
    """Wait until the router has chosen its encoder.

    Requests do not wait for it, but the first ones would not be typical.
    """
    deadline_s = time.monotonic() + _START_S
    while not _has_chosen(log):
        if time.monotonic() > deadline_s:
            raise RigError("the router did not choose an encoder")
        await asyncio.sleep(0.05)


def _has_chosen(log: Path) -> bool:
    text = log.read_text(encoding="utf-8", errors="replace")
    return any(said in text for said in _ENCODERS)
