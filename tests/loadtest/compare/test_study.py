"""The rounds are gone through in order, and what is there is kept whatever happens."""

from __future__ import annotations

import asyncio
import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from loadtest.compare.arms import Arm
from loadtest.compare.places import Meter, Ran
from loadtest.compare.study import study
from loadtest.results import Run
from loadtest.runner.display import Display
from loadtest.runner.stop import Stop
from tests.loadtest.compare.samples import made_run, made_setting

SETTING = made_setting()


class FakePlace:
    """Answers at once; at run `hangs_at` only when it is cancelled, with what there is or not."""

    shares_caches = True

    def __init__(self, hangs_at: int | None = None, *, has_part: bool = True) -> None:
        self.seen: list[tuple[str, int]] = []
        self.hanging = asyncio.Event()
        self._hangs_at = hangs_at
        self._has_part = has_part

    async def run(self, arm: Arm, number: int, meter: Meter) -> Ran:
        self.seen.append((arm.label, number))
        made = made_run(arm.label, number)
        for turn in made.turns:
            meter.add(turn)
        if len(self.seen) - 1 == self._hangs_at:
            self.hanging.set()
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or not self._has_part:
                    raise
                task.uncancel()  # as `replay` does
                info = replace(made.info, is_complete=False, note="interrupted")
                made = replace(made, info=info, turns=made.turns[:10])
        return Ran(run=made, cold="they say")


async def run_study(place: FakePlace, kept: list[Run], stop: Stop) -> list[Run]:
    display = Display(Console(file=io.StringIO()), SETTING.labels)
    return await study(SETTING, place, display, kept.append, stop)


async def test_every_arm_runs_at_its_place() -> None:
    """As the setting orders; each run is kept and knows its position and how it was made cold."""
    place, kept = FakePlace(), list[Run]()

    runs = await run_study(place, kept, Stop())

    assert place.seen == [(label, n) for n, ls in enumerate(SETTING.order, 1) for label in ls]
    assert runs == kept
    assert [run.info.settings["position"] for run in runs] == [0, 1, 2, 3]
    assert runs[0].info.settings["cold"] == "they say"
    assert runs[0].info.settings["shares_caches"] is True


@pytest.mark.parametrize(("has_part", "num_kept"), [(True, 3), (False, 2)])
async def test_a_stop_ends_the_run_and_keeps_what_there_is(has_part: bool, num_kept: int) -> None:
    """The third run is cut short; its turns are kept where the place has them."""
    place, kept = FakePlace(2, has_part=has_part), list[Run]()

    async def stopped() -> list[Run]:
        stop = Stop()

        async def interrupt() -> None:
            await place.hanging.wait()
            stop.request("stopped by SIGINT")
            stop.request("stopped by SIGTERM")  # once is enough

        async with asyncio.TaskGroup() as group:
            group.create_task(interrupt())
            runs = await run_study(place, kept, stop)
        assert stop.reason == "stopped by SIGINT"
        return runs

    runs = await stopped()

    assert len(runs) == len(kept) == num_kept
    assert runs[1].info.is_complete
    assert has_part is not runs[-1].info.is_complete


async def test_an_unannounced_cancellation_is_passed_on() -> None:
    """Only a stop is taken for one."""
    place = FakePlace(0, has_part=False)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_study(place, [], Stop()))
        await place.hanging.wait()
        task.cancel()

    assert task.cancelled()
