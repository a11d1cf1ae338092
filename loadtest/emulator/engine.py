"""One rank in real time: the scheduler's steps laid on the clock.

What must live here: when steps start and end, and who is notified. What must not: what a step
contains and costs (engine_model), HTTP.

Steps follow each other on a time line of their own. A step that ends at 12.000 is followed by one
that starts at 12.000, even if the process woke at 12.0013. Only requests that had arrived by 12.000
are in it. So inexact sleeping moves answers by at most a tick, and never the schedule. Short
steps can be computed several at a time without changing their contents.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from loadtest.emulator.block_events import EventWriter
from loadtest.emulator.bounds import BETWEEN_TOKENS_S
from loadtest.emulator.events import EventPublisher
from loadtest.emulator.generation import Generation
from loadtest.emulator.pool_client import PoolClient
from loadtest.engine_model.blocks import Blocks
from loadtest.engine_model.cpu_tier import CpuTier
from loadtest.engine_model.scheduler import Request, Scheduler
from loadtest.engine_model.time_model import TimeModel
from router.kv_events.wire import KvEvent
from router.metrics.counting import Distribution

MAX_STEPS_AT_ONCE = 64
"""How many steps may be computed before other coroutines get a turn."""


class TierReads:
    """Reads of one rank from its CPU tier, in real time: one after the other.

    Args:
        s_per_token: How long they take.
    """

    def __init__(self, s_per_token: float) -> None:
        self._s_per_token = s_per_token
        self._free_s = 0.0
        self.num_under_way = 0
        self.done: Callable[[Request], None]  # set by the engine

    def num_tokens(self, request: Request) -> int:
        """Count nothing: the tier says what it has."""
        return 0

    def begin(self, request: Request, num_missing: int) -> None:
        """Read so many tokens behind the reads under way."""
        loop = asyncio.get_running_loop()
        self._free_s = max(self._free_s, loop.time()) + num_missing * self._s_per_token
        self.num_under_way += 1
        loop.call_at(self._free_s, self._end, request)

    def _end(self, request: Request) -> None:
        self.num_under_way -= 1
        self.done(request)


class Engine:
    """One data-parallel rank.

    Args:
        tick_s: Answers are delivered at most this late, so that short steps can be bundled.
        publisher: None: it publishes no events.
        pool: Its prompts are saved there. None: nowhere.
        tier: Its CPU tier; None: it has none.
        reads: From the tier.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        blocks: Blocks,
        scheduler: Scheduler,
        time_model: TimeModel,
        *,
        speed: float = 1.0,
        tick_s: float = 0.002,
        publisher: EventPublisher | None = None,
        pool: PoolClient | None = None,
        tier: CpuTier | None = None,
        reads: TierReads | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.scheduler = scheduler
        self.publisher = publisher
        self.speed = speed
        self.slowdown = 1.0  # set by the fault `slow`
        self.between_tokens_s = Distribution(BETWEEN_TOKENS_S)
        self._time_model = time_model
        self._tick_s = tick_s
        self._clock = clock
        self.pool = pool
        self._tier = tier
        self._reads = reads
        if reads is not None:
            reads.done = self._loaded
        self._writer = EventWriter(blocks)
        self._wake = asyncio.Event()

    @property
    def num_requests(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def submit(self, generation: Generation) -> None:
        """Queue a request."""
        self.scheduler.add(generation)
        self._wake.set()

    def fail_all(self) -> None:
        """Fail every request."""
        for generation in [*self.scheduler.running, *self.scheduler.waiting]:
            assert isinstance(generation, Generation)
            generation.failed = True
            self.scheduler.abort(generation)
            generation.ready.set()

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing left to compute, to save and to publish."""
        return not self._wake.is_set() and not (self._reads and self._reads.num_under_way)

    async def run(self) -> None:
        """Step until cancelled."""
        start_s = self._clock()
        num_steps = 0
        while True:
            step = self.scheduler.schedule(start_s)
            if step is None:
                arrival_s = self.scheduler.next_arrival_s()
                if arrival_s is not None and arrival_s > start_s:
                    start_s = arrival_s
                    continue
                self._publish([])  # what went to the CPU tier last
                self._wake.clear()
                await self._wake.wait()
                start_s = max(start_s, self._clock())
                num_steps = 0
                continue
            end_s = start_s + self._time_model.step_s(step.work) * self.slowdown / self.speed
            num_steps += 1
            ahead_s = end_s - self._clock()
            if ahead_s > 0.0:
                await asyncio.sleep(max(ahead_s, self._tick_s))
                num_steps = 0
            elif num_steps >= MAX_STEPS_AT_ONCE:
                await asyncio.sleep(0)
                num_steps = 0
            prefilled: list[Generation] = []
            for generation in self.scheduler.complete(step, end_s):
                assert isinstance(generation, Generation)
                if generation.num_output_tokens == 1:
                    prefilled.append(generation)
                else:
                    self.between_tokens_s.observe(generation.gaps.pop()[0])
                generation.ready.set()
            saved = await self._save(prefilled)
            self._publish(saved)
            start_s = end_s

    def _loaded(self, request: Request) -> None:
        """End a read from the CPU tier."""
        self.scheduler.loaded(request)
        self._wake.set()

    async def _save(self, prefilled: list[Generation]) -> list[KvEvent]:
        """Write prompts that were just computed to the shared pool; return its new blocks."""
        events: list[KvEvent] = []
        if self.pool is not None:
            size = self.blocks.block_size
            for generation in prefilled:
                keys = generation.keys[: generation.num_prompt_tokens // size]
                events += self._writer.saved(generation, await self.pool.put(keys))
        return events

    def _publish(self, saved: list[KvEvent]) -> None:
        events = [*self._writer.events(self.blocks.take_changes()), *saved]
        if self._tier is not None:
            events += self._writer.tier_events(self._tier.take_changes())
        if events and self.publisher is not None:
            self.publisher.publish(events, time.time())
