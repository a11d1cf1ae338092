"""router.request.queue in a whole router: who waits, who goes next, and how waiting ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import web
from msgspec.structs import replace

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.pool import PoolMaster
from loadtest.engine_model.time_model import TimeModel
from policies import Decision, Snapshot
from policies.cost import KvAware, candidate_costs
from policies.view import CandidateId, ReplicaView, RequestView
from router.api.sessions import session_hash
from router.base.caller import ANYBODY
from router.base.errors import NoReplicaAvailable
from router.cluster import shares
from router.config import QueueConfig
from router.metrics import Metrics
from router.replicas import Fleet
from router.replicas.cost_fit import PRIOR
from router.request.queue import WaitingRoom
from router.request.results import NO_SESSION, Tries
from router.scheduling.order import DEADLINE_HEADER
from router.scheduling.queue import Queue
from router.scheduling.waiting import LATE, QueueRules
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import (
    ONE_AT_A_TIME,
    SECRET,
    STUCK,
    Engines,
    Reply,
    Stage,
    chat,
    num_running,
    on_stage,
    on_stages,
    records_in,
    streamed,
    words,
)
from tests.faults.tenants import A as TENANT_A
from tests.faults.tenants import B as TENANT_B
from tests.faults.tenants import tenants_file
from tests.redis_servers import Start
from tests.replicas.work import fleet_of, send

ON: Any = {"queue__mode": "on", "queue_rules": ONE_AT_A_TIME, "health__interval_s": 60.0}
ONE_READY: Any = {"queue_rules": QueueRules(window=1, ready_ms=0.0)}


TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'


class Gate:
    """An engine that begins and ends its answers on command; requests have names."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self._begins: dict[str, asyncio.Event] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = orjson.loads(await request.read())["user"]
        begins = self._begins.setdefault(name, asyncio.Event())
        ends = self._ends.setdefault(name, asyncio.Event())
        self.arrived.append(name)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await begins.wait()
        await response.prepare(request)
        await response.write(TOKEN)
        await ends.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    def begin(self, *names: str) -> None:
        for name in names:
            self._begins.setdefault(name, asyncio.Event()).set()

    def end(self, *names: str) -> None:
        self.begin(*names)
        for name in names:
            self._ends.setdefault(name, asyncio.Event()).set()


class Asking:
    """Requests under way by name; who still is at the end has left."""

    def __init__(self, stage: Stage, tg: asyncio.TaskGroup) -> None:
        self.stage = stage
        self._tg = tg

    def ask(self, name: str, num_words: int = 5, path: str = "/v1/chat/completions",
            with_headers: Mapping[str, str] | None = None,
            **fields: Any) -> asyncio.Task[Reply]:  # fmt: skip
        body = streamed(chat(words(sum(name.encode()), num_words), user=name)) | fields
        headers = {"X-Session-ID": f"{SECRET} {name}", **(with_headers or {})}
        return self._tg.create_task(self.stage.ask(body, path, headers=headers))

    async def waits(self, number: int) -> None:
        await self.stage.until(lambda: num_waiting(self.stage) == number)


def num_waiting(stage: Stage) -> int:
    return int(stage.metric("warmroute_waiting_requests"))


async def has(stage: Stage, gate: Gate, *names: str) -> None:
    """Wait until an engine has got just these requests, in this order."""
    await stage.until(lambda: len(gate.arrived) >= len(names))
    assert gate.arrived == list(names)


@asynccontextmanager
async def one_computing(gate: Gate, **settings: Any) -> AsyncIterator[tuple[Stage, Asking]]:
    """Run a router before an engine that computes a prompt, "a"; others wait."""
    async with (
        FakeEngine(gate.answer) as engine,
        on_stage(engine, **ON, **settings) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        asking.ask("a")
        await has(stage, gate, "a")
        yield stage, asking


def lives(stage: Stage, num_tokens: int) -> None:
    """Have a conversation of so many tokens whose turn runs at the replica."""
    found, now_s = stage.router.fleet.conversations, time.monotonic()
    for _ in range(2):
        found.end(1, num_tokens, now_s)
        found.begin(1, CandidateId("r1"), num_tokens, 0, now_s, cost_s=1_000.0)


def goes_on(stage: Stage) -> None:
    """Have the conversation of `SECRET` known to another router, so that it waits for room."""
    found = stage.router.fleet.conversations
    found.learn(session_hash(SECRET, "tiny"), CandidateId("r1"), 0, time.monotonic())


async def test_an_engine_gets_what_it_can_use_and_the_rest_waits() -> None:
    """One to compute and one ready; the next goes at a first token, another at a lease's end."""
    gate = Gate()
    async with (
        FakeEngine(gate.answer) as engine,
        on_stage(engine, **ON | ONE_READY) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        tasks, took_ms = [], []
        for number, name in enumerate("abcd"):
            begun_s = time.monotonic()
            tasks.append(asking.ask(name, 5 + 50 * number))
            await asking.waits(max(0, number - 1))
            await stage.until(lambda n=number: len(gate.arrived) == min(n + 1, 2))  # type: ignore[misc]
            took_ms.append(1e3 * (time.monotonic() - begun_s))
            await asyncio.sleep(0.02)  # so that it has waited clearly longer than the next one
        gate.begin("a")
        await has(stage, gate, "a", "b", "c")
        gate.end("b")
        await has(stage, gate, "a", "b", "c", "d")
        gate.end("a", "c", "d")
        replies = [await task for task in tasks]

        assert {reply.status for reply in replies} == {200}
        waited = [float(reply.headers["x-warmroute-waited-ms"]) for reply in replies]
        assert waited[0] <= took_ms[0]
        assert waited[1] <= took_ms[1]
        assert min(waited[2:]) >= 20
        assert {reply.headers["x-warmroute-waited-for"] for reply in replies[2:]} == {"window"}
        assert "x-warmroute-waited-for" not in replies[0].headers
        assert all(float(reply.headers["x-warmroute-ms"]) >= 0 for reply in replies)
        assert stage.metric("warmroute_released_total", why="room") == 4
        assert stage.metric("warmroute_wait_seconds_count", end="released") == 4


async def test_short_ones_do_not_wait_for_long_ones() -> None:
    """The order is waiting over computing."""
    gate = Gate()
    async with one_computing(gate) as (stage, asking):
        asking.ask("long", 3_000)
        await asking.waits(1)
        asking.ask("short")
        await asking.waits(2)
        gate.begin("a")
        await has(stage, gate, "a", "short")
        gate.end("a", "short", "long")


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
async def test_a_step_of_the_clock_ends_no_wait(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines and waits go by the time since the start, not by the time of day."""
    gate, now, release = Gate(), time.time, Queue.release
    looks: list[bool] = []

    def counted(queue: Queue[Any], *args: Any) -> bool:
        looks.append(release(queue, *args))
        return looks[-1]

    monkeypatch.setattr(Queue, "release", counted)
    async with one_computing(gate, queue__max_wait_s=3_000) as (stage, asking):
        late = asking.ask("b", with_headers={DEADLINE_HEADER: "3600000"})
        await asking.waits(1)
        monkeypatch.setattr(time, "time", lambda: now() + step_s)
        num_looks = len(looks)
        await stage.until(lambda: len(looks) >= num_looks + 3)
        assert num_waiting(stage) == 1
        gate.end("a")
        await has(stage, gate, "a", "b")
        gate.end("b")
        reply = await late

    assert reply.status == 200
    assert 0.0 < float(reply.headers["x-warmroute-waited-ms"]) < 3_600_000.0


def slots_of_one_variant(policy: str) -> Any:
    """Define a switchback all of whose slots are of a variant with a queue of its own."""
    variants = [
        {"name": "control", "policy": "kv_aware", "share": 0.0},
        {"name": "tried", "policy": policy, "share": 1.0},
    ]
    return {"name": "e", "design": "switchback", "variants": variants}


async def test_a_variant_may_have_its_prompts_wait() -> None:
    """In a router whose prompts do not; as the variant says."""
    gate = Gate()
    experiment = slots_of_one_variant("kv_aware:queue.mode=on")
    async with (
        FakeEngine(gate.answer) as engine,
        on_stage(engine, **{**ON, "queue__mode": "off"}, experiment=experiment) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        asking.ask("a")
        await has(stage, gate, "a")
        last = asking.ask("b")
        await asking.waits(1)
        gate.end("a")
        await has(stage, gate, "a", "b")
        gate.end("b")

        assert (await last).headers["x-warmroute-variant"] == "e/tried"
        assert stage.metric("warmroute_released_total", why="room") == 2


async def test_a_variant_may_have_its_prompts_go_at_once() -> None:
    """In a router whose prompts wait; a class is not read then."""
    gate = Gate()
    experiment = slots_of_one_variant("kv_aware:queue.mode=off")
    async with (
        FakeEngine(gate.answer) as engine,
        on_stage(engine, **ON, experiment=experiment) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        asking.ask("a", with_headers={"x-warmroute-class": "urgent"})
        await has(stage, gate, "a")
        asking.ask("b")
        await has(stage, gate, "a", "b")
        gate.end("a", "b")

        assert num_waiting(stage) == 0


async def test_what_has_no_prompt_does_not_wait() -> None:
    """Nor does anything where the queue is off."""
    gate = Gate()
    async with (
        FakeEngine(gate.answer, **{"v1/embeddings": {"data": []}}) as engine,
        on_stage(engine, **ON) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        asking.ask("a")
        asking.ask("b")
        await asking.waits(1)
        assert (await stage.ask({"model": "tiny"}, "/v1/embeddings")).status == 200
        gate.end("a", "b")
    gate = Gate()
    async with (
        FakeEngine(gate.answer) as engine,
        on_stage(engine, queue__mode="off", queue_rules=ONE_AT_A_TIME) as stage,
        asyncio.TaskGroup() as tg,
    ):
        tasks = [Asking(stage, tg).ask(name) for name in "abc"]
        await stage.until(lambda: len(gate.arrived) == 3)
        gate.end(*"abc")
        for task in tasks:
            assert "x-warmroute-waited-ms" not in (await task).headers


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({}, "idle"),
        ({}, "seldom"),
        ({"queue__max_wait_s": 0.1}, "waited_out"),
        ({"queue__fill": 2.0}, "room"),
    ],
)
async def test_a_session_that_does_not_fit_goes_for_a_reason(
    tmp_path: Path, rules: dict[str, Any], why: str
) -> None:
    """An engine with time to spare, a new session, the bound on waiting, or room; the record says
    which."""
    file = tmp_path / "decisions.jsonl"
    async with (
        Engines(1, num_gpu_blocks=160, max_model_len=2400) as engines,
        on_stage(*engines, **ON, **rules, log__decisions=file) as stage,
    ):
        body = streamed(chat(words(1, 300)))
        num_tokens = (await stage.ask(body)).usage["prompt_tokens"]
        assert 1_250 < num_tokens < 2_300
        lives(stage, 2_500 - num_tokens if why in ("idle", "seldom") else 2_500)
        if why != "seldom":
            goes_on(stage)
        other = streamed(chat(words(2, 300)))
        await stage.ask(other, headers={"X-Session-ID": SECRET})
        assert stage.metric("warmroute_released_total", why=why) == (2 if why == "room" else 1)

    record = records_in(file)[1]
    assert record.released == why
    assert record.waited_for == ("room" if why == "waited_out" else None)
    assert (record.waited_ms >= LATE * 100) is (why == "waited_out")
    assert 0 < record.router_ms <= record.total_ms - record.waited_ms


async def test_a_session_waits_for_room() -> None:
    """It goes when those with room are gone; nothing has to happen for that."""
    async with (
        Engines(1, num_gpu_blocks=160, max_model_len=2400) as engines,
        on_stage(*engines, **ON) as stage,
        asyncio.TaskGroup() as tg,
    ):
        lives(stage, 2_000)
        goes_on(stage)
        task = tg.create_task(stage.ask(chat(words(2, 300)), headers={"X-Session-ID": SECRET}))
        await stage.until(lambda: num_waiting(stage) == 1)
        assert stage.metric("warmroute_live_sessions", replica="r1") == 1
        assert 0.7 < stage.metric("warmroute_footprint_ratio", replica="r1") < 0.9
        stage.router.fleet.conversations.remove(CandidateId("r1"))

        assert (await task).status == 200


async def test_a_session_needs_no_room_if_a_tier_or_a_pool_gives_back_what_is_evicted() -> None:
    """The same session, with nothing behind the cache, with a CPU tier, and with a pool."""

    async def goes_at_once(settings: dict[str, Any], **fields: Any) -> bool:
        async with (
            Engines(1, num_gpu_blocks=160, max_model_len=2400, **fields) as engines,
            on_stage(*engines, **ON, **settings) as stage,
            asyncio.TaskGroup() as tg,
        ):
            load = stage.router.fleet.load
            await stage.ask(chat(words(1, 300)))
            if fields:
                await stage.until(lambda: load.reads_back(CandidateId("r1")))
            lives(stage, 2_500)
            task = tg.create_task(stage.ask(chat(words(2, 300)), headers={"X-Session-ID": SECRET}))
            await stage.until(lambda: task.done() or num_waiting(stage) == 1)
            at_once = not num_waiting(stage)
            stage.router.fleet.conversations.remove(CandidateId("r1"))
            assert (await task).status == 200
            return at_once

    assert not await goes_at_once({})
    assert await goes_at_once({}, cpu_blocks=1_000)
    async with PoolMaster() as master:
        settings = {"mooncake__master": master.url}
        assert await goes_at_once(settings, pool=master.url, ms_per_fetched_token=0.0)


async def test_a_client_that_leaves_while_it_waits_costs_nothing(tmp_path: Path) -> None:
    """Its place is another's at once; the record says that it left."""
    gate, file = Gate(), tmp_path / "decisions.jsonl"
    async with one_computing(gate, log__decisions=file) as (stage, asking):
        async with stage.hanging_up(streamed(chat(words(1), user="gone"))):
            await asking.waits(1)
        await asking.waits(0)
        asking.ask("b")
        await asking.waits(1)
        gate.end("a", "b")
        await has(stage, gate, "a", "b")
        await stage.until(lambda: not stage.leftovers())

        assert stage.metric("warmroute_wait_seconds_count", end="client_gone") == 1
    records = records_in(file)
    [gone] = [record for record in records if record.outcome == "client_gone"]
    assert (gone.status, gone.tries, gone.released) == (499, (), None)
    assert gone.waited_ms > 0


async def test_a_full_queue_refuses_and_says_when_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """429, in the shape of the API; requests that wait already stay."""
    monkeypatch.setattr("router.request.queue.MAX_WAITING", 1)
    gate = Gate()
    async with one_computing(gate) as (stage, asking):
        asking.ask("b")
        await asking.waits(1)
        refused = await asking.ask("c")
        message = await asking.ask("d", path="/v1/messages")
        gate.end("a", "b")
        await has(stage, gate, "a", "b")

        assert (refused.status, refused.error["type"]) == (429, "RateLimitError")
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert (message.status, message.error["type"]) == (429, "rate_limit_error")
        assert stage.metric("warmroute_refused_total", code="queue_full") == 2
        assert stage.metric("warmroute_wait_seconds_count", end="refused") == 2


BATCH = {"x-warmroute-class": "batch"}


async def test_batch_waits_for_interactive_requests(tmp_path: Path) -> None:
    """The record and the metrics say who waited; the engine learns nothing of it."""
    gate, file = Gate(), tmp_path / "decisions.jsonl"
    async with (
        FakeEngine(gate.answer) as engine,
        on_stage(engine, **ON, log__decisions=file) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        tasks = [asking.ask("a")]
        await has(stage, gate, "a")
        tasks.append(asking.ask("batch", with_headers=BATCH))
        await asking.waits(1)
        tasks.append(asking.ask("b", 500))
        await asking.waits(2)
        assert stage.metric("warmroute_class_waiting_requests", **{"class": "batch"}) == 1
        gate.end("a")
        await has(stage, gate, "a", "b")
        gate.end("b", "batch")
        await has(stage, gate, "a", "b", "batch")
        assert [(await task).status for task in tasks] == [200] * 3

        found = stage.router.fleet.conversations
        assert found.working_set(CandidateId("r1")).num_sessions == 3

        count = "warmroute_class_wait_seconds_count"
        assert stage.metric(count, end="released", **{"class": "batch"}) == 1
        assert stage.metric(count, end="released", **{"class": "interactive"}) == 2
    records = records_in(file)
    classes = [record.service_class for record in records]
    assert sorted(classes, key=str) == ["batch", "interactive", "interactive"]


async def test_tenants_that_wait_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant that used its share goes behind the other's request, though that came later."""
    monkeypatch.setattr("router.scheduling.order.QUANTUM_MS", 1.0)
    gate = Gate()
    settings = {"tenants__file": tenants_file(tmp_path)}
    async with (
        FakeEngine(gate.answer) as engine,
        on_stage(engine, **ON, **settings) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        tasks = [asking.ask("a1", with_headers=TENANT_A)]
        await has(stage, gate, "a1")
        for number, (name, key) in enumerate(
            (("a2", TENANT_A), ("a3", TENANT_A), ("b1", TENANT_B))
        ):
            tasks.append(asking.ask(name, with_headers=key))
            await asking.waits(number + 1)
        gate.end("a1")
        await has(stage, gate, "a1", "b1")
        gate.end("b1", "a2", "a3")

        assert [(await task).status for task in tasks] == [200] * 4
        waited_s = {
            name: stage.metric("warmroute_tenant_waited_seconds_total", tenant=name)
            for name in "ab"
        }
        assert waited_s["a"] > waited_s["b"] > 0.0


async def test_a_tenants_priority_decides_who_goes_first_and_who_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The higher one goes first though it came last; a full queue lets it in, and no other."""
    monkeypatch.setattr("router.request.queue.MAX_WAITING", 2)
    gate = Gate()
    settings = {"tenants__file": tenants_file(tmp_path, b="priority: 1")}
    async with (
        FakeEngine(gate.answer) as engine,
        on_stage(engine, **ON, **settings) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        tasks = [asking.ask("a1", with_headers=TENANT_A)]
        await has(stage, gate, "a1")
        tasks.append(asking.ask("a2", with_headers=TENANT_A))
        await asking.waits(1)
        displaced = asking.ask("a3", 3_000, with_headers=TENANT_A)
        await asking.waits(2)
        refused = await asking.ask("a4", with_headers=TENANT_A)
        tasks.append(asking.ask("b1", with_headers=TENANT_B))
        assert (refused.status, (await displaced).status) == (429, 429)
        gate.end("a1")
        await has(stage, gate, "a1", "b1")
        gate.end("b1", "a2")

        assert [(await task).status for task in tasks] == [200] * 3


async def test_a_class_that_is_none_is_refused() -> None:
    """400 that names the classes; without a queue it is not read."""
    unknown = {"x-warmroute-class": "urgent"}
    body = chat(words(1), max_tokens=4)
    async with Engines(1) as engines:
        async with on_stage(*engines, **ON) as stage:
            refused = await stage.ask(body, headers=unknown)
        async with on_stage(*engines, **ON | {"queue__mode": "off"}) as stage:
            answered = await stage.ask(body, headers=unknown)

    assert refused.status == 400
    assert "interactive, batch" in refused.error["message"]
    assert answered.status == 200


async def test_a_full_queue_of_batch_lets_interactive_ones_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch request that takes the longest is asked to come again; batch finds no place."""
    monkeypatch.setattr("router.request.queue.MAX_WAITING", 2)
    gate = Gate()
    async with one_computing(gate) as (stage, asking):
        long = asking.ask("long", 3_000, with_headers=BATCH)
        await asking.waits(1)
        asking.ask("short", with_headers=BATCH)
        await asking.waits(2)
        third = await asking.ask("third", with_headers=BATCH)
        asking.ask("b")
        displaced = await long
        gate.end("a", "b", "short")
        await has(stage, gate, "a", "b", "short")

        for refused in (third, displaced):
            assert (refused.status, refused.error["type"]) == (429, "RateLimitError")
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
        refused_total = "warmroute_queue_refused_total"
        assert stage.metric(refused_total, reason="full", **{"class": "batch"}) == 1
        assert stage.metric(refused_total, reason="displaced", **{"class": "batch"}) == 1
        assert stage.metric("warmroute_waiting_requests") == 0


async def test_a_deadline_that_cannot_be_met_is_refused_early(tmp_path: Path) -> None:
    """When it comes, or while it waits; one that can be met is kept, and the record has it."""
    gate, file = Gate(), tmp_path / "decisions.jsonl"
    async with one_computing(gate, log__decisions=file) as (stage, asking):
        at_once = await asking.ask("b", 3_000, with_headers={DEADLINE_HEADER: "1"})
        meant = asking.ask("c", with_headers={DEADLINE_HEADER: "600000"})
        await asking.waits(1)
        waited = await asking.ask("d", with_headers={DEADLINE_HEADER: "700"})
        gate.end("a", "c")
        assert (await meant).status == 200

        for refused in (at_once, waited):
            assert (refused.status, refused.error["type"]) == (429, "RateLimitError")
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert gate.arrived == ["a", "c"]
        assert stage.metric("warmroute_refused_total", code="deadline_unmet") == 2
        refused_total = "warmroute_queue_refused_total"
        assert stage.metric(refused_total, reason="deadline", **{"class": "interactive"}) == 2
    records = records_in(file)
    [kept] = [record for record in records if record.deadline_ms is not None]
    assert kept.deadline_ms == 600_000
    assert kept.expected_ttft_ms is not None
    assert 0 < kept.expected_ttft_ms < 600_000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_deadline_is_kept_after_keep_alives_began(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is an error event in the API's own shape, and no request follows it."""
    monkeypatch.setattr("router.request.queue.KEEPALIVE_S", 0.1)
    gate = Gate()
    async with one_computing(gate) as (stage, asking):
        late = await asking.ask("b", path=path, with_headers={DEADLINE_HEADER: "700"})
        gate.end("a")

        assert late.status == 200
        error = refusal_in(late, path)
        assert error["type"] == ("rate_limit_error" if path == "/v1/messages" else "RateLimitError")
        assert gate.arrived == ["a"]
        assert stage.metric("warmroute_refused_total", code="deadline_unmet") == 1


def refusal_in(late: Reply, path: str) -> Any:
    """Return the error at the end of a stream that began with keep-alives."""
    is_messages = path == "/v1/messages"
    assert late.body.startswith(b"event: ping\n" if is_messages else b": no token yet\n\n")
    *_, name, data = late.body.strip().splitlines()
    assert (name == b"event: error") == is_messages
    return orjson.loads(data.removeprefix(b"data: "))["error"]


@asynccontextmanager
async def decoding(**settings: Any) -> AsyncIterator[tuple[Stage, Emulator, asyncio.Task[Reply]]]:
    """Run a router before an engine that decodes 5 ms a token, until its metrics have shown that.

    One request has been answered, and one is being answered for minutes, or until it is cancelled.
    """
    metrics = {"health__interval_s": 0.2, "health__load_interval_s": 0.2}  # 40 tokens a reading
    async with (
        Engines(1, time_model=TimeModel(base_ms=5.0)) as (engine,),
        on_stage(
            engine, queue__mode="on", queue_rules=ONE_AT_A_TIME, **metrics, **settings
        ) as stage,
        asyncio.TaskGroup() as tg,
    ):
        asking = Asking(stage, tg)
        assert (await asking.ask("short", max_tokens=2, ignore_eos=True)).status == 200
        long = asking.ask("long", max_tokens=30_000, ignore_eos=True)
        fleet = stage.router.fleet
        await stage.until(
            lambda: fleet.load.tbt_ms(CandidateId("r1"), 10, time.monotonic()) is not None
        )
        yield stage, engine, long
        long.cancel()


async def test_who_would_be_answered_slowly_waits_until_an_answer_ends(tmp_path: Path) -> None:
    """An engine alone takes it, however slow it is; a quick answer's record has what it was."""
    body = streamed(chat(words(9)))
    async with decoding(queue__tbt_ms=0.5, queue__max_wait_s=3600.0) as (stage, engine, long):
        async with asyncio.TaskGroup() as tg:
            waits = tg.create_task(stage.ask(body))
            await stage.until(lambda: num_waiting(stage) == 1)
            found = (await stage.admin("/admin/explain", body)).json()["queue"]
            assert num_running(engine) == 1
            long.cancel()
        assert (await waits).status == 200
    assert (found["goes_at_once"], found["why"], found["num_waiting"]) == (False, "tbt", 1)
    assert found["expected_tbt_ms"] > found["tbt_limit_ms"] == 0.5

    records = tmp_path / "decisions.jsonl"
    async with decoding(queue__tbt_ms=60_000.0, log__decisions=records) as (stage, _, long):
        assert (await stage.ask(body)).status == 200
    assert max(each.expected_tbt_ms or 0.0 for each in records_in(records)) > 1.0


async def test_an_answer_that_stays_slow_is_refused() -> None:
    """It is refused when it has waited as long as it may, or is predicted to."""
    body = streamed(chat(words(9), max_tokens=5))
    async with decoding(queue__tbt_ms=0.5, queue__max_wait_s=0.3) as (stage, engine, _):
        refused = await stage.ask(body)
        assert num_running(engine) == 1

        assert (refused.status, refused.error["type"]) == (429, "RateLimitError")
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert stage.metric("warmroute_refused_total", code="tbt_unmet") == 1
        refused_total = "warmroute_queue_refused_total"
        assert stage.metric(refused_total, reason="tbt", **{"class": "interactive"}) == 1
        assert stage.metric("warmroute_waiting_requests") == 0


async def test_an_answer_that_stays_slow_is_refused_after_keep_alives_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusal is an error event."""
    monkeypatch.setattr("router.request.queue.KEEPALIVE_S", 0.1)
    body = streamed(chat(words(9), max_tokens=5))
    async with decoding(queue__tbt_ms=0.5, queue__max_wait_s=0.5) as (stage, _, _long):
        refused = await stage.ask(body)

        assert refused.status == 200
        assert refusal_in(refused, "/v1/chat/completions")["code"] == 429
        assert stage.metric("warmroute_refused_total", code="tbt_unmet") == 1


async def test_those_who_wait_for_a_replica_that_dies_go_elsewhere() -> None:
    """What it had in flight is tried again without another wait."""
    gates = [Gate(), Gate()]
    async with FakeEngine(gates[0].answer) as first, FakeEngine(gates[1].answer) as second:
        settings = {**ON, "policy__name": "least_loaded", "listen__drain_s": 0.1}
        async with on_stage(first, second, **settings) as stage, asyncio.TaskGroup() as tg:
            asking = Asking(stage, tg)
            tasks = [asking.ask(name) for name in "abcd"]
            await asking.waits(2)
            await second.die()
            gates[0].end(*"abcd")
            replies = [await task for task in tasks]

            assert [reply.status for reply in replies] == [200] * 4


async def test_the_end_of_the_router_is_one_for_those_who_wait() -> None:
    """When the time to drain is over they are asked to send it again."""
    gate = Gate()
    async with one_computing(gate, listen__drain_s=0.1, is_idle=False) as (stage, asking):
        waiting = asking.ask("b")
        await asking.waits(1)
        stage.stop.set()
        reply = await waiting

        assert (reply.status, reply.error["code"]) == (503, 503)
        assert reply.headers["Retry-After"] == "1"
        assert gate.arrived == ["a"]


async def test_routers_share_windows(start_redis: Start) -> None:
    """What one has sent fills the window of the other, and what it gives up opens it."""
    async with (
        Engines(1, time_model=STUCK) as engines,
        on_stages(*engines, redis=start_redis(), queue__mode="on", **ONE_READY) as (one, two),
    ):
        async with asyncio.TaskGroup() as tg:
            first = [tg.create_task(one.ask(streamed(chat(words(number))))) for number in (1, 2)]
            await two.until(lambda: two.metric("warmroute_inflight_requests_elsewhere") == 2)
            last = tg.create_task(two.ask(streamed(chat(words(3)))))
            await two.until(lambda: num_waiting(two) == 1)
            assert num_running(engines[0]) == 2
            for task in first:
                task.cancel()
            await two.until(lambda: num_waiting(two) == 0)
            await two.until(lambda: num_running(engines[0]) == 1)
            last.cancel()


async def test_a_router_that_joins_learns_what_waits_for_room(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing comes to that queue and nothing leaves it."""
    monkeypatch.setattr(shares, "_REPEAT_S", 0.2)
    redis = start_redis()
    async with (
        Engines(1, num_gpu_blocks=160, max_model_len=2400) as engines,
        on_stage(*engines, redis=redis, **ON) as one,
        asyncio.TaskGroup() as tg,
    ):
        lives(one, 2_000)
        goes_on(one)
        task = tg.create_task(one.ask(chat(words(2, 300)), headers={"X-Session-ID": SECRET}))
        await one.until(lambda: num_waiting(one) == 1)
        await asyncio.sleep(0.5)  # its note was published
        async with on_stage(*engines, redis=redis, **ON) as two:
            queues = two.router.cluster.queues
            await two.until(lambda: queues.num_waiting(time.monotonic()) == 1)
        task.cancel()


# -- the room alone --------------------------------------------------------------------------


class Placing:
    """A place that does what a test says."""

    def __init__(self) -> None:
        self.released: list[Any] = []
        self.error: Exception | None = None

    def plan(self, prompt: Any, tries: Tries, *_: Any) -> Any:
        if self.error is not None:
            raise self.error
        return prompt.plan

    def commit(self, prompt: Any, tries: Tries, plan: Any) -> str:
        return "placement"

    def has_room(self, prompt: Any, plan: Any) -> bool:
        return True

    def abandon(self, tries: Tries, placement: str) -> None:
        self.released.append(placement)


def one_full() -> Fleet:
    """Make a fleet whose one replica computes a prompt, and has one ready."""
    fleet = fleet_of("r1")
    for _ in range(2):
        send(fleet, "r1", time.monotonic())
    return fleet


def room_of(placing: Placing) -> WaitingRoom:
    return WaitingRoom(
        QueueConfig(),
        is_on=True,
        fleet=one_full(),
        place=placing,  # type: ignore[arg-type]
        metrics=Metrics(),
        rules=ONE_AT_A_TIME,
    )


def a_prompt(num_waiting: int = 0) -> Any:
    view = ReplicaView(id=CandidateId("r1"), cost=PRIOR, num_waiting=num_waiting)
    snapshot = Snapshot(
        now_s=0.0, number=0, seed=0, replicas=(view,), request=RequestView(num_tokens=10)
    )
    plan = SimpleNamespace(
        view=view,
        candidate=SimpleNamespace(id=view.id),
        helper=None,
        costs=lambda: candidate_costs(snapshot),
    )
    inbound = SimpleNamespace(caller=ANYBODY)
    read = SimpleNamespace(whose=NO_SESSION, request="any", inbound=inbound, model="tiny")
    return SimpleNamespace(
        read=read,
        num_tokens=10,
        num_more_tokens=0,
        plan=plan,
        service_class=None,
        variant=None,
        deadline_ms=None,
    )


async def test_a_client_that_leaves_as_it_is_placed_gives_its_place_back() -> None:
    """The lease was made, and must not stay."""
    placing, left = Placing(), []
    room = room_of(placing)
    prompt = a_prompt(num_waiting=2)
    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(room.place(prompt, Tries(), left.append))
        await asyncio.sleep(0)
        assert room.num_waiting == 1
        prompt.plan = a_prompt().plan
        room.release()
        assert room.num_waiting == 0
        task.cancel()

    assert placing.released == ["placement"]
    assert left == [prompt.plan]


@pytest.mark.parametrize("error", [NoReplicaAvailable("none"), StopIteration()])
async def test_an_error_while_a_request_waits_is_its_own(error: Exception) -> None:
    """Whatever it is; the release goes on."""
    placing = Placing()
    room = room_of(placing)

    async def fails() -> None:
        with pytest.raises((NoReplicaAvailable, RuntimeError)):
            await room.place(a_prompt(num_waiting=2), Tries(), lambda plan: None)

    async with asyncio.TaskGroup() as tg:
        tg.create_task(fails())
        await asyncio.sleep(0)
        assert room.num_waiting == 1
        placing.error = error
        room.release()

    assert room.num_waiting == 0


async def test_an_error_in_a_release_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was placed before it is given back; who comes next is served."""
    placing, prompt = Placing(), a_prompt(num_waiting=2)
    room = room_of(placing)
    release = Queue.release

    def fail(queue: Queue[Any], *args: Any) -> None:
        prompt.plan = a_prompt().plan  # its window is open now
        release(queue, *args)
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Queue, "release", fail)
        with pytest.raises(ZeroDivisionError):
            await room.place(prompt, Tries(), lambda plan: None)

    assert (room.num_waiting, placing.released) == (0, ["placement"])
    assert await room.place(a_prompt(), Tries(), lambda plan: None) == "placement"


async def test_a_policy_that_goes_astray_fails_the_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went where it was not offered to go; others are served."""
    decide = KvAware.decide

    def astray(policy: KvAware, snapshot: Snapshot) -> Decision:
        decision = decide(policy, snapshot)
        if snapshot.request.num_tokens > 400:
            return replace(decision, candidate=CandidateId("nowhere"))
        return replace(decision, costs=())

    monkeypatch.setattr(KvAware, "decide", astray)
    gate = Gate()
    limit = {DEADLINE_HEADER: "60000"}
    async with one_computing(gate) as (stage, asking):
        tasks = [asking.ask("b", with_headers=limit)]
        await asking.waits(1)
        lost = await asking.ask("c", 500, with_headers=limit)
        gate.end("a", "b")

        assert (lost.status, (await tasks[0]).status) == (500, 200)
        assert "RuntimeError" in stage.log
