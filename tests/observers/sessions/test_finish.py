"""`POST /finish_session`, through a whole router: it ends the caller's session, at all routers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic

import pytest

from loadtest.engine_model.time_model import TimeModel
from policies.view import CandidateId
from router.api.sessions import session_hash
from router.cluster.outbox import LATER_S
from router.observers.sessions.finish import FinishRoute
from router.observers.sessions.session_ledger import SessionLedger
from tests.faults.stage import SECRET, Engines, Json, Reply, Stage, chat, on_stage, on_stages, words
from tests.faults.stage import streamed as answered
from tests.faults.tenants import A, B, tenants_file
from tests.redis_servers import Start

NAME = f"{SECRET}-rollout 1"
UNNAMED = {"X-Session-ID": ""}


def num_live(stage: Stage) -> int:
    """Conversations with a place in the working set of the only replica."""
    return stage.router.conversations.working_set("r1").num_sessions  # type: ignore[arg-type]


async def turn(stage: Stage, headers: Json, *texts: str, **fields: int) -> None:
    body = answered(chat(*(texts or [words(1)]), **fields))
    reply = await stage.ask(body, headers=headers)
    assert reply.status == 200


async def known(stage: Stage, name: str) -> Json:
    stage.router.story.steps.settling.close()  # what waits for events has none to come
    found: Json = (await stage.admin(f"/admin/sessions/{name}")).json()
    return found


async def finish(
    stage: Stage, query: str = "", body: Json | bytes | None = None, headers: Json | None = None
) -> Reply:
    headers = UNNAMED | (headers or {})
    return await stage.ask(body, f"/finish_session{query}", headers=headers)


@pytest.mark.parametrize(
    ("query", "body", "headers"),
    [
        (f"?session_id={NAME.replace(' ', '%20')}", None, {}),
        (f"?session_id={NAME.replace(' ', '+')}", b"", {"X-Session-ID": "another"}),
        ("", {"session_id": NAME, "reason": "done"}, {"X-Session-ID": "another"}),
        ("", None, {"X-Dynamo-Session-ID": NAME}),
        ("", {}, {"X-Correlation-ID": NAME}),
    ],
    ids=["query", "query_first", "body", "header", "late_header"],
)
async def test_a_finished_session_gives_its_place_back(
    query: str, body: Json | bytes | None, headers: Json
) -> None:
    """The answer is vllm-router's. The session goes on as any other if its client resumes it."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await turn(stage, UNNAMED | {"X-SMG-Routing-Key": NAME})
        await stage.settled(engine)
        before = num_live(stage)
        reply = await finish(stage, query, body, headers)
        after = num_live(stage)
        has_ended = (await known(stage, NAME))["ended"]
        metric = stage.metric("warmroute_finished_sessions_total", result="ended")
        await turn(stage, UNNAMED | {"X-SMG-Routing-Key": NAME}, words(1), "yes", words(2))
        resumed = await known(stage, NAME)

    assert (before, after) == (1, 0)
    assert (reply.status, reply.json()) == (200, {"status": "ok", "session_id": NAME})
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.headers["x-warmroute-request-id"]
    assert has_ended
    assert metric == 1
    assert not resumed["ended"]
    assert "unknown" not in resumed["turns_shown"][-1]["computed"]["tokens"]


async def test_sub_agents_end_alone_and_with_their_parent() -> None:
    child = {"X-Session-ID": "below", "X-Parent-Session-ID": NAME}
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        live = []
        for name in ("below", NAME):
            await turn(stage, {"X-Session-ID": NAME})
            await turn(stage, child, words(2))
            await stage.settled(engine)
            before = num_live(stage)
            await finish(stage, f"?session_id={name}")
            live.append((before, num_live(stage)))
            (below,) = (await known(stage, NAME))["children"]
            assert below["ended"]

    assert live == [(2, 1), (2, 0)]


async def test_a_waiting_prompt_gets_room_when_a_session_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache is full of two sessions, one of which computes; a third waits for room."""
    keeps = "router.scheduling.conversations.Conversations._hold_s"
    monkeypatch.setattr(keeps, lambda *_: 1e6)  # every pause is worth its room
    slow = TimeModel(base_ms=50.0)
    one, two, three = ({"X-Session-ID": f"{NAME} {number}"} for number in range(3))
    settings = {"queue__mode": "on", "health__interval_s": 60.0}
    async with (
        Engines(1, num_gpu_blocks=64, time_model=slow, reply_tokens=200) as (engine,),
        on_stage(engine, **settings) as stage,
        asyncio.TaskGroup() as tg,
    ):
        for texts in ((words(1, 130),), (words(1, 130), "yes", words(2, 20))):
            await turn(stage, one, *texts)
            await stage.settled(engine)
        busy = tg.create_task(turn(stage, two, words(3), max_tokens=200))
        await stage.until(lambda: num_live(stage) == 2)
        known_elsewhere = session_hash(three["X-Session-ID"], "tiny")  # a new one would not wait
        stage.router.fleet.conversations.learn(known_elsewhere, CandidateId("r1"), 0, monotonic())
        waits = tg.create_task(turn(stage, three, words(4)))
        await stage.until(lambda: stage.metric("warmroute_waiting_requests") == 1)
        await stage.until(lambda: stage.metric("warmroute_inflight_uncached_tokens") == 0)
        await stage.admin("/admin/state")  # a first token has come, and the queue was looked at
        still_waits = stage.metric("warmroute_waiting_requests") == 1
        await finish(stage, headers=one)
        await waits
        was_busy = not busy.done()
        third = (await known(stage, three["X-Session-ID"]))["turns_shown"][-1]
        busy.cancel()

    assert still_waits
    assert was_busy
    assert third["waited_for"] == "room"


async def test_an_unknown_session_is_no_error() -> None:
    """Harnesses finish sessions twice, and after they expired."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        replies = [await finish(stage, "?session_id=nobody") for _ in range(2)]
        odd = await finish(stage, headers={"X-Session-ID": "\x80\xff"})

    assert [reply.status for reply in (*replies, odd)] == [200, 200, 200]


async def test_a_client_ends_its_own_sessions_alone(tmp_path: Path) -> None:
    """Two tenants use the same session id; what a tenant is told does not depend on the other."""
    path = tenants_file(tmp_path)
    async with Engines(1) as (engine,), on_stage(engine, tenants__file=path) as stage:
        for tenant in (A, B):
            await turn(stage, tenant | {"X-Session-ID": NAME})
        before = num_live(stage)
        refused = await finish(stage, f"?session_id={NAME}", headers={"Authorization": "Bearer no"})
        still = num_live(stage)
        mine = await finish(stage, f"?session_id={NAME}", headers=A)
        others = num_live(stage)
        again = await finish(stage, f"?session_id={NAME}", headers=A)

    assert (before, still, others) == (2, 2, 1)
    assert refused.status == 401
    assert mine.status == 200
    assert mine.body == again.body


async def test_it_ends_at_all_routers(start_redis: Start) -> None:
    """The turn went to the one router, the call goes to the other, as through a load balancer."""
    async with (
        Engines(1) as (engine,),
        on_stages(engine, redis=start_redis()) as (one, other),
    ):
        await turn(one, {"X-Session-ID": NAME})
        await one.until(lambda: num_live(one) == 1)
        reply = await finish(other, f"?session_id={NAME}")
        await one.until(lambda: num_live(one) == 0)

    assert reply.status == 200


async def test_other_routers_are_told_of_a_session_that_is_unknown_here() -> None:
    """Its last turn may have ended there this moment."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        router, told = stage.router, []
        route = FinishRoute(
            SessionLedger(), router.fleet, router.config.session.read, router.metrics
        )
        route.tell = lambda note, _: told.append(note)
        assert not route.finish(NAME, "")

    assert [note.conversation for note in told] == [session_hash(NAME, "")]


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("POST", None, 400),
        ("POST", b"{}", 400),
        ("POST", SECRET.encode(), 400),
        ("POST", b'["session_id"]', 400),
        ("POST", b'{"session_id": 5}', 400),
        ("POST", b'{"session_id": "' + b"s" * 20_000 + b'"}', 400),
        ("POST", b'{"a": ' + b"[" * 100_000, 400),
        ("GET", None, 405),
        ("OPTIONS", None, 405),
    ],
)
async def test_garbage_is_refused_and_not_quoted(
    method: str, body: bytes | None, status: int
) -> None:
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        reply = await stage.ask(body, "/finish_session", method=method, headers=UNNAMED)

    assert reply.status == status
    assert SECRET not in reply.error["message"]


async def test_calls_that_come_together_are_one_message(start_redis: Start) -> None:
    """Other routers learn of all within a moment; no call is urgent."""
    async with Engines(1) as engines, on_stages(*engines, redis=start_redis()) as stages:
        outbox = stages[0].router.cluster.outbox
        assert outbox is not None
        pauses: list[float] = []
        outbox.on_note = pauses.append
        for number in range(20):
            assert (await finish(stages[0], f"?session_id={number}")).status == 200
        assert pauses.count(LATER_S) >= 20
