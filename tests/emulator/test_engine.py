"""Steps lie on the clock where the time model puts them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from loadtest.emulator.engine import Engine
from loadtest.emulator.generation import Generation
from loadtest.engine_model.blocks import Blocks
from loadtest.engine_model.scheduler import Scheduler
from loadtest.engine_model.time_model import TimeModel


@asynccontextmanager
async def running(
    time_model: TimeModel, speed: float = 1.0, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Engine]:
    blocks = Blocks(64, 4)
    scheduler = Scheduler(blocks, max_num_batched_tokens=10, max_num_seqs=8)
    engine = Engine(blocks, scheduler, time_model, speed=speed, clock=clock)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(engine.run())
        yield engine
        task.cancel()


def submit(
    engine: Engine, num_tokens: int, num_reply: int, arrival_s: float | None = None
) -> Generation:
    generation = Generation(
        list(range(num_tokens + num_reply)),
        [b"%08d" % i for i in range(num_tokens // 4)],
        num_tokens,
        asyncio.Event(),
        arrival_s=time.monotonic() if arrival_s is None else arrival_s,
    )
    engine.submit(generation)
    return generation


async def finished(generation: Generation) -> None:
    while not (generation.finished or generation.failed):
        generation.ready.clear()
        await generation.ready.wait()


async def test_the_first_token_comes_when_the_model_says_however_late_the_process_wakes() -> None:
    """25 tokens in chunks of 10 take three steps, on the engine's own time line."""
    model = TimeModel(base_ms=1.0, ms_per_prefill_token=0.1)
    readings = itertools.chain([100.0], itertools.repeat(107.0))  # seven seconds late, once begun
    async with running(model, speed=2.0, clock=lambda: next(readings)) as engine:
        generation = submit(engine, 25, 1, arrival_s=100.0)
        await finished(generation)

        assert generation.first_token_s is not None
        took_s = generation.first_token_s - generation.arrival_s
        assert took_s == pytest.approx((3 * 1.0 + 2.5) * 1e-3 / 2, abs=1e-9)
        assert engine.num_requests == 0


async def test_steps_without_duration_still_let_others_run() -> None:
    """A zero time model answers long replies at once, and more than one of them."""
    async with running(TimeModel()) as engine:
        generations = [submit(engine, 5, 200) for _ in range(3)]
        for generation in generations:
            await finished(generation)

        assert [g.num_output_tokens for g in generations] == [200] * 3
        assert engine.scheduler.stats.num_steps >= 200


async def test_failing_and_aborting_end_requests_at_once() -> None:
    """Failed readers get an error, aborted ones are gone; blocks come back; the engine goes on."""
    async with running(TimeModel(base_ms=1e6)) as engine:
        aborted, failed = submit(engine, 5, 5), submit(engine, 5, 5)
        await asyncio.sleep(0)

        engine.scheduler.abort(aborted)
        engine.fail_all()

        assert failed.failed
        assert failed.ready.is_set()
        assert engine.num_requests == 0
        assert engine.blocks.usage == 0.0
