"""What a large fleet costs a router and Redis: emulated replicas, real routers, a real Redis.

    python -m loadtest.studies.scale --replicas 8 16 32 64

For every size a fleet in one process (`scale_fleet`), a Redis and `--routers` that share it. They
stand idle, then agents' sessions are sent to the first router alone: what the others use
meanwhile, in the mean, is what a request costs every router that it does not come to. `--slowness
10`: they look at each replica a tenth as often. `--no-redis`: one router, without Redis. CPU time
and memory are the processes' own, so a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
import msgspec
import uvloop
from msgspec import Struct

from loadtest.bench.bench_redis import redis_server
from loadtest.generated import Agents
from loadtest.machine import this_machine
from loadtest.markdown import table
from loadtest.results import TurnResult, percentile
from loadtest.runner import ReplayOptions, replay
from loadtest.runner.children import Child, running
from loadtest.runner.stack import child_environment, greet, start_router
from loadtest.studies.scale_costs import Cost, Held, Use
from router.config import HealthConfig

SIZES: Final = (8, 16, 32, 64)
_FLEET_UP: Final = re.compile(r'^(\{"urls":.*\})$', re.MULTILINE)
_FLEET_START_S: Final = 180.0
_SETTLE_S: Final = 3.0  # for what comes late after a start, and after the last request
_IN_FLIGHT: Final = 16
_BLOCK_SIZE: Final = 16
_MB: Final = 1e6


class Setting(Struct, frozen=True, kw_only=True):
    """How much to do."""

    num_sessions: int = 100
    num_turns: int = 4  # median
    scale_tokens: float = 0.2
    idle_s: float = 20.0
    has_redis: bool = True
    num_routers: int = 2  # with Redis
    slowness: float = 1.0  # times the default intervals of probes and of readings of load


class Measured(Struct, frozen=True, kw_only=True):
    """One size of the fleet."""

    num_replicas: int
    turns: tuple[TurnResult, ...]
    routers: list[Cost]  # the first gets the requests
    redis: Cost | None
    held: Held | None
    fleet: Cost


async def measure(num_replicas: int, setting: Setting) -> Measured:
    """Measure one size.

    Raises:
        ChildDied: a process of ours did.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet, urls = await stack.enter_async_context(_fleet(num_replicas, folder))
        store = stack.enter_context(redis_server(folder)) if setting.has_redis else None
        flags: list[str] = []
        if store is not None:
            port = store.connection_pool.connection_kwargs["port"]
            flags = ["--redis", f"redis://127.0.0.1:{port}/0"]
        health = HealthConfig()
        flags += ["--health-interval-s", f"{setting.slowness * health.interval_s:g}"]
        flags += ["--health-load-interval-s", f"{setting.slowness * health.load_interval_s:g}"]
        routers = []
        for number in range(1 if store is None else setting.num_routers):
            log_dir = folder / f"router-{number + 1}"
            log_dir.mkdir()
            routers.append(await stack.enter_async_context(start_router(urls, flags, log_dir)))
        pids = [fleet.pid, *(router.child.pid for router in routers)]

        def uses() -> list[Use]:
            found = [Use.of_process(pid) for pid in pids]
            return found if store is None else [*found, Use.of_redis(store)]

        now_s = asyncio.get_running_loop().time
        await asyncio.sleep(_SETTLE_S)
        begun, begun_s = uses(), now_s()
        await asyncio.sleep(setting.idle_s)
        idle, idle_s = uses(), now_s()
        turns = await _send(routers[0].url, setting)
        await asyncio.sleep(_SETTLE_S)
        loaded, loaded_s = uses(), now_s()
        costs = [
            Cost.between(three, idle_s - begun_s, loaded_s - idle_s)
            for three in zip(begun, idle, loaded, strict=True)
        ]
        return Measured(
            num_replicas=num_replicas,
            turns=turns,
            routers=costs[1 : 1 + len(routers)],
            redis=None if store is None else costs[-1],
            held=None if store is None else Held.by(store),
            fleet=costs[0],
        )


@asynccontextmanager
async def _fleet(num_replicas: int, folder: Path) -> AsyncIterator[tuple[Child, list[str]]]:
    command = ["-m", "loadtest.studies.scale_fleet", str(num_replicas)]
    env = child_environment(os.environ)
    async with running("fleet", command, log=folder / "fleet.log", env=env) as child:
        await child.wait_announced(_FLEET_UP, _FLEET_START_S)
        announced = msgspec.json.decode(child.announced[1], type=dict[str, list[str]])
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            for url in announced["urls"]:  # its first blocks show routers how it hashes
                await greet(client, url)
        yield child, announced["urls"]


async def _send(url: str, setting: Setting) -> tuple[TurnResult, ...]:
    """Send agents' sessions, as many at a time as are in flight, without pauses."""
    agents = Agents(
        num_sessions=setting.num_sessions,
        num_turns=setting.num_turns,
        scale_tokens=setting.scale_tokens,
        block_size=_BLOCK_SIZE,
    )
    options = ReplayOptions(
        loop="closed",
        concurrency=_IN_FLIGHT,
        scale_time=0.0,
        max_tokens=16,
        session_header="x-session-id",
    )
    return (await replay(agents.workload(), url, options=options)).turns


# -- tables --------------------------------------------------------------------------------------


def report(found: Sequence[Measured], setting: Setting) -> str:
    """Lay out what was measured as Markdown."""
    machine = this_machine()
    turns = found[0].turns
    mean = sum(turn.num_prompt_tokens or 0 for turn in turns) / len(turns)
    parts = [
        f"{len(turns):,} requests of {setting.num_sessions} sessions, {mean:,.0f} prompt tokens in "
        f"the mean, {_IN_FLIGHT} in flight, `kv_aware`; idle for {setting.idle_s:g} s before. "
        f"Routers: {len(found[0].routers)}; they look at a replica every "
        f"{setting.slowness * HealthConfig().interval_s:g} s. {machine.num_cpus} cores, "
        f"Python {machine.python}, warmroute {machine.warmroute}.",
        _router_table(found),
    ]
    if setting.has_redis:
        parts += [_sharing_table(found), _held_table(found)]
    return "\n\n".join(parts)


def _router_table(found: Sequence[Measured]) -> str:
    header = ["replicas", "used", "errors", "router idle, MB", "after, MB", "idle, % of a core",
              "CPU a request, ms", "`x-warmroute-ms` p50", "p90"]  # fmt: skip
    return table(header, [_router_row(one) for one in found])


def _router_row(one: Measured) -> list[str]:
    router = one.routers[0]
    times = sorted(turn.router_ms for turn in one.turns if turn.router_ms is not None)
    return [
        f"{one.num_replicas}",
        f"{len({turn.replica for turn in one.turns} - {None})}",
        f"{sum(turn.error is not None for turn in one.turns)}",
        f"{router.idle_bytes / _MB:.0f}",
        f"{router.loaded_bytes / _MB:.0f}",
        f"{100 * router.idle_cpu:.1f}",
        _request_ms(router, one),
        *(f"{percentile(times, share):.1f}" if times else "-" for share in (0.5, 0.9)),
    ]


def _request_ms(cost: Cost, one: Measured) -> str:
    """Write the CPU time of a request; `-` where idling varies by more."""
    return f"{1e3 * cost.loaded_cpu_s / len(one.turns):.2f}" if cost.loaded_cpu_s > 0.0 else "-"


def _sharing_table(found: Sequence[Measured]) -> str:
    header = ["replicas", "another router idle, % of a core", "its CPU a request, ms",
              "Redis idle, % of a core", "Redis CPU a request, ms"]  # fmt: skip
    rows = []
    for one in found:
        assert one.redis is not None
        costs = (Cost.mean(one.routers[1:]), one.redis)
        rows.append([f"{one.num_replicas}"])
        for cost in costs:
            rows[-1] += [f"{100 * cost.idle_cpu:.1f}", _request_ms(cost, one)]
    return table(header, rows)


def _held_table(found: Sequence[Measured]) -> str:
    header = ["replicas", "Redis idle, MB", "after, MB", "blocks", "bytes a block", "sessions",
              "bytes a session", "log, bytes a request"]  # fmt: skip
    rows = []
    for one in found:
        assert one.redis is not None
        assert one.held is not None
        held = one.held
        rows.append(
            [
                f"{one.num_replicas}",
                f"{one.redis.idle_bytes / _MB:.1f}",
                f"{one.redis.loaded_bytes / _MB:.1f}",
                f"{held.num_blocks:,}",
                f"{held.block_bytes / max(1, held.num_blocks):.0f}",
                f"{held.num_sessions:,}",
                f"{held.session_bytes / max(1, held.num_sessions):.0f}",
                f"{held.log_bytes / len(one.turns):.0f}",
            ]
        )
    return table(header, rows)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    setting = Setting()
    made = argparse.ArgumentParser(
        prog="python -m loadtest.studies.scale", description=(__doc__ or "").splitlines()[0]
    )
    made.add_argument("--replicas", type=int, nargs="+", default=SIZES)
    made.add_argument("--sessions", type=int, default=setting.num_sessions)
    made.add_argument("--routers", type=int, default=setting.num_routers)
    made.add_argument("--slowness", type=float, default=setting.slowness)
    made.add_argument("--idle", type=float, default=setting.idle_s, help="seconds")
    made.add_argument("--no-redis", action="store_true", help="one router, without Redis")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every size and print the tables."""
    given = parser().parse_args(argv)
    setting = Setting(
        num_sessions=given.sessions,
        idle_s=given.idle,
        has_redis=not given.no_redis,
        num_routers=given.routers,
        slowness=given.slowness,
    )
    found = [uvloop.run(measure(num, setting)) for num in given.replicas]
    print(report(found, setting))


if __name__ == "__main__":
    main()
