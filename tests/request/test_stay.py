"""A replica that is evacuated: its live conversations may end there, others go elsewhere."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loadtest.emulator.emulator import Emulator
from router.base.messages import Evacuation
from router.cli import main
from router.request.place import leaves_at
from tests.faults.stage import (
    SECRET,
    Engines,
    Reply,
    Stage,
    arm,
    chat,
    holder,
    on_stage,
    on_stages,
    streamed,
    together,
    words,
)
from tests.redis_servers import Start
from tests.request.pooled import ask, named, pooled

ONE, OTHER = {"X-Session-ID": f"one-{SECRET}"}, {"X-Session-ID": f"other-{SECRET}"}


async def turn(
    stage: Stage, engines: Sequence[Emulator], *texts: str, of: dict[str, str] = ONE
) -> Reply:
    reply = await stage.ask(streamed(chat(*texts)), headers=of)
    await stage.settled(*engines)
    return reply


async def evacuate(stage: Stage, name: str, **fields: Any) -> Reply:
    order = {"draining": True, "evacuate": True} | fields
    return await stage.admin(f"/admin/replicas/{name}/drain", order)


async def left(stage: Stage, name: str) -> dict[str, Any]:
    """How far the evacuation of a replica is."""
    listed = (await stage.admin("/admin/replicas")).json()["replicas"]
    (found,) = [each["evacuation"] for each in listed if each["name"] == name]
    return dict(found)


async def run(stage: Stage, *args: str) -> Result:
    command = ("replicas", "drain", *args, "--admin", stage.admin_url)
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, command))


async def test_a_live_conversation_ends_where_it_is() -> None:
    """New ones go elsewhere. When it is silent for long, the evacuation is over."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await stage.settled(*engines)
        first = await turn(stage, engines, words(1))
        await evacuate(stage, first.replica)
        others = {
            (
                await turn(stage, engines, words(number), of={"X-Session-ID": f"new-{number}"})
            ).replica
            for number in range(2, 5)
        }
        second = await turn(stage, engines, words(1), "yes", words(9))
        during = await left(stage, first.replica)
        stage.router.conversations.expire(time.monotonic() + 1_000.0)
        after = await left(stage, first.replica)
        third = await turn(stage, engines, words(1), "yes", words(9), "so", words(10))

    assert second.replica == first.replica
    assert first.replica not in others
    assert (during["sessions"], during["is_over"]) == (1, False)
    assert (after["sessions"], after["is_over"]) == (0, True)
    assert third.replica != first.replica


@pytest.mark.parametrize("why", ["it only drains", "it fails", "it sleeps"])
async def test_it_moves_at_once_from_where_it_cannot_stay(why: str) -> None:
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await stage.settled(*engines)
        first = await turn(stage, engines, words(1))
        await evacuate(stage, first.replica)
        if why == "it only drains":
            await stage.admin(f"/admin/replicas/{first.replica}/drain", {"draining": True})
        elif why == "it fails":  # it is not sent there twice
            arm(holder(stage, first, engines), "first_event_error", count=2)
        else:
            stage.router.fleet.members.set_sleep(first.replica, asleep=True, paused=False)
        second = await turn(stage, engines, words(1), "yes", words(9))

    assert (second.status, second.replica == first.replica) == (200, False)


async def test_what_another_replica_has_moves_at_once() -> None:
    """The policy would take turns."""
    async with Engines(2) as engines, on_stage(*engines, policy__name="round_robin") as stage:
        await stage.settled(*engines)
        homes = [(await turn(stage, engines, words(1))).replica for _ in range(2)]
        await evacuate(stage, homes[1])
        await turn(stage, engines, words(2), of=OTHER)
        third = await turn(stage, engines, words(1))

    assert third.replica == homes[0] != homes[1]


async def test_what_the_pool_has_moves_at_once() -> None:
    async with pooled() as (stage, _, engines):
        first = await ask(stage, engines, words(1))
        await named(stage)
        await evacuate(stage, first.replica)
        second = await ask(stage, engines, words(1), "ok")

    assert second.replica != first.replica
    assert second.reported > 64


async def test_when_the_time_is_over_it_moves() -> None:
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await stage.settled(*engines)
        first = await turn(stage, engines, words(1))
        await evacuate(stage, first.replica, within_s=0.05)
        until = stage.router.fleet.members.evacuations[first.replica].until
        await stage.until(lambda: time.time() >= until)
        over = await left(stage, first.replica)
        second = await turn(stage, engines, words(1), "yes", words(9))

    assert (over["sessions"], over["is_over"]) == (1, True)
    assert second.replica != first.replica


async def test_it_stays_where_there_is_no_other_replica() -> None:
    """New conversations are refused."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await turn(stage, engines, words(1))
        await evacuate(stage, "r1")
        second = await turn(stage, engines, words(1), "yes", words(9))
        new = await turn(stage, engines, words(2), of=OTHER)

    assert (second.status, second.replica) == (200, "r1")
    assert new.status == 503


async def test_it_stays_whichever_router_it_comes_to(start_redis: Start) -> None:
    """The order and the conversation were another router's."""
    async with Engines(2) as engines, on_stages(*engines, redis=start_redis()) as stages:
        one, two = stages
        await together(stages, *engines)
        first = await turn(one, engines, words(1))
        await evacuate(one, first.replica)
        await two.until(
            lambda: two.router.fleet.members.evacuations and len(two.router.conversations)
        )
        await two.settled(*engines)
        second = await turn(two, engines, words(1), "yes", words(9))
        new = await turn(two, engines, words(2), of=OTHER)

    assert second.replica == first.replica != new.replica


async def test_the_command_waits_and_says_what_is_left() -> None:
    """Exit status 1: the time was over first. A replica without sessions is done at once."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await stage.settled(*engines)
        first = await turn(stage, engines, words(1))
        other = next(each for each in ("r1", "r2") if each != first.replica)
        late = await run(stage, first.replica, "--evacuate", "--within", "1")
        await stage.admin(f"/admin/replicas/{first.replica}/drain", {"draining": False})
        empty = await run(stage, other, "--evacuate", "--json")

    assert (late.exit_code, empty.exit_code) == (1, 0)
    assert f"{first.replica}: 1 live session, " in late.stderr
    assert "the time is over, with 1 live session" in late.stdout
    assert json.loads(empty.stdout)["sessions"] == 0


async def test_an_order_that_contradicts_itself_is_refused() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        resumes = await evacuate(stage, "r1", draining=False)
        endless = await evacuate(stage, "r1", within_s=1e9)

    assert (resumes.status, endless.status) == (400, 400)
    assert "draining" in resumes.error["message"]


def test_those_that_stay_to_the_end_do_not_all_move_at_once() -> None:
    """Each has its own moment in the last quarter of the time."""
    evacuation = Evacuation(begun=1_000.0, until=1_400.0)
    moments = sorted(leaves_at(evacuation, session) for session in range(1_024))
    pauses = [after - before for before, after in pairwise(moments)]

    assert 1_300.0 <= moments[0] < 1_301.0
    assert moments[-1] == 1_400.0
    assert max(pauses) < 0.2
