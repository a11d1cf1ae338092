"""Engines that take requests and compute nothing. Page: docs/operate/failures.md."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest
from aiohttp import web

from router.cli.replicas import table
from router.replicas import health as signs
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, Json, Stage, arm, chat, on_stage, streamed, words

QUICK = {"health__interval_s": 0.02, "health__load_interval_s": 0.02, "policy__name": "round_robin"}
STREAM = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'


def figures(num_running: int, num_tokens: int) -> tuple[int, str]:
    """Write `/metrics`."""
    text = f'vllm:num_requests_running{{engine="0"}} {num_running}\n'
    text += 'vllm:num_requests_waiting{engine="0"} 0\n'
    return 200, text + f'vllm:generation_tokens_total{{engine="0"}} {num_tokens}\n'


class Wedged(FakeEngine):
    """An engine that says that it is well and idle, and answers nothing until it `goes_on`."""

    def __init__(self) -> None:
        super().__init__(self._answer, metrics=figures(0, 7))
        self.goes_on = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        is_stream = b'"stream":true' in await request.read()
        await self.goes_on.wait()
        self.pages["/metrics"] = figures(0, 7 + len(self.received))
        if not is_stream:
            return web.json_response({"choices": []})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM + b"data: [DONE]\n\n")
        return response


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for 20 s."""
    monkeypatch.setattr(signs, "STALLED_S", 0.5)


async def views(stage: Stage, name: str = "r1") -> set[str]:
    """Say what each view shows of a replica."""
    shown = set()
    [status] = [
        each for each in stage.router.fleet.load.status(monotonic()) if each.replica == name
    ]
    shown.add(status.state)
    state = (await stage.admin("/admin/state")).json()
    shown |= {row["state"] for row in state["replicas"]["shown"] if row["id"] == name}
    described = (await stage.admin("/admin/replicas")).json()
    [replica] = [each for each in described["replicas"] if each["name"] == name]
    shown |= {rank["state"] for rank in replica["ranks"]}
    [line] = [each for each in table(described).splitlines() if each.startswith(name)]
    used = line.partition("no: ")[2]
    shown.add(used.partition(",")[0].split("  ")[0].strip() if used else "up")
    for why in ("asleep", "paused", "stalled"):
        if stage.metric("warmroute_replica_withheld", replica=name, why=why):
            shown.add(why)
    return shown


async def all_show(stage: Stage, state: str, name: str = "r1") -> None:
    """Wait until each view shows the same state; one is drawn once a second."""
    shown = set[str]()
    for _ in range(300):
        shown = await views(stage, name)
        if shown == {state}:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not {state} in all views: {shown}")


async def known(stage: Stage) -> None:
    """Wait until metrics were read."""
    fleet = stage.router.fleet
    await stage.until(lambda: all(each.engine_load for each in fleet.load.status(monotonic())))


async def looked_at(stage: Stage, *engines: FakeEngine, times: int) -> None:
    """Wait until each engine's metrics were read so many times more."""
    wanted = {engine: engine.pages_read["/metrics"] + times for engine in engines}
    await stage.until(lambda: all(e.pages_read["/metrics"] >= n for e, n in wanted.items()))


def is_stalled(stage: Stage, name: str = "r1") -> bool:
    return stage.metric("warmroute_replica_withheld", replica=name, why="stalled") == 1


@pytest.mark.parametrize("num_running", [0, 3])
@pytest.mark.parametrize("body", [chat(words(1)), streamed(chat(words(1)))])
async def test_requests_leave_an_engine_that_computes_nothing(body: Json, num_running: int) -> None:
    """It says that it is well, and its figures stand still."""
    async with Wedged() as one, Wedged() as two, on_stage(one, two, **QUICK) as stage:
        one.pages["/metrics"] = figures(num_running, 7)
        two.goes_on.set()
        await known(stage)
        replies = await asyncio.gather(*(stage.ask(body) for _ in range(8)))

        assert [reply.status for reply in replies] == [200] * 8
        assert {reply.replica for reply in replies} == {"r2"}
        assert stage.metric("warmroute_failovers_total", replica="r1", reason="stalled") == 4
        await all_show(stage, "stalled")
        await all_show(stage, "up", "r2")
        assert stage.metric("warmroute_replica_healthy", replica="r1") == 0
        assert stage.log.count("replica stalled") == 2  # each is logged twice

        later = [await stage.ask(body) for _ in range(4)]
        assert {reply.replica for reply in later} == {"r2"}


async def test_the_last_replica_gets_requests_and_says_why_they_wait() -> None:
    """They are answered as soon as it goes on, and it is up again."""
    async with Wedged() as one, on_stage(one, **QUICK) as stage, asyncio.TaskGroup() as tg:
        await known(stage)
        asked = [tg.create_task(stage.ask(chat(words(1))))]
        await stage.until(lambda: is_stalled(stage))
        asked += [tg.create_task(stage.ask(chat(words(n)))) for n in (2, 3)]
        await stage.until(lambda: len(one.received) == 3)

        await all_show(stage, "stalled")
        [said] = (await stage.admin("/admin/state")).json()["degraded"]
        assert said.startswith("replica r1 is stalled: it was sent requests, and has computed noth")
        one.goes_on.set()
        assert [(await each).status for each in asked] == [200] * 3
        await stage.until(lambda: not is_stalled(stage))
        await all_show(stage, "up")
        assert "replica computes again" in stage.log


async def test_an_engine_that_was_restarted_has_not_stalled() -> None:
    """Even if no probe noticed that it was down."""
    started = "process_start_time_seconds"
    async with Wedged() as one, Wedged() as two, on_stage(one, two, **QUICK) as stage:
        one.pages["/metrics"] = (200, figures(0, 7)[1] + f"{started} 1.0\n")
        two.goes_on.set()
        await known(stage)
        await asyncio.gather(*(stage.ask(chat(words(n))) for n in range(2)))
        await stage.until(lambda: is_stalled(stage))
        one.pages["/metrics"] = (200, figures(0, 7)[1] + f"{started} 2.0\n")
        await stage.until(lambda: not is_stalled(stage))
        await all_show(stage, "up")


async def test_two_that_stalled_do_not_send_each_other_their_requests() -> None:
    """A request leaves for a replica that computes."""
    async with Wedged() as one, Wedged() as two, on_stage(one, two, **QUICK) as stage:
        await known(stage)
        async with asyncio.TaskGroup() as tg:
            asked = [tg.create_task(stage.ask(chat(words(n)))) for n in range(4)]
            await stage.until(lambda: is_stalled(stage) and is_stalled(stage, "r2"))
            await looked_at(stage, one, two, times=4)
            num_sent = len(one.received) + len(two.received)
            for each in (one, two):
                each.goes_on.set()
            assert [(await each).status for each in asked] == [200] * 4
        assert num_sent <= 6  # those of the one that stalled first may have left
        assert stage.metric("warmroute_refused_total") == 0


async def test_an_engine_without_requests_is_idle() -> None:
    """And so is one whose client only reads slowly, or left."""
    async with Wedged() as one, Wedged() as two, on_stage(one, two, **QUICK) as stage:
        await known(stage)
        async with stage.hanging_up(chat(words(1))):
            await stage.until(lambda: one.received or two.received)
        await looked_at(stage, one, two, times=15)  # twice as long as it takes to be stalled

        assert not is_stalled(stage)
        assert not is_stalled(stage, "r2")


async def test_an_engine_that_shows_work_has_not_stalled() -> None:
    """A step may take long."""
    async with Wedged() as one, Wedged() as two, on_stage(one, two, **QUICK) as stage:
        await known(stage)
        async with asyncio.TaskGroup() as tg:
            asked = [tg.create_task(stage.ask(chat(words(n)))) for n in range(2)]
            for number in range(20):
                one.pages["/metrics"] = two.pages["/metrics"] = figures(1, 7 + number)
                await asyncio.sleep(0.06)
            for each in (one, two):
                each.goes_on.set()
            assert [(await each).status for each in asked] == [200] * 2
        assert stage.metric("warmroute_failovers_total") == 0
        assert not is_stalled(stage)


# -- one state -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "away"), [("sleep", "asleep"), ("pause", "paused")])
async def test_a_replica_that_dies_in_its_sleep_is_dead_in_every_view(
    route: str, away: str
) -> None:
    """An engine that was ordered to wake up may die before the router knows that it did."""
    async with Engines(2) as engines, on_stage(*engines, **QUICK) as stage:
        one = next(
            each for each in engines if each.url == stage.router.fleet.members.replica("r1").url
        )
        await known(stage)
        await stage.admin("/admin/control", {"route": route, "replicas": ["r1"]})
        await all_show(stage, away)

        arm(one, "restart", down_s=1.0)
        await stage.until(lambda: stage.router.fleet.members.is_down("r1"))
        await all_show(stage, "down")
        refused = await stage.ask(chat(words(1)) | {"model": "other"})
        assert refused.status == 404
        await all_show(stage, away)  # it says so again


async def test_an_error_names_a_dead_replicas_state() -> None:
    """For clients, too, dead is dead."""
    async with Engines(1) as (engine,), on_stage(engine, **QUICK) as stage:
        await known(stage)
        await stage.admin("/admin/control", {"route": "sleep", "replicas": ["r1"]})
        await stage.until(lambda: stage.router.fleet.members.replica("r1").asleep)
        assert "(r1: asleep)" in (await stage.ask(chat(words(1)))).error["message"]

        arm(engine, "kill")
        await stage.until(lambda: stage.router.fleet.members.is_down("r1"))
        assert "(r1: down (probe refused))" in (await stage.ask(chat(words(1)))).error["message"]
