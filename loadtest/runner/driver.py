"""Send a workload to a target and measure every turn.

    schedule    says which turn is due when (pure)
    sender      makes requests ahead of time, waits, and starts one task per turn that is due
    tasks       send, read the stream, report to the schedule and to the caller

How it ends:

    1  all turns are done
    2  `stop_after_s`: nothing more is sent, what is in flight is awaited; complete as asked
    3  MAX_REFUSED refused connections in a row: the target is gone; what is in flight is
       dropped, the run is partial
    4  cancelled (Ctrl-C): as 3

Times are of the monotonic clock. uvloop's own clock stands still during an iteration and counts in
milliseconds.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import aiohttp
from msgspec.structs import replace
from multidict import CIMultiDict
from yarl import URL

from loadtest.results import Run, RunInfo, TurnResult
from loadtest.runner.exchange import Exchange
from loadtest.runner.options import ReplayError, ReplayOptions
from loadtest.runner.prompts import Prompts, make_prompts
from loadtest.runner.requests import CHAT, COMPLETIONS, Ahead, Request, Requests
from loadtest.runner.schedule import Entry, Schedule, make_schedule, time_scale
from loadtest.runner.sending import make_client, send
from loadtest.runner.target import Target, base_url, look
from loadtest.workload import Turn, Workload

MAX_REFUSED: Final = 10  # connections in a row; then the target is gone
_LOOKAHEAD: Final = 32  # turns whose requests are made ahead of time


async def replay(
    workload: Workload,
    url: str,
    *,
    options: ReplayOptions,
    on_result: Callable[[TurnResult], None] | None = None,
    on_send: Callable[[Turn], None] | None = None,
    on_start: Callable[[RunInfo, Target], None] | None = None,
    prompts: Prompts | None = None,
) -> Run:
    """Send every turn of a workload to an OpenAI-compatible API and return what was measured.

    Args:
        url: Base URL of a router or an engine, with or without `/v1`.
        on_result: Called after every turn.
        on_send: Called before every turn.
        on_start: Called once, after the target was found to answer.
        prompts: Makes the turns' prompts; None: as the options say (`loadtest.text`).

    Failed turns are results. A run that was cut short is returned with `is_complete=False` and a
    note. So is a run whose task was cancelled; the cancellation ends here.

    Raises:
        TargetError: nothing was sent, for the target does not answer or lacks the model.
        ReplayError: nothing was sent, for the options do not fit the workload.
    """
    url = base_url(url)
    closed = options.loop == "closed"
    if closed and options.rate is not None:
        raise ReplayError(
            "a rate needs the open loop: in the closed one the target sets the pace (--scale-time "
            "shortens the waits, --concurrency bounds the sessions)"
        )
    scale = time_scale(workload, options.rate)
    async with _client(options) as client:
        target = await look(client, url, model=options.model, has_key=options.api_key is not None)
        if prompts is None:
            prompts = make_prompts(workload, options)
        schedule = make_schedule(
            workload, closed=closed, scale_time=scale, concurrency=options.concurrency
        )
        info = _info(workload, target, options, closed=closed, scale=scale)
        if on_start is not None:
            on_start(info, target)
        driver = _Driver(
            client,
            target,
            workload,
            schedule,
            Requests(prompts, target.model, options),
            options,
            is_open=not closed,
        )
        driver.on_send, driver.on_result = on_send, on_result
        with _quiet_collector():
            return await driver.run(info)


def _client(options: ReplayOptions) -> aiohttp.ClientSession:
    headers = CIMultiDict(options.headers)
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    return make_client(timeout_s=options.timeout_s, headers=headers)


def _info(
    workload: Workload, target: Target, options: ReplayOptions, *, closed: bool, scale: float
) -> RunInfo:
    settings: dict[str, str | int | float | bool] = {
        "model": target.model,
        "num_turns": len(workload.turns),
        "num_skipped": workload.num_skipped,
        "time_factor": scale,
        "ignore_eos": options.ignore_eos,
        "salt": options.salt,
        **options.settings,
    }
    if closed and options.concurrency is not None:
        settings["concurrency"] = options.concurrency
    return RunInfo(
        label=options.label or target.url,
        target=target.url,
        workload=workload.name,
        loop="closed" if closed else "open",
        seed=options.seed,
        started_at=time.time(),
        settings=settings,
    )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Stop the garbage collector from walking through the workload while times are taken."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _TargetGone(Exception):
    """So many connections in a row were refused."""


class _Driver:
    """One replay. `results` grow as turns are done, in that order."""

    __slots__ = ("_ahead", "_changed", "_client", "_is_open", "_loop", "_num_refused", "_num_sent",
                 "_options", "_origin_s", "_schedule", "_urls", "_workload", "on_result", "on_send",
                 "results")  # fmt: skip

    def __init__(
        self,
        client: aiohttp.ClientSession,
        target: Target,
        workload: Workload,
        schedule: Schedule,
        requests: Requests,
        options: ReplayOptions,
        *,
        is_open: bool,
    ) -> None:
        self.results: list[TurnResult] = []
        self.on_send: Callable[[Turn], None] | None = None
        self.on_result: Callable[[TurnResult], None] | None = None
        self._client = client
        self._urls = {path: URL(target.url + path, encoded=True) for path in (CHAT, COMPLETIONS)}
        self._workload = workload
        self._schedule = schedule
        self._options = options
        self._is_open = is_open
        self._ahead = Ahead(requests, workload.turns)
        self._changed = asyncio.Event()  # a turn is done, or due
        self._num_refused = 0  # connections, in a row
        self._num_sent = 0
        self._loop = asyncio.get_running_loop()
        self._origin_s = time.monotonic()

    async def run(self, info: RunInfo) -> Run:
        """Send everything; see the module's docstring for how it ends."""
        self._origin_s = time.monotonic()
        is_complete, note = True, ""
        try:
            await self._send_all()
            if self._schedule.num_left:
                note = f"stopped after {self._options.stop_after_s:g} s, as asked: {self._left()}"
        except _TargetGone as gone:
            is_complete, note = False, f"{gone}: {self._left()}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            is_complete, note = False, f"interrupted at {self._now_s():.1f} s: {self._left()}"
        return Run(
            info=replace(info, is_complete=is_complete, note=note), turns=tuple(self.results)
        )

    async def _send_all(self) -> None:
        """Send until nothing is left or `stop_after_s` has passed."""
        timer: asyncio.TimerHandle | None = None
        try:
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(self._send_due(group), name="replay sender")
                if self._options.stop_after_s is not None:
                    timer = self._loop.call_later(self._options.stop_after_s, sender.cancel)
        except BaseExceptionGroup as errors:
            gone, others = errors.split(_TargetGone)
            raise (others or gone or errors).exceptions[0] from None
        finally:
            if timer is not None:
                timer.cancel()

    async def _send_due(self, group: asyncio.TaskGroup) -> None:
        """Start a task for every turn when it is due; make requests ahead while there is time."""
        schedule = self._schedule
        while schedule.num_left:
            self._changed.clear()
            due_s = schedule.next_due()
            if due_s is None or due_s > self._now_s():
                left_s = None if due_s is None else due_s - self._now_s()
                if not await self._ahead.make_one(schedule.upcoming(_LOOKAHEAD), left_s):
                    await self._wait(due_s)
                continue
            entry = schedule.take()
            request = await self._ahead.take(entry.index)
            group.create_task(self._take_turn(entry, request), name=f"turn {entry.index}")
            await asyncio.sleep(0)  # a backlog must not keep answers from being read

    async def _wait(self, due_s: float | None) -> None:
        """Wait until a turn is done or the next one is due; None: until one is done."""
        if due_s is None:
            await self._changed.wait()
            return
        timer = self._loop.call_later(max(0.0, due_s - self._now_s()), self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _take_turn(self, entry: Entry, request: Request) -> None:
        """Send a turn and report its result."""
        turn = self._workload.turns[entry.index]
        self._num_sent += 1
        if self.on_send is not None:
            self.on_send(turn)
        result = await self._send(turn, entry, request)
        self.results.append(result)
        self._schedule.finish(entry.index, self._now_s())
        self._changed.set()
        if self.on_result is not None:
            self.on_result(result)
        self._check_gone(result)

    async def _send(self, turn: Turn, entry: Entry, request: Request) -> TurnResult:
        options = self._options
        headers = {}
        if options.session_header:
            headers[options.session_header] = turn.session_id
        start_s = self._now_s()
        exchange = Exchange(
            turn.session_id,
            turn.number,
            start_s=start_s,
            due_s=entry.due_s if self._is_open else None,
            late_s=start_s - entry.due_s,
            secret=options.api_key,
        )
        url = self._urls[request.path]
        await send(self._client, url, request.body, exchange, self._now_s, headers=headers)
        result = exchange.result(self._now_s())
        is_warm_up = entry.index < options.warm_up_turns
        return replace(result, is_warm_up=True) if is_warm_up else result

    def _check_gone(self, result: TurnResult) -> None:
        """Count refused connections in a row; any answer resets the count."""
        if result.error == "connect":
            self._num_refused += 1
        elif result.status is not None:
            self._num_refused = 0
        if self._num_refused >= MAX_REFUSED:
            raise _TargetGone(
                f"the target is gone at {self._now_s():.1f} s "
                f"({self._num_refused} connections in a row failed: {result.error_message})"
            )

    def _left(self) -> str:
        num_done = len(self.results)
        parts = [f"{num_done} of {len(self._workload.turns)} turns done"]
        if self._num_sent > num_done:
            parts.append(f"{self._num_sent - num_done} in flight dropped")
        if self._schedule.num_left:
            parts.append(f"{len(self._workload.turns) - self._num_sent} not sent")
        return ", ".join(parts)

    def _now_s(self) -> float:
        return time.monotonic() - self._origin_s
