"""`POST /finish_session`, through a whole router: it ends the caller's session, at all routers."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.api.sessions import session_hash
from router.observers.sessions.hooks import Hooks
from router.observers.sessions.session_ledger import SessionLedger
from tests.faults.stage import SECRET, Engines, Json, Reply, Stage, chat, on_stage, on_stages, words
from tests.faults.stage import streamed as answered
from tests.faults.tenants import A, B, tenants_file
from tests.redis_servers import Start

NAME = f"{SECRET}-rollout 1"
UNNAMED = {"X-Session-ID": ""}


def num_live(stage: Stage) -> int:
    """Conversations with a place in the working set of the only replica."""
    return stage.router.conversations.at("r1").num_sessions  # type: ignore[arg-type]


async def turn(stage: Stage, headers: Json) -> None:
    reply = await stage.ask(answered(chat(words(1))), headers=headers)
    assert reply.status == 200


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
    """The answer is vllm-router's."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await turn(stage, UNNAMED | {"X-SMG-Routing-Key": NAME})
        before = num_live(stage)
        reply = await finish(stage, query, body, headers)
        after = num_live(stage)
        ended = (await stage.admin(f"/admin/sessions/{NAME}")).json()["ended"]
        metric = stage.metric("warmroute_agent_hooks_total", agent="finish_session", result="ended")

    assert (before, after) == (1, 0)
    assert (reply.status, reply.json()) == (200, {"status": "ok", "session_id": NAME})
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.headers["x-warmroute-request-id"]
    assert ended
    assert metric == 1


async def test_an_unknown_session_is_no_error() -> None:
    """Harnesses finish sessions twice, and after they expired."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        replies = [await finish(stage, "?session_id=nobody") for _ in range(2)]
        odd = await finish(stage, headers={"X-Session-ID": "\x80\xff"})

    assert [reply.status for reply in (*replies, odd)] == [200, 200, 200]


async def test_a_client_ends_its_own_sessions_alone(tmp_path: Path) -> None:
    """Two tenants use the same session id; what a tenant is told does not depend on the other."""
    path = tenants_file(tmp_path, a="requests_per_minute: 1")
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
    assert mine.status == 200  # no engine computed for it: it is not counted to the tenant's limit
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
    """Its last turn may have ended there this moment. An agent's hook is not passed on then."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        hooks, told = Hooks(SessionLedger(), stage.router.fleet), []
        hooks.tell = lambda note, _: told.append(note)
        for is_told in (False, True):
            assert not await hooks.apply(NAME, ("",), "ended", tells_unknown=is_told)

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
