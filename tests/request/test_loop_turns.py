"""Work of requests is spread over turns of the loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from router.base import loop_turns as module
from router.base.loop_turns import Turns
from router.request import queue as queue_module
from tests.faults.stage import Engines, Stage, chat, on_stage, words


class Loop:
    """Counts turns of the loop; its clock moves by the work that is done."""

    def __init__(self) -> None:
        self.turn = 0
        self.now_s = 0.0
        self._is_over = False

    async def __aenter__(self) -> Loop:
        self._next()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True

    def _next(self) -> None:
        self.turn += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._next)


async def test_work_that_is_ready_at_once_is_spread() -> None:
    """Hardly more than 10 ms of it in a turn, in the order in which it came."""
    turns, done = Turns(), []
    in_turn: Counter[int] = Counter()
    async with Loop() as loop:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "perf_counter", lambda: loop.now_s)

            async def work(number: int, work_s: float) -> None:
                await turns.take()
                loop.now_s += work_s
                in_turn[loop.turn] += round(1e3 * work_s)
                done.append(number)

            async with asyncio.TaskGroup() as tg:
                for number in range(300):
                    tg.create_task(work(number, 0.001 if number < 200 else 0.004))

    assert done == list(range(300))
    assert max(in_turn.values()) <= 30  # ms, where the pieces grow; else 12
    assert len(in_turn) <= 2 * 600 / 10  # and the time of a turn is used
    assert turns.num_waiting == 0


async def test_a_single_request_waits_for_nothing() -> None:
    """It goes on in the same turn, however many pieces its work has."""
    turns = Turns()
    async with Loop() as loop:
        before = loop.turn
        for _ in range(5):
            await turns.take()
        assert loop.turn == before


async def test_who_leaves_takes_no_turn() -> None:
    """Those behind go on."""
    turns = Turns(turn_s=0.0)
    await turns.take()
    tasks = [asyncio.create_task(turns.take()) for _ in range(5)]  # noqa: TID251  # cancelled one by one
    await asyncio.sleep(0)
    for task in tasks[:4]:
        task.cancel()
    async with asyncio.timeout(30):
        await tasks[4]

    assert turns.num_waiting == 0


def _counted(loop: Loop, patch: pytest.MonkeyPatch, owner: Any, name: str) -> Counter[int]:
    """Count the calls of a method by turn of the loop."""
    in_turn: Counter[int] = Counter()
    called: Callable[..., Any] = getattr(owner, name)

    def count(*args: Any, **named: Any) -> Any:
        in_turn[loop.turn] += 1
        return called(*args, **named)

    patch.setattr(owner, name, count)
    return in_turn


async def _flood(stage: Stage, number: int) -> None:
    replies = await asyncio.gather(*(stage.ask(chat(words(i, 3_000))) for i in range(number)))
    assert {reply.status for reply in replies} == {200}


@pytest.mark.parametrize("queue", ["on", "off"])
async def test_a_flood_is_read_placed_and_ended_one_by_one(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time in a turn it still goes on: a request or two at each step in each turn."""
    monkeypatch.setattr(module, "TURN_S", 0.0)
    monkeypatch.setattr(Turns.__init__, "__defaults__", (0.0,))
    monkeypatch.setattr(queue_module, "TURN_S", 0.0)
    monkeypatch.setattr(queue_module, "LOOK_S", 3_600.0)  # what is due by time comes beside it
    async with Engines(2) as engines, on_stage(*engines, queue__mode=queue) as stage:
        steps = stage.router.story.steps
        async with Loop() as loop:
            read = _counted(loop, monkeypatch, type(steps.reader), "_understood")
            placed = _counted(loop, monkeypatch, type(steps.place), "commit")
            ended = _counted(loop, monkeypatch, type(steps.recorder), "finished")
            await _flood(stage, 40)

    for in_turn in (read, placed, ended):
        assert in_turn.total() == 40
        assert max(in_turn.values()) <= 2
