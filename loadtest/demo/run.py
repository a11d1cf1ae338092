"""One policy as the demo sees it: a process that plays it, its turns as they end, its figures.

What is measured comes from outside the router: first-token times from the agents, cached tokens
from the engines' `usage`. Of the router only its own claims are kept: what it predicted, and how
well it says it knows the caches.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from loadtest.demo.workload import Plan, Workload
from loadtest.results import TurnResult
from loadtest.runner.children import Child, ChildDied, running
from loadtest.runner.stack import child_environment

_LOOK_S: Final = 0.1


class Job(Struct, frozen=True, kw_only=True):
    """What a process plays, and where it writes: every turn, and `Ended` after the last one."""

    workload: Workload
    policy: str
    num_gpu_blocks: int
    port: int  # the router's; 0: any free one
    turns_file: str
    ended_file: str


class Ended(Struct, frozen=True, kw_only=True):
    """What a process says after the last turn; `elapsed_s` is virtual.

    `cache_views` is the router's own word on how it knows each replica's cache (exact, degraded,
    blind).
    """

    cache_views: dict[str, str]
    elapsed_s: float
    router_url: str
    admin_url: str
    replica_urls: tuple[str, ...]


class Run(Struct, frozen=True, kw_only=True):
    """What one policy did; all times are virtual."""

    policy: str
    seed: int
    results: list[TurnResult]
    ended: Ended


@asynccontextmanager
async def run(
    workload: Workload,
    plan: Plan,
    policy: str,
    out: Path,
    *,
    port: int = 0,
    on_result: Callable[[TurnResult], None],
) -> AsyncIterator[Run]:
    """Play all sessions through a fresh router; its process ends with the context.

    Args:
        out: Gets the turns; the folder `logs` in it, which exists, gets the log.
        port: The router's; 0: any free one.
        on_result: Called after every turn.

    Raises:
        ChildDied: the process ended before its time.
    """
    job = _prepare(workload, plan, policy, out, port)
    argv = ["-m", "loadtest.demo", msgspec.json.encode(job).decode()]
    log = Path(job.ended_file).with_suffix(".log")
    # The same order of sets in every run.
    env = child_environment(os.environ) | {"PYTHONHASHSEED": "0"}
    async with running(f"the run of {policy}", argv, log=log, env=env) as child:
        written = _Written(job, on_result)
        await _watched(child, written)
        yield Run(
            policy=policy, seed=workload.seed, results=written.results, ended=written.read_end()
        )


def _prepare(workload: Workload, plan: Plan, policy: str, out: Path, port: int) -> Job:
    """Choose the files, and remove what an earlier demo left in them."""
    name = f"{policy}-{workload.seed}"
    turns, ended = out / f"turns-{name}.jsonl", out / "logs" / f"{name}.json"
    turns.write_bytes(b"")
    ended.unlink(missing_ok=True)
    return Job(
        workload=workload,
        policy=policy,
        num_gpu_blocks=plan.num_gpu_blocks,
        port=port,
        turns_file=str(turns),
        ended_file=str(ended),
    )


async def _watched(child: Child, written: _Written) -> None:
    """Read turns as they end, until the last one.

    Raises:
        ChildDied: the process ended before that.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(child.watch(), name=f"watch {child.name}")
            while not written.read_on():  # noqa: ASYNC110 - another process writes
                await asyncio.sleep(_LOOK_S)
            watch.cancel()
    except BaseExceptionGroup as errors:
        died, _ = errors.split(ChildDied)
        if died is None:
            raise
        raise died.exceptions[0] from None


class _Written:
    """What a process has written so far."""

    __slots__ = ("_decode", "_ended", "_offset", "_on_result", "_turns", "results")

    def __init__(self, job: Job, on_result: Callable[[TurnResult], None]) -> None:
        self.results: list[TurnResult] = []
        self._turns = Path(job.turns_file)
        self._ended = Path(job.ended_file)
        self._offset = 0
        self._on_result = on_result
        self._decode = msgspec.json.Decoder(TurnResult).decode

    def read_on(self) -> bool:
        """Read the turns that are new; return whether there will be no more."""
        has_ended = self._ended.exists()  # before the turns: all are written by then
        with self._turns.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            result = self._decode(line)
            self.results.append(result)
            self._on_result(result)
        return has_ended

    def read_end(self) -> Ended:
        """Read what the process says after the last turn."""
        return msgspec.json.decode(self._ended.read_bytes(), type=Ended)
