"""router.pool.questions: requests share questions to a master, and wait for bounded times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest

from router.base.contracts import BlockKey
from router.base.errors import PoolError, PoolGone, PoolLate
from router.metrics import Metrics
from router.pool.catalog import PoolCatalog
from router.pool.master import MasterApi, Place
from router.pool.questions import Questions
from tests.waiting import until

LATER_S = 1000.0


class ScriptedMaster:
    """Answers when `answers` is set; `asked` has every question."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.missing: set[str] = set()
        self.error: PoolError | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def places(self, keys: Sequence[str], *, timeout_s: float) -> dict[str, Place]:
        self.asked.append(list(keys))
        try:
            async with asyncio.timeout(timeout_s):
                await self.answers.wait()
        except TimeoutError as exc:
            raise PoolLate("no answer in time") from exc
        if self.error is not None:
            raise self.error
        return {key: "nowhere" if key in self.missing else "memory" for key in keys}


class Asked:
    """Questions, their master, and the pool's catalog."""

    def __init__(self, master: ScriptedMaster, *, timeout_s: float) -> None:
        self.master = master
        self.pool = PoolCatalog()
        self.pool.found()
        self.questions = Questions(
            self.pool,
            cast(MasterApi, master),
            max_objects=8,
            timeout_s=timeout_s,
            metrics=Metrics(),
        )
        self.timeout_s = timeout_s

    async def ask(self, *blocks: int) -> None:
        """Ask as a request does: for blocks, and with a deadline."""
        deadline_s = time.monotonic() + self.timeout_s
        names = {BlockKey(block): [f"o{block}"] for block in blocks}
        await self.questions.wait(self.questions.ask("m", names), deadline_s)

    def can_ask(self, after_s: float = 0.0) -> bool:
        return self.questions.can_ask(time.monotonic() + after_s)


@asynccontextmanager
async def running(*, timeout_s: float = 60.0) -> AsyncIterator[Asked]:
    asked = Asked(ScriptedMaster(), timeout_s=timeout_s)
    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(asked.questions.run())
        yield asked
        task.cancel()


async def test_a_block_is_asked_for_once_however_many_requests_wait() -> None:
    async with running() as asked:
        asked.master.answers.clear()
        asked.master.missing = {"o3"}
        async with asyncio.TaskGroup() as tg:
            for blocks in ((1, 2), (1, 2, 3), (2, 3), (1, 2, 3, 4)):
                tg.create_task(asked.ask(*blocks))
            await asyncio.sleep(0)
            asked.master.answers.set()

        assert sorted(key for keys in asked.master.asked for key in keys) == [
            "o1",
            "o2",
            "o3",
            "o4",
        ]
        directory = asked.pool.directory("m")
        assert [BlockKey(block) in directory for block in (1, 2, 3, 4)] == [True, True, False, True]


async def test_a_question_has_a_bounded_number_of_objects() -> None:
    async with running() as asked:
        await asked.ask(*range(30))

        assert [len(keys) for keys in asked.master.asked] == [8, 8, 8, 6]


async def test_few_requests_wait_for_a_late_master() -> None:
    """Of fifty at once eight wait, until their deadline. Then none waits, then one at a time."""
    async with running(timeout_s=0.02) as asked:
        asked.master.answers.clear()
        waited_s: list[float] = []

        async def request(block: int) -> None:
            if not asked.can_ask():
                return
            began_s = time.monotonic()
            with pytest.raises(PoolLate):
                await asked.ask(block)
            waited_s.append(time.monotonic() - began_s)

        async with asyncio.TaskGroup() as tg:
            for block in range(50):
                tg.create_task(request(block))
        assert len(waited_s) == 8
        assert max(waited_s) < 5.0  # a busy machine's 0.02

        while asked.can_ask(LATER_S) is False or asked.can_ask():
            await until(lambda: not asked.questions._under_way)
            if asked.can_ask():
                with pytest.raises(PoolLate):
                    await asked.ask(50)
        assert not asked.can_ask()
        asked.master.answers.set()
        num_alone = 0
        while not (asked.can_ask(LATER_S) and asked.can_ask()):
            one = asyncio.ensure_future(asked.ask(60 + num_alone))  # noqa: TID251
            await asyncio.sleep(0)
            assert not asked.can_ask(LATER_S)
            await one
            num_alone += 1
        assert 1 <= num_alone <= 8


async def test_few_requests_wait_on_an_overloaded_loop() -> None:
    """Every turn of the loop takes longer than a deadline."""
    async with running(timeout_s=0.01) as asked:
        num_waited = 0

        async def request(block: int) -> None:
            nonlocal num_waited
            time.sleep(0.004)  # noqa: ASYNC251  # what a request computes
            if asked.can_ask():
                num_waited += 1
                with suppress(PoolLate):
                    await asked.ask(block)

        for wave in range(4):
            async with asyncio.TaskGroup() as tg:
                for number in range(25):
                    tg.create_task(request(100 * wave + number))

        assert num_waited <= 10


async def test_a_late_answer_is_recorded_for_the_next_request() -> None:
    async with running(timeout_s=0.05) as asked:
        asked.master.answers.clear()
        with pytest.raises(PoolLate):
            await asked.ask(1)
        asked.master.answers.set()
        await until(lambda: BlockKey(1) in asked.pool.directory("m"))


async def test_the_pool_of_a_master_that_is_gone_is_lost() -> None:
    async with running() as asked:
        asked.master.error = PoolGone("nothing listens")
        with pytest.raises(PoolGone):
            await asked.ask(1)

        assert not asked.pool.is_up


async def test_no_request_waits_after_the_end() -> None:
    asked = Asked(ScriptedMaster(), timeout_s=60.0)
    asked.master.answers.clear()

    async def late() -> None:
        with pytest.raises(PoolLate):
            await asked.ask(*range(80))

    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(asked.questions.run())
        tg.create_task(late())
        await until(lambda: bool(asked.master.asked))
        task.cancel()


async def test_a_master_that_fails_at_once_is_left_alone_for_a_while() -> None:
    async with running() as asked:
        asked.master.error = PoolError("refused")
        for block in range(2):
            with pytest.raises(PoolError):
                await asked.ask(block)

        assert not asked.can_ask()
        assert asked.can_ask(LATER_S)
