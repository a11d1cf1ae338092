"""One policy, from cold caches to the last turn: drive it, ask the replicas, end it.

What is measured comes from outside the router: first-token times from the driver, cached tokens
from the engines' `usage`, load and computed tokens from the engines' `/metrics`. Of the router
only its own claims are kept: what it predicted, and how well it says it knows the caches.
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from msgspec import Struct

from loadtest.demo.workload import NUM_REPLICAS, SESSION_HEADER, Plan, Workload
from loadtest.results import TurnResult
from loadtest.runner.children import Child, ChildDied
from loadtest.runner.display import Display
from loadtest.runner.sessions import drive
from loadtest.runner.stack import Stack, start
from loadtest.runner.tally import ReplicaLoad, Tally
from router.tls import system_tls

SAMPLE_S: Final = 0.5
_LAG_S: Final = 0.05
_TIMEOUT_S: Final = 60.0  # longest silence of an answer
_STATE: Final = re.compile(r'^warmroute_replica_state\{replica="([^"]+)",state="(\w+)"\} 1', re.M)


class Sample(Struct, frozen=True, kw_only=True):
    """The replicas at one moment, `at_s` from the first turn."""

    at_s: float
    loads: tuple[ReplicaLoad, ...]


class Run(Struct, frozen=True, kw_only=True):
    """What one policy did.

    `cache_views` is the router's own word on how it knows each replica's cache (exact, degraded,
    blind); `driver_lag_p99_s` how late the driver's own timers were: what this machine was too
    busy for. `cpu_s` is processor time per process, None where the system does not report it.
    """

    policy: str
    seed: int
    results: list[TurnResult]
    samples: list[Sample]
    cache_views: dict[str, str]
    driver_lag_p99_s: float
    start_up_s: float
    elapsed_s: float
    cpu_s: dict[str, float | None]


@asynccontextmanager
async def run(
    workload: Workload,
    plan: Plan,
    policy: str,
    log_dir: Path,
    *,
    port: int = 0,
    display: Display,
) -> AsyncIterator[tuple[Run, Stack]]:
    """Play all sessions through a fresh router; processes end with the context.

    Args:
        log_dir: Exists; gets one log per process.
        port: The router's; 0: any free one.
        display: Shown newer figures after every turn and every sample.

    Raises:
        ChildDied: a process did not start, or ended before its time.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    display.starting(policy)
    flags = workload.replica_flags(plan.num_gpu_blocks)
    async with (
        start(flags, NUM_REPLICAS, policy, log_dir, port=port) as stack,
        httpx.AsyncClient(timeout=5.0, trust_env=False, verify=system_tls()) as client,
    ):
        begin_s = loop.time()
        tally = Tally(policy, plan.num_turns)
        tally.loads = (ReplicaLoad(),) * NUM_REPLICAS
        children = (*stack.replicas, stack.router)
        cpu_before = _cpu_s(children)
        probe = _Probe(client, stack, tally, display)

        def on_result(result: TurnResult) -> None:
            tally.add(result)
            tally.elapsed_s = loop.time() - begin_s
            display.update(tally)

        results = await _watched(
            children,
            probe,
            begin_s,
            drive(
                stack.router_url,
                workload.sessions(),
                concurrency=workload.num_sessions,
                session_header=SESSION_HEADER,
                timeout_s=_TIMEOUT_S,
                on_result=on_result,
            ),
        )
        elapsed_s = loop.time() - begin_s
        await probe.sample(begin_s)
        display.finished(tally)
        cpu_after = _cpu_s(children)
        yield (
            Run(
                policy=policy,
                seed=workload.seed,
                results=results,
                samples=probe.samples,
                cache_views=await probe.cache_views(),
                driver_lag_p99_s=probe.lag_p99_s(),
                start_up_s=begin_s - began_s,
                elapsed_s=elapsed_s,
                cpu_s={name: _minus(used, cpu_before[name]) for name, used in cpu_after.items()},
            ),
            stack,
        )


async def _watched(
    children: tuple[Child, ...],
    probe: _Probe,
    begin_s: float,
    work: Coroutine[Any, Any, list[TurnResult]],
) -> list[TurnResult]:
    """Do the work while processes are watched and sampled.

    Raises:
        ChildDied: one ended before its time; the work was cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(child.watch(), name=f"watch {child.name}") for child in children
            ]
            beside.append(group.create_task(probe.run(begin_s), name="samples"))
            beside.append(group.create_task(probe.measure_lag(), name="lag"))
            results = await group.create_task(work, name="drive")
            for task in beside:
                task.cancel()
    except BaseExceptionGroup as errors:
        died, _ = errors.split(ChildDied)
        if died is None:
            raise
        raise died.exceptions[0] from None
    return results


class _Probe:
    """Asks the processes how they are, beside the drive."""

    __slots__ = ("_client", "_display", "_lags", "_stack", "_tally", "samples")

    def __init__(
        self,
        client: httpx.AsyncClient,
        stack: Stack,
        tally: Tally,
        display: Display,
    ) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._stack = stack
        self._tally = tally
        self._display = display
        self._lags: list[float] = []

    async def run(self, begin_s: float) -> None:
        while True:
            await self.sample(begin_s)
            await asyncio.sleep(SAMPLE_S)

    async def sample(self, begin_s: float) -> None:
        """Read every replica's load; keep the last of one that does not answer."""
        loads: list[ReplicaLoad] = []
        for number, url in enumerate(self._stack.replica_urls):
            try:
                response = await self._client.get(f"{url}/metrics")
                loads.append(parse_load(response.text))
            except httpx.HTTPError:
                loads.append(self._tally.loads[number])
        now_s = asyncio.get_running_loop().time()
        self._tally.loads = tuple(loads)
        self._tally.elapsed_s = now_s - begin_s
        self.samples.append(Sample(at_s=now_s - begin_s, loads=tuple(loads)))
        self._display.update(self._tally)

    async def measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self._lags.append(max(0.0, loop.time() - due_s))

    def lag_p99_s(self) -> float:
        if not self._lags:
            return 0.0
        return sorted(self._lags)[int(0.99 * (len(self._lags) - 1))]

    async def cache_views(self) -> dict[str, str]:
        """Ask the router how well it knows each replica's cache; empty if it does not answer."""
        try:
            page = (await self._client.get(f"{self._stack.router_url}/metrics")).text
        except httpx.HTTPError:
            return {}
        return {match[1]: match[2] for match in _STATE.finditer(page)}


def parse_load(page: str) -> ReplicaLoad:
    """Read a vLLM `/metrics` page; what is missing counts as 0."""
    return ReplicaLoad(
        num_running=_total(page, "vllm:num_requests_running"),
        num_waiting=_total(page, "vllm:num_requests_waiting"),
        num_prompt_tokens=_total(page, "vllm:prefix_cache_queries_total"),
        num_cached_tokens=_total(page, "vllm:prefix_cache_hits_total"),
    )


def _total(page: str, name: str) -> int:
    """Sum a metric over its labels."""
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def _cpu_s(children: tuple[Child, ...]) -> dict[str, float | None]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    used: dict[str, float | None] = {child.name: child.cpu_s() for child in children}
    return used | {"driver": own.ru_utime + own.ru_stime}


def _minus(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else round(after - before, 2)
