"""One rank in motion: the scheduler's steps laid on the clock.

What must live here: when steps start and end, and who is notified. What must not: what a step
contains (scheduler), what it costs (time_model), HTTP.

Steps follow each other on a time line of their own. A step that ends at 12.000 is followed by one
that starts at 12.000, even if the process woke at 12.0013; only requests that had arrived by then
are in it. So sleeping inexactly moves answers by at most a tick, and never the schedule, and short
steps can be computed several at a time without changing what happens in them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from loadtest.emulator.block_manager import BlockManager
from loadtest.emulator.events import EventPublisher
from loadtest.emulator.pool_client import PoolClient
from loadtest.emulator.scheduler import Request, Scheduler
from loadtest.emulator.time_model import TimeModel

MAX_STEPS_AT_ONCE = 64
"""How many steps may be computed before other coroutines get a turn."""


class Generation:
    """A request's way out: `ready` is set whenever tokens or the end have come.

    `request.num_output_tokens` says how many tokens are out; the reader keeps its own count of
    those it has passed on. Several generations may share one `ready`. `failed` says that the
    engine gave the request up (restart).
    """

    __slots__ = ("failed", "ready", "request")

    def __init__(self, request: Request, ready: asyncio.Event) -> None:
        self.request = request
        self.ready = ready
        self.failed = False


class Engine:
    """One data-parallel rank.

    Args:
        tick_s: Answers are delivered at most this late, so that short steps can be bundled.
        clock: Monotonic seconds.
    """

    __slots__ = (
        "_clock",
        "_generations",
        "_pool",
        "_tick_s",
        "_time_model",
        "_wake",
        "blocks",
        "publisher",
        "scheduler",
        "slowdown",
        "speed",
    )

    def __init__(
        self,
        blocks: BlockManager,
        scheduler: Scheduler,
        time_model: TimeModel,
        *,
        speed: float = 1.0,
        tick_s: float = 0.002,
        publisher: EventPublisher | None = None,
        pool: PoolClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.scheduler = scheduler
        self.publisher = publisher
        self.speed = speed
        self.slowdown = 1.0  # set by the fault `slow`
        self._time_model = time_model
        self._tick_s = tick_s
        self._clock = clock
        self._pool = pool
        self._wake = asyncio.Event()
        self._generations: dict[Request, Generation] = {}

    @property
    def num_requests(self) -> int:
        return len(self._generations)

    def submit(self, request: Request, ready: asyncio.Event) -> Generation:
        """Queue a request; its tokens are announced through `ready`."""
        generation = Generation(request, ready)
        self._generations[request] = generation
        self.scheduler.add(request)
        self._wake.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """Drop a request and free its blocks; harmless for a finished one."""
        if self._generations.pop(generation.request, None) is not None:
            self.scheduler.abort(generation.request)

    def fail_all(self) -> None:
        """Fail every request."""
        for generation in list(self._generations.values()):
            generation.failed = True
            self.abort(generation)
            generation.ready.set()

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing left to compute, to save and to publish."""
        return not self._wake.is_set()

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
            for request in self.scheduler.complete(step, end_s):
                self._announce(request)
            await self._save(self._pool)
            self._publish()
            start_s = end_s

    def _announce(self, request: Request) -> None:
        if request.finished:
            generation = self._generations.pop(request, None)
        else:
            generation = self._generations.get(request)
        if generation is not None:
            generation.ready.set()

    async def _save(self, pool: PoolClient | None) -> None:
        """Write the prompts that were just computed to the shared pool."""
        prefilled, self.scheduler.prefilled = self.scheduler.prefilled, []
        if pool is None:
            return
        for sequence in prefilled:
            digests = sequence.digests[: sequence.num_prompt_blocks]
            for position in await pool.put(digests):
                self.blocks.note_pooled(sequence, position)

    def _publish(self) -> None:
        events = self.blocks.take_events()
        if events and self.publisher is not None:
            self.publisher.publish(events, time.time())
