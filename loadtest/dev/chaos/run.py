"""One run: the stack, the load, the faults in time, and the evidence when it is over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from msgspec import Struct

from loadtest.dev.chaos.answers import Oracle
from loadtest.dev.chaos.faults import Injector
from loadtest.dev.chaos.ledger import Ledger
from loadtest.dev.chaos.load import Load
from loadtest.dev.chaos.plan import Fault, plan
from loadtest.dev.chaos.stack import Stack
from loadtest.dev.chaos.verdict import Evidence, engine_lines, resent
from loadtest.dev.chaos.watch import Watch

_SETTLE_S: Final = 15.0


class Options(Struct, frozen=True, kw_only=True):
    """What was asked for."""

    seed: int
    length_s: float
    num_agents: int
    every_s: float  # between faults, on average
    folder: Path


async def run(options: Options, stop: asyncio.Event) -> Evidence:
    """Run it all; `stop` ends it early, in order.

    Raises:
        RuntimeError: the stack did not start.
    """
    loop = asyncio.get_running_loop()
    ledger, oracle = Ledger(), Oracle()
    faults = plan(options.seed, options.length_s, options.every_s)
    async with (
        Stack.running(options.folder) as stack,
        Load(stack, ledger, oracle, options.seed) as load,
    ):
        injector = Injector(stack, load.send_large)
        watch = Watch(stack)
        start_s = loop.time()
        async with asyncio.TaskGroup() as tg:
            watching = tg.create_task(watch.run())
            ending = tg.create_task(_end_in_time(stop, start_s + options.length_s))
            async with asyncio.TaskGroup() as working:
                working.create_task(load.run(options.num_agents, stop.is_set))
                working.create_task(_break(injector, faults, stop, start_s))
            is_partial = not ending.done() or ending.result()
            for task in (watching, ending):
                task.cancel()
        await _settle(watch, stack)
        end_s = loop.time()
    return Evidence(
        start_s=start_s,
        end_s=end_s,
        ledger=ledger,
        time_line=injector.time_line,
        lives={name: server.lives for name, server in stack.servers.items()},
        gauges=watch.gauges,
        samples=watch.samples,
        logs=[server.log for server in stack.routers()],
        engine_lines=engine_lines(stack.request_log()),
        resent=resent(server.log for server in stack.routers()),
        is_partial=is_partial,
    )


async def _end_in_time(stop: asyncio.Event, at_s: float) -> bool:
    """Set `stop` when the time is over; True: it was set before."""
    try:
        async with asyncio.timeout_at(at_s):
            await stop.wait()
    except TimeoutError:
        stop.set()
        return False
    return True


async def _break(
    injector: Injector, faults: list[Fault], stop: asyncio.Event, start_s: float
) -> None:
    """Make each fault at its time if possible; return when all faults have ended."""
    async with asyncio.TaskGroup() as tg:
        for fault in faults:
            try:
                async with asyncio.timeout_at(start_s + fault.at_s):
                    await stop.wait()
                return
            except TimeoutError:
                if injector.can_do(fault):
                    tg.create_task(injector.do(fault))
                    await asyncio.sleep(0)  # the task adds it to the time line


async def _settle(watch: Watch, stack: Stack) -> None:
    """Wait until nothing is in flight at the routers, at most for `_SETTLE_S`."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    await asyncio.sleep(1.5)  # what ended last is counted by then
    while True:
        await watch.look()
        last = [watch.gauges.get((s.name, s.life.number)) for s in stack.routers()]
        if all(gauges is not None and not any(gauges.values()) for gauges in last):
            return
        if loop.time() > begun_s + _SETTLE_S:
            return
        await asyncio.sleep(0.5)
