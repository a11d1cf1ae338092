"""The rounds are gone through in order, and what is there is kept whatever happens."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from loadtest.compare.arms import Arm
from loadtest.compare.display import LiveDisplay, PlainDisplay, make_display
from loadtest.compare.facts import busy_of
from loadtest.compare.places import OnResult, Ran
from loadtest.compare.setting import Setting
from loadtest.compare.study import Stop, study
from loadtest.results import Run
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

    async def run(self, arm: Arm, number: int, on_result: OnResult) -> Ran:
        self.seen.append((arm.label, number))
        made = made_run(arm.label, number)
        for turn in made.turns:
            on_result(turn)
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
    display = PlainDisplay(Console(file=io.StringIO()), SETTING)
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
    busy = busy_of(runs[0])
    assert busy is None or 0.0 <= busy.busy_share <= 1.0


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


async def test_a_cancellation_that_nobody_announced_is_passed_on() -> None:
    """Only a stop is taken for one."""
    place = FakePlace(0, has_part=False)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_study(place, [], Stop()))
        await place.hanging.wait()
        task.cancel()

    assert task.cancelled()


def seen_by(display: Any, setting: Setting) -> None:
    with display:
        for number, labels in enumerate(setting.order, 1):
            for label in labels:
                run = made_run(label, number)
                display.begin(label, number)
                for turn in run.turns:
                    display.advance(1)
                    display.add(turn)
                display.end(run)


def test_logs_get_a_line_for_every_run() -> None:
    """With figures, and with what went wrong."""
    console = Console(file=io.StringIO(), width=200)
    display = make_display(console, SETTING)
    seen_by(display, SETTING)
    display.end(made_run("kv_aware", 3, is_complete=False, note="the target is gone"))

    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 5
    assert "TTFT" in lines[0]
    assert "the target is gone" in lines[-1]


def test_terminals_get_a_table_of_arms() -> None:
    """With rounds and figures so far."""
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    display = make_display(console, SETTING)
    assert isinstance(display, LiveDisplay)

    seen_by(display, SETTING)

    plain = Console(file=io.StringIO(), width=140)
    plain.print(display.render())
    assert isinstance(plain.file, io.StringIO)
    text = plain.file.getvalue()
    assert "2/2" in text
    assert "144" in text
