"""One study from start to end: replicas, single requests, then rounds until the time is over.

Every step hands over what it found, so that nothing done is lost. A run that does not end in time
is left out, and a note says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import httpx
from msgspec.structs import replace

from loadtest.dev.gpu.run_machine import last_line
from loadtest.dev.gpu.run_probes import (
    ProbeFailed,
    measure_fetches,
    measure_hand_over,
    measure_prefill,
)
from loadtest.dev.gpu.run_record import Prefill
from loadtest.dev.gpu.run_replicas import (
    TAIL_LINES,
    ReplicaDied,
    empty_caches,
    routing,
    warm_up,
    while_alive,
)
from loadtest.dev.gpu.run_setting import FIRST_SEED, LongCell, Setting
from loadtest.dev.studies.draw import Draw
from loadtest.dev.studies.grid_run import DEFAULT, GridRun, run_of
from loadtest.dev.studies.pair import SESSION_HEADER
from loadtest.engines.process import all_up
from loadtest.engines.vllm import Engine
from loadtest.runner.children import ChildDied
from loadtest.runner.sessions import drive
from loadtest.runner.stack import Router

_READY_S: Final = 300.0
_END_S: Final = 15.0  # to end processes and to write
_MARGIN: Final = 1.15  # runs may take so much longer than those before
_SILENCE_S: Final = 120.0  # longest silence on a connection
_WARM_TOKENS: Final = 16_000

Keep = Callable[..., None]
"""Takes what a step found, by fields of `Found`; tuples are appended."""

Say = Callable[[str], None]
Done = TypeVar("Done")


class Study:
    """A study under way."""

    __slots__ = ("_deadline_s", "_engines", "_keep", "_log_dir", "_say", "_setting", "_took_s")

    def __init__(
        self,
        setting: Setting,
        engines: Sequence[Engine],
        log_dir: Path,
        keep: Keep,
        say: Say,
    ) -> None:
        self._setting = setting
        self._engines = engines
        self._log_dir = log_dir
        self._keep = keep
        self._say = say
        self._deadline_s = monotonic() + 60 * setting.minutes - _END_S
        self._took_s: dict[tuple[LongCell, str], float] = {}

    @property
    def left_s(self) -> float:
        """Seconds until everything has to end."""
        return self._deadline_s - monotonic()

    def run(self) -> None:
        """Measure everything that there is time for.

        Raises:
            ReplicaDied, ChildDied: a process did not start, or ended.
        """
        self._say(f"{len(self._engines)} replicas start")
        with _started(self._engines, min(_READY_S, max(self.left_s, 1.0))):
            warm_up(self._engines, min(_WARM_TOKENS, self._setting.max_model_len // 2))
            if self._setting.hand_over_lengths:
                self._probe("token hand-over", self._hand_over)
            if self._setting.offload_gib:
                self._probe("reads of the CPU tier", self._fetches)
            self._rounds()

    def _rounds(self) -> None:
        """Run rounds until there is no time for any cell."""
        num_runs = -1
        for round_ in count():
            if round_ == self._setting.num_rounds or num_runs == 0:
                return
            num_runs = 0
            arms = self._setting.arms if round_ % 2 == 0 else self._setting.arms[::-1]
            for cell in filter(self._has_time, self._setting.cells()):
                drawn = self._setting.draw(cell, FIRST_SEED + round_)
                for arm in arms:
                    if self.left_s > 0:
                        self._one(cell, drawn, arm, round_)
                        num_runs += 1

    def _has_time(self, cell: LongCell) -> bool:
        """Return whether a cell may be done in time: all variants, if it was done before."""
        of_cell = [took_s for (known, _), took_s in self._took_s.items() if known == cell]
        lasts_s = sum(of_cell) if of_cell else max(self._took_s.values(), default=0.0)
        return self.left_s > _MARGIN * lasts_s

    def _one(self, cell: LongCell, drawn: Draw, arm: str, round_: int) -> None:
        """Run one variant; keep it if it ended in time."""
        what = f"{cell.name}, seed {drawn.seed}: {arm}"
        self._say(f"{what}: {len(drawn.plans)} sessions")
        started_s = monotonic()
        try:
            run, prefills = self._within(self._drive(drawn, arm, round_), what)
        except TimeoutError:
            self._keep(notes=(f"left out, the time was over: {what}",))
            return
        took_s = monotonic() - started_s
        self._took_s[cell, arm] = max(took_s, self._took_s.get((cell, arm), 0.0))
        self._keep(runs=(run,), prefills=tuple(prefills))
        self._say(
            f"{what}: TTFT {run.ttft_mean_s:.3f} s, {run.num_computed_tokens:,} of "
            f"{run.num_prompt_tokens:,} tokens computed, {run.num_errors} failed, {took_s:.0f} s"
        )

    async def _drive(self, drawn: Draw, arm: str, round_: int) -> tuple[GridRun, list[Prefill]]:
        """Send the sessions to cold caches; under the default policy measure prefills after."""
        await asyncio.to_thread(empty_caches, self._engines)
        sessions = replace(drawn, profile=self._salted(drawn, arm)).sessions()
        async with routing(self._engines, arm, self._log_dir) as router:
            turns = await drive(
                router.url,
                sessions,
                concurrency=len(sessions),
                session_header=SESSION_HEADER,
                scripted=True,
                timeout_s=_SILENCE_S,
            )
            run = run_of(drawn, arm, turns, round=round_, is_report=True, keeps_turns=True)
            if run.num_errors:
                await _check_health(self._engines)
            first = DEFAULT, FIRST_SEED, self._setting.cells()[0]
            is_first = (arm, drawn.seed, drawn.cell) == first
            return run, await self._prefills(router) if is_first else []

    async def _prefills(self, router: Router) -> list[Prefill]:
        try:
            return await measure_prefill(router, self._setting)
        except ProbeFailed as exc:
            self._keep(notes=(f"prefill: {exc}",))
            return []

    def _salted(self, drawn: Draw, arm: str) -> Any:
        """Let no run read what an earlier one left in a CPU tier."""
        if not self._setting.offload_gib:
            return drawn.profile
        extra = {**drawn.profile.extra_body, "cache_salt": f"{drawn.seed} {arm}"}
        return replace(drawn.profile, extra_body=extra)

    def _probe(self, what: str, measure: Callable[[], Awaitable[None]]) -> None:
        """Measure something beside the rounds; without it the study goes on."""
        self._say(what)
        try:
            self._within(measure(), what)
        except (ProbeFailed, TimeoutError) as exc:
            self._keep(notes=(f"{what}: {str(exc) or 'the time was over'}",))

    async def _hand_over(self) -> None:
        found = await measure_hand_over(self._engines, self._setting, self._log_dir)
        self._keep(hand_overs=tuple(found))

    async def _fetches(self) -> None:
        self._keep(fetches=tuple(await measure_fetches(self._engines, self._setting)))

    def _within(self, work: Awaitable[Done], what: str) -> Done:
        """Do some work while all replicas live and time is left.

        Raises:
            ReplicaDied: one ended; the message says during what.
            TimeoutError: the time was over.
        """

        async def bounded() -> Done:
            async with asyncio.timeout(max(self.left_s, 0.0)):
                return await while_alive(self._engines, work)

        try:
            return asyncio.run(bounded())
        except ReplicaDied as died:
            raise ReplicaDied(f"{died} (during {what})") from died


@contextlib.contextmanager
def _started(engines: Sequence[Engine], ready_s: float) -> Iterator[None]:
    """Run replicas; one line says why one does not start.

    Raises:
        ReplicaDied: one did not start.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(all_up(engines, timeout_s=ready_s))
        except (RuntimeError, TimeoutError, ChildDied) as exc:
            first = str(exc).partition(":\n")[0]
            engine = next((e for e in engines if first.startswith(f"{e.name} ")), engines[0])
            why = last_line(engine.tail(TAIL_LINES))
            raise ReplicaDied(f"{first}: {why} ({engine.log_path})") from exc
        yield


async def _check_health(engines: Sequence[Engine]) -> None:
    """Tell a replica that fails from requests that do.

    Raises:
        ReplicaDied: one does not answer.
    """
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        for engine in engines:
            try:
                is_well = (await client.get(f"{engine.url}/health")).status_code == 200
            except httpx.HTTPError:
                is_well = False
            if not is_well:
                raise ReplicaDied(f"{engine.name} fails: {last_line(engine.tail(TAIL_LINES))}")
