"""Questions to the master about blocks, asked for all requests together.

Many requests want the same blocks: agents share system prompts, sub-agents whole contexts. So a
block is asked for once, however many requests wait for it. While questions are under way, new
blocks gather for the next one.

No request waits longer than its own deadline. A late answer helps the next request. After late
answers and failures no request waits for a while, then one at a time does, until as many answers
came in time. The cause of a late answer does not matter. On an overloaded loop, too, each wait
takes several times its deadline (measured with 16 requests in flight: 134 ms instead of 25).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Final

from router.base.backoff import Suspension
from router.base.contracts import BlockKey
from router.base.errors import PoolError, PoolGone, PoolLate
from router.metrics import Metrics
from router.pool.catalog import PoolCatalog
from router.pool.master import MasterApi, Place

MAX_OBJECTS: Final = 512
"""In one question."""

_NUM_AT_ONCE: Final = 4  # questions under way
_MAX_WAITING: Final = 8  # requests; others use the directory as it is
_PATIENCE: Final = 4  # deadlines; then a question is given up
_PAUSE_S: Final = (0.25, 15.0)  # without questions after failures, doubled with each
_MAX_FAILURES: Final = 8

_Asked = tuple[str, BlockKey]  # base model, block


class Question:
    """Blocks that one question to the master is about."""

    __slots__ = ("done", "error", "is_blamed", "num_objects", "objects")

    def __init__(self) -> None:
        self.objects: dict[_Asked, Sequence[str]] = {}
        self.num_objects = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: PoolError | None = None
        self.is_blamed = False  # its failure was counted


class Questions:
    """Asks the master, and records its answers in the directories.

    Args:
        timeout_s: After it an answer is late.
        max_objects: In one question.
        name: The pool's; "" is the only one.
    """

    def __init__(
        self,
        pool: PoolCatalog,
        api: MasterApi,
        *,
        timeout_s: float,
        max_objects: int = MAX_OBJECTS,
        metrics: Metrics,
        name: str = "",
    ) -> None:
        self._pool = pool
        self._api = api
        self.max_objects = max_objects
        self._timeout_s = timeout_s
        self._failures = partial(metrics.pool_failures.labels, name)
        self._gathered: deque[Question] = deque()
        self._under_way: dict[_Asked, Question] = {}  # gathered questions included
        self._wanted = asyncio.Event()
        self._num_waiting = 0  # requests
        self._num_failures = 0  # less the answers that came in time
        self._pause = Suspension(*_PAUSE_S)

    def can_ask(self, now_s: float) -> bool:
        """Return whether a request may wait for an answer now."""
        if self._num_failures:
            return not self._pause.is_on(now_s) and not self._under_way
        return self._num_waiting < _MAX_WAITING

    def ask(self, model: str, names: Mapping[BlockKey, Sequence[str]]) -> set[Question]:
        """Ask for blocks by the names of their objects; return the questions to wait for.

        A block that is being asked for is not asked for again.
        """
        questions: set[Question] = set()
        for key, objects in names.items():
            question = self._under_way.get((model, key))
            if question is None:
                question = self._with_room_for(len(objects))
                question.objects[model, key] = objects
                question.num_objects += len(objects)
                self._under_way[model, key] = question
            questions.add(question)
        self._wanted.set()
        return questions

    async def wait(self, questions: set[Question], deadline_s: float) -> None:
        """Wait until the answers are in the directories, at most until a deadline.

        Raises:
            PoolError: one of the questions failed, or is not answered yet.
        """
        left_s = deadline_s - monotonic()
        if left_s > 0.0 and questions:
            self._num_waiting += 1
            try:
                await asyncio.wait([question.done for question in questions], timeout=left_s)
            finally:
                self._num_waiting -= 1
        late = PoolLate("no answer in time")
        if monotonic() > deadline_s:
            for question in questions:
                self._blame(question, late)
        for question in questions:
            if not question.done.done():
                raise late
            if question.error is not None:
                raise question.error
        if monotonic() <= deadline_s:
            self._num_failures = max(0, self._num_failures - 1)
            if not self._num_failures:
                self._pause.reset()

    async def run(self) -> None:
        """Ask the gathered questions, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tg:
                for _ in range(_NUM_AT_ONCE):
                    tg.create_task(self._ask_on(), name="pool questions")
        finally:  # requests must not wait for answers that will not come
            self._gathered.clear()
            for question in set(self._under_way.values()):
                self._end(question, PoolLate("not asked"))

    # ---------------------------------------------------------------- inside

    def _with_room_for(self, num_objects: int) -> Question:
        last = self._gathered[-1] if self._gathered else None
        if last is None or last.num_objects + num_objects > self.max_objects:
            last = Question()
            self._gathered.append(last)
        return last

    async def _ask_on(self) -> None:
        while True:
            await self._wanted.wait()
            if not self._gathered:
                self._wanted.clear()
                continue
            question = self._gathered.popleft()
            self._end(question, await self._ask(question))

    async def _ask(self, question: Question) -> PoolError | None:
        """Ask one question and record the answer; return the error, if there was one."""
        names = [name for objects in question.objects.values() for name in objects]
        try:
            found = await self._api.places(names, timeout_s=_PATIENCE * self._timeout_s)
        except PoolError as exc:
            self._blame(question, exc)
            return exc
        self._learn(question, found)
        return None

    def _learn(self, question: Question, places: Mapping[str, Place]) -> None:
        found: dict[str, tuple[list[BlockKey], list[BlockKey], list[BlockKey]]] = {}
        for (model, key), objects in question.objects.items():
            present, missing, on_disk = found.setdefault(model, ([], [], []))
            answers = [places.get(name) for name in objects]
            if "nowhere" in answers:
                missing.append(key)
            elif None not in answers:
                (on_disk if "disk" in answers else present).append(key)
        for model, (present, missing, on_disk) in found.items():
            self._pool.verified(model, present, missing, on_disk)

    def _blame(self, question: Question, error: PoolError) -> None:
        """Count a question that failed, once; the pool of a master that is gone is lost."""
        if question.is_blamed:
            return
        question.is_blamed = True
        self._failures(error.code).inc()
        self._num_failures = min(_MAX_FAILURES, self._num_failures + 1)
        if self._num_failures > 1:  # one late answer is no reason to go blind
            self._pause.begin(monotonic())
        if isinstance(error, PoolGone):
            self._pool.lost(error.message)

    def _end(self, question: Question, error: PoolError | None) -> None:
        """End a question: the requests that wait for it go on."""
        for asked in question.objects:
            self._under_way.pop(asked, None)
        question.error = error
        if not question.done.done():
            question.done.set_result(None)
