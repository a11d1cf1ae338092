"""Where runs happen. Each place takes a variant and the number of a round and returns a run.

    simulated    the simulator; every run has caches of its own
    emulated     fresh emulated replicas and a fresh router for every run
    engines      a fresh router in front of engines that run already
    targets      base URLs as they are

A place makes caches cold and chooses the bytes that are sent. It knows nothing of the order of runs
or of what is measured.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from msgspec import Struct
from msgspec.structs import replace

from loadtest.compare.arms import Arm, serve_flags
from loadtest.results import Run, RunInfo, TurnResult
from loadtest.runner import ReplayOptions, TargetError, replay
from loadtest.runner.children import Child, ChildDied
from loadtest.runner.stack import start_replicas, start_router
from loadtest.simulator import Setup, simulate
from loadtest.workload import Turn, Workload

OnResult = Callable[[TurnResult], None]

_CACHE_RATIO: Final = 0.5  # of what the sessions write
_ROOM: Final = 1.5  # the longest turn fits even alone
_JITTER_S: Final = 1e-3
_IDS: Final = 1 << 63  # hash ids stay below
_STEP: Final = 0x9E3779B97F4A7C15 >> 1  # rounds' ids lie far apart
_RESET: Final = "/reset_prefix_cache"
_RESET_TIMEOUT_S: Final = 30.0


class Ran(Struct, frozen=True, kw_only=True):
    """A run, and how its caches were made cold."""

    run: Run
    cold: str


class Meter(Protocol):
    """Measures a run as it goes on."""

    def add(self, turn: TurnResult) -> None:
        """Add a turn's result."""
        ...

    def advance(self, num_turns: int) -> None:
        """Count turns whose results come at the end; called in another thread."""
        ...


class Place(Protocol):
    """Runs a variant once, from cold caches."""

    @property
    def shares_caches(self) -> bool:
        """Whether runs follow one another on the same caches."""
        ...

    async def run(self, arm: Arm, number: int, meter: Meter) -> Ran:
        """Run a variant in the round of that number, from 1 on.

        If it is cancelled, it returns a partial run (as `replay` does) or raises CancelledError. If
        the variant cannot run, it returns an empty run whose note says why.
        """
        ...


class Simulated:
    """Simulated runs, in a thread beside the display."""

    __slots__ = ("_setup", "_workload")

    def __init__(self, workload: Workload, setup: Setup) -> None:
        self._workload = workload
        self._setup = setup

    @property
    def shares_caches(self) -> bool:
        return False

    async def run(self, arm: Arm, number: int, meter: Meter) -> Ran:
        stopped = False

        def advance(num_turns: int) -> None:
            if stopped:
                raise _Stopped
            meter.advance(num_turns)

        setup = replace(self._setup, seed=self._setup.seed + number - 1, queue=arm.queue_rules())
        if arm.is_unlimited:
            setup = replace(setup, num_blocks=written_blocks(self._workload))
        workload = varied(self._workload, number, seed=self._setup.seed)
        try:
            done = await asyncio.to_thread(
                simulate, workload, arm.make_policy(), setup, label=arm.label, advance=advance
            )
        except asyncio.CancelledError:
            stopped = True  # the thread ends at its next turn
            raise
        for turn in done.run.turns:
            meter.add(turn)
        info = replace(done.run.info, label=arm.label, round=number, seed=setup.seed)
        info = replace(info, workload=self._workload.name)
        return Ran(run=replace(done.run, info=info), cold="simulated caches start empty")


def written_blocks(workload: Workload) -> int:
    """Count the blocks that the sessions write: a cache of this size never evicts."""
    replies = sum(turn.num_output_tokens // workload.block_size + 1 for turn in workload.turns)
    return _num_prompt_blocks(workload) + replies + 1


def _num_prompt_blocks(workload: Workload) -> int:
    return len({block for turn in workload.turns for block in turn.hash_ids})


def cache_tokens(workload: Workload, num_replicas: int) -> float:
    """Size a replica's cache so that all caches together hold half of what the sessions write."""
    replies = sum(turn.num_output_tokens for turn in workload.turns)
    written = _num_prompt_blocks(workload) * workload.block_size + replies
    longest = max(
        (turn.num_input_tokens + turn.num_output_tokens for turn in workload.turns), default=0
    )
    return max(_CACHE_RATIO * written / num_replicas, _ROOM * longest)


def varied(workload: Workload, number: int, *, seed: int) -> Workload:
    """Change the block ids, and times by up to a millisecond, from the second round on.

    A repeated simulation would give the same result. These changes leave the workload the same, so
    they show how much of a result is chance, as repeated live runs do.
    """
    if number <= 1:
        return workload
    dice = random.Random(f"{seed}.{number}")
    offset = number * _STEP % _IDS
    delayed = sorted(
        (
            replace(
                turn,
                arrival_s=turn.arrival_s + dice.random() * _JITTER_S,
                wait_s=turn.wait_s + dice.random() * _JITTER_S if turn.after else turn.wait_s,
                hash_ids=tuple((block + offset) % _IDS for block in turn.hash_ids),
            )
            for turn in workload.turns
        ),
        key=lambda turn: turn.arrival_s,
    )
    return replace(workload, turns=_after_what_they_wait_for(delayed))


class Emulated:
    """Fresh emulated replicas and router for every run; the same bytes in all runs of a round."""

    __slots__ = ("_flags", "_has_pool", "_logs", "_num_replicas", "_options", "_workload")

    def __init__(
        self,
        workload: Workload,
        options: ReplayOptions,
        *,
        flags: Callable[[Arm], Sequence[str]],
        num_replicas: int,
        has_pool: bool,
        logs: Path,
    ) -> None:
        self._workload = workload
        self._options = options
        self._flags = flags
        self._num_replicas = num_replicas
        self._has_pool = has_pool
        self._logs = logs

    @property
    def shares_caches(self) -> bool:
        return False

    async def run(self, arm: Arm, number: int, meter: Meter) -> Ran:
        logs = _log_dir(self._logs, arm, number)
        options = _labelled(self._options, arm, number, f"{self._options.seed}.{number}")
        try:
            async with start_replicas(
                self._flags(arm), self._num_replicas, logs, has_pool=self._has_pool
            ) as replicas:
                pool = ["--mooncake", replicas[0].announced[2]] if self._has_pool else []
                urls = [replica.announced[1] for replica in replicas]
                async with start_router(urls, [*serve_flags(arm), *pool], logs) as router:
                    children = (*replicas, router.child)
                    run = await _watched(children, self._workload, router.url, options, meter.add)
        except ChildDied as died:
            run = _nothing(self._workload, options, "emulated", str(died))
        return Ran(run=run, cold="fresh replicas and router")


class Engines:
    """A fresh router in front of given engines; bytes that no engine has seen."""

    __slots__ = ("_logs", "_options", "_router_flags", "_urls", "_workload")

    def __init__(
        self,
        workload: Workload,
        options: ReplayOptions,
        *,
        urls: Sequence[str],
        router_flags: Sequence[str],
        logs: Path,
    ) -> None:
        self._workload = workload
        self._options = options
        self._urls = urls
        self._router_flags = router_flags
        self._logs = logs

    @property
    def shares_caches(self) -> bool:
        return True

    async def run(self, arm: Arm, number: int, meter: Meter) -> Ran:
        logs = _log_dir(self._logs, arm, number)
        options = _labelled(self._options, arm, number, _own_salt(self._options, arm, number))
        cold = await reset_caches(self._urls)
        flags = [*serve_flags(arm), *self._router_flags]
        try:
            async with start_router(self._urls, flags, logs) as router:
                children = (router.child,)
                run = await _watched(children, self._workload, router.url, options, meter.add)
        except ChildDied as died:
            run = _nothing(self._workload, options, "engines", str(died))
        return Ran(run=run, cold=f"bytes of its own for every run; {cold}")


class Targets:
    """Base URLs as they are; bytes that none of them has seen."""

    __slots__ = ("_options", "_workload")

    def __init__(self, workload: Workload, options: ReplayOptions) -> None:
        self._workload = workload
        self._options = options

    @property
    def shares_caches(self) -> bool:
        return True

    async def run(self, arm: Arm, number: int, meter: Meter) -> Ran:
        assert arm.url is not None
        options = _labelled(self._options, arm, number, _own_salt(self._options, arm, number))
        run = await _sent(self._workload, arm.url, options, meter.add)
        return Ran(run=run, cold="bytes of its own for every run")


async def reset_caches(urls: Sequence[str]) -> str:
    """Ask every engine to clear its prefix cache; describe the result.

    vLLM offers it in its development mode only (VLLM_SERVER_DEV_MODE=1).
    """
    num_done = 0
    async with httpx.AsyncClient(timeout=_RESET_TIMEOUT_S, trust_env=False) as client:
        for url in urls:
            try:
                num_done += (await client.post(f"{url}{_RESET}")).status_code == 200
            except httpx.HTTPError:
                continue  # the run reports an engine that is gone
    if num_done == len(urls):
        return f"{_RESET} on every engine"
    return f"{_RESET} on {num_done} of {len(urls)} engines, the others do not offer it"


class _Stopped(Exception):
    """Ends a simulation that was stopped."""


async def _watched(
    children: Sequence[Child],
    workload: Workload,
    url: str,
    options: ReplayOptions,
    on_result: OnResult,
) -> Run:
    """Replay while processes are watched; one that dies is named in the run's note."""
    died: list[str] = []

    async def watch(child: Child) -> None:
        try:
            await child.watch()
        except ChildDied as error:
            died.append(str(error).partition(";")[0])

    async with asyncio.TaskGroup() as group:
        watches = [group.create_task(watch(c), name=f"watch {c.name}") for c in children]
        try:
            run = await _sent(workload, url, options, on_result)
        finally:
            for task in watches:
                task.cancel()
    if not died:
        return run
    note = "; ".join(filter(None, [run.info.note, *died]))
    return replace(run, info=replace(run.info, is_complete=False, note=note))


async def _sent(workload: Workload, url: str, options: ReplayOptions, on_result: OnResult) -> Run:
    try:
        return await replay(workload, url, options=options, on_result=on_result)
    except TargetError as error:
        return _nothing(workload, options, url, str(error))


def _nothing(workload: Workload, options: ReplayOptions, target: str, note: str) -> Run:
    """Return an empty run that says why it did not come about."""
    return Run(
        info=RunInfo(
            label=options.label,
            target=target,
            workload=workload.name,
            loop=options.loop,
            seed=options.seed,
            round=options.round,
            is_complete=False,
            note=note,
            settings={"salt": options.salt},
        ),
        turns=(),
    )


def _labelled(options: ReplayOptions, arm: Arm, number: int, salt: str) -> ReplayOptions:
    return replace(options, label=arm.label, round=number, salt=salt)


def _own_salt(options: ReplayOptions, arm: Arm, number: int) -> str:
    """Make a salt that no other run has."""
    return f"{options.salt}{options.seed}.{number}.{arm.label}"


def _log_dir(logs: Path, arm: Arm, number: int) -> Path:
    name = "".join(letter if letter.isalnum() or letter in "_.=-" else "_" for letter in arm.label)
    path = logs / f"{number:02}-{name}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _after_what_they_wait_for(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Move turns behind those that they wait for, if the jitter changed the order."""
    placed: dict[tuple[str, int], None] = {}
    known = {turn.key: turn for turn in turns}
    ordered: list[Turn] = []

    def place(turn: Turn) -> None:
        stack: list[Any] = [turn]
        while stack:
            current = stack[-1]
            waiting = [known[key] for key in current.after if key not in placed]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if current.key not in placed:
                placed[current.key] = None
                ordered.append(current)

    for turn in turns:
        place(turn)
    return tuple(ordered)
