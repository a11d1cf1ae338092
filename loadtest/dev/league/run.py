"""One router before one cell's replicas, for one seed: sent, watched, summed up.

A replica with nothing to do, and with free blocks for the first prompt that waits in our queue for
room, is a fault. Blocks of conversations that run or pause there are not free; no prompt passes the
first; and a turn whose conversation has room waits for its own replica. The router's own state is
read once a second. Two readings in a row count as one such second, because a prompt that was just
released, or has just come, is none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from enum import IntEnum
from math import inf
from pathlib import Path
from typing import Any, Final

import httpx
from msgspec import Struct
from msgspec.structs import replace

from loadtest.dev.league.cell import Cell
from loadtest.dev.league.replicas import Replicas
from loadtest.dev.league.routers import SESSION_HEADER, Front, Router, in_front
from loadtest.dev.league.spoken import Spoken
from loadtest.results import TurnResult
from loadtest.runner import ReplayOptions, replay
from loadtest.simulator import PoolSetup, Setup, TierSetup, simulate
from loadtest.simulator.arms import arm_of
from loadtest.steady import Steady, steady
from loadtest.workload import Workload
from router.config.tls import system_tls
from router.scheduling.waiting import QueueRules

_SILENCE_S: Final = 60.0 + QueueRules().max_wait_s  # a client has to wait for longer than that
_LOOK_S: Final = 1.0
_NEVER_EVICTS: Final = 100  # caches of a simulated replica that never evicts
_POOL_SPEED: Final = 20.0  # of simulated replicas: over computing
_EVENT_LAG_S: Final = 0.01


class LeagueRun(Struct, frozen=True, kw_only=True):
    """What one run found.

    `idle_s`: a prompt waited in our queue, and a replica was idle. `wasted_s`: it had free blocks
    for the first one, too.
    """

    router: str
    cell: Cell
    seed: int
    round: int = 0
    num_live: int
    steady: Steady
    idle_s: float | None = None  # None: it was not watched
    wasted_s: float | None = None


async def run(
    router: Router,
    cell: Cell,
    seed: int,
    replicas: Replicas,
    *,
    folder: Path,
    log_dir: Path,
    on_result: Callable[[TurnResult], None] = lambda _: None,
) -> LeagueRun:
    """Send a cell's traffic through a fresh router to cold caches.

    Raises:
        ChildDied: the router or a replica did not start.
        TargetError: the router does not answer.
    """
    workload = cell.workload(seed)
    options = ReplayOptions(
        label=router.name,
        loop=cell.loop,
        session_header=None if router.is_ours else SESSION_HEADER,
        timeout_s=_SILENCE_S,
        stop_after_s=cell.span_s,
    )
    async with (
        replicas.cold() as cold,
        in_front(
            router,
            cold,
            flags=replicas.flags,
            block_size=cell.block_size,
            folder=folder,
            log_dir=log_dir,
        ) as front,
        _watched(front, cell) as watch,
    ):
        sent = await replay(
            workload, front.url, options=options, prompts=Spoken(workload, seed),
            on_result=on_result,
        )  # fmt: skip
    if not sent.info.is_complete:
        raise RuntimeError(f"{router.name}: {sent.info.note}")
    made = _summed(router.name, cell, seed, workload, sent.turns)
    if not router.is_ours:
        return made
    return replace(made, idle_s=_LOOK_S * watch.num_idle, wasted_s=_LOOK_S * watch.num_wasted)


def simulated(router: Router, cell: Cell, seed: int) -> LeagueRun:
    """Run the same in the simulator; only routers of ours.

    Raises:
        ValueError: another router, or an unknown engine.
    """
    if not router.is_ours:
        raise ValueError(f"{router.name} cannot be simulated: name policies of warmroute")
    arm = arm_of(router.name)
    workload = cell.workload(seed)
    num_blocks = max(1, cell.num_blocks * cell.block_size // workload.block_size)
    tier = round(cell.tier * num_blocks)
    setup = Setup(
        num_replicas=cell.num_replicas,
        num_blocks=num_blocks * (_NEVER_EVICTS if router.is_unlimited else 1),
        engine=cell.preset,
        pool=PoolSetup(speed=_POOL_SPEED) if cell.has_pool else None,
        tier=TierSetup(num_blocks=tier) if tier else None,
        load=None,
        loop=cell.loop,
        stop_s=cell.span_s,
        event_lag_s=_EVENT_LAG_S,
        queue=arm.queue_rules(),
        seed=seed,
    )
    found = simulate(workload, arm.make_policy(), setup, label=router.name)
    return _summed(router.name, cell, seed, workload, found.run.turns)


def _summed(
    name: str, cell: Cell, seed: int, workload: Workload, turns: tuple[TurnResult, ...]
) -> LeagueRun:
    return LeagueRun(
        router=name,
        cell=cell,
        seed=seed,
        num_live=0 if cell.kind == "chats" else cell.live,
        steady=steady(turns, workload, cell.warm_up_s, cell.span_s),
    )


class Waste(IntEnum):
    """How a prompt waits in our queue."""

    NONE = 0
    IDLE = 1  # beside a replica that has no request
    ROOM = 2  # and free blocks for the first that waits for room


class _Watch:
    """Counts the readings in which a prompt waited beside an idle replica."""

    __slots__ = ("_before", "_num_tokens", "num_idle", "num_wasted")

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._before = Waste.NONE
        self.num_idle = 0
        self.num_wasted = 0

    def look(self, state: dict[str, Any]) -> None:
        """Take one reading of the router's state."""
        now = waste(state, self._num_tokens)
        both = min(now, self._before)
        self.num_idle += both >= Waste.IDLE
        self.num_wasted += both >= Waste.ROOM
        self._before = now


def waste(state: dict[str, Any], num_tokens: int) -> Waste:
    """Judge one reading of the router's state, with the size of a replica's cache."""
    queue = state["queue"]
    rows = state["replicas"]["shown"]
    idle = [row for row in rows if row["state"] == "up" and not row["num_requests"]]
    if not queue["waiting"] or not idle:
        return Waste.NONE
    num_free = num_tokens - min(queue["held_tokens"].get(row["id"], 0) for row in idle)
    first = [e["tokens"] for e in queue["shown"] if e["for"] == "room" and not e["before"]]
    return Waste.ROOM if min(first, default=inf) <= num_free else Waste.IDLE


@contextlib.asynccontextmanager
async def _watched(front: Front, cell: Cell) -> AsyncIterator[_Watch]:
    """Watch a router of ours, as long as the context lasts; others show nothing."""
    watch = _Watch(cell.num_blocks * cell.block_size)
    if front.admin_url is None or front.token_file is None:
        yield watch
        return
    token = front.token_file.read_text().strip()
    async with httpx.AsyncClient(
        base_url=front.admin_url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=10.0,
        trust_env=False,
        verify=system_tls(),
    ) as client:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_look(client, watch), name="league watch")
            yield watch
            task.cancel()


async def _look(client: httpx.AsyncClient, watch: _Watch) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        with contextlib.suppress(httpx.HTTPError):
            watch.look((await client.get("/admin/state")).raise_for_status().json())
