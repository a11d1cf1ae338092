"""Hooks of agents, through a whole router: they change who has room, and what a cause is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loadtest.engine_model.time_model import TimeModel
from router.tenants.client_keys import digest_of, written
from tests.faults.stage import (
    SECRET,
    Engines,
    Json,
    Reply,
    Stage,
    chat,
    on_stage,
    on_stages,
    streamed,
    words,
)
from tests.faults.tenants import A, B, tenants_file
from tests.redis_servers import Start

R1 = "r1"


def hook(event: str, session: str, **more: Any) -> Json:
    """A hook as agents send it, with what the router must not read."""
    private = {"cwd": f"/home/{SECRET}", "transcript_path": f"/{SECRET}.jsonl"}
    return {"hook_event_name": event, "session_id": session} | private | more


async def tell(stage: Stage, agent: str, event: str, session: str, **more: Any) -> None:
    reply = await stage.admin(f"/hooks/{agent}", hook(event, session, **more))
    assert (reply.status, reply.body) == (204, b"")


def answered(*texts: str, **fields: Any) -> Json:
    return streamed(chat(*texts, **fields))


async def turn(stage: Stage, *texts: str, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await stage.ask(answered(*texts), headers=named)


def num_live(stage: Stage) -> int:
    """Conversations with a place in the working set of the only replica."""
    return stage.router.conversations.at(R1).num_sessions  # type: ignore[arg-type]


def num_own_tokens(stage: Stage) -> int:
    return stage.router.conversations.at(R1).num_tokens  # type: ignore[arg-type]


async def known(stage: Stage, name: str) -> Json:
    found: Json = (await stage.admin(f"/admin/sessions/{name}")).json()
    return found


async def last_turn(stage: Stage, name: str) -> Json:
    """The last turn of a session."""
    stage.router.story.steps.settling.close()  # what waits for events has none to come
    found: Json = (await known(stage, name))["turns_shown"][-1]
    return found


def session(name: str) -> str:
    return f"{SECRET} {name}"


async def test_a_waiting_prompt_gets_room_when_a_session_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache is full of two sessions, one of which computes; a third waits for room."""
    monkeypatch.setattr("router.scheduling.queue.PATIENCE", 1e9)  # no idle time is enough
    slow = TimeModel(base_ms=50.0)
    one, two, three = map(session, ("one", "two", "three"))
    settings = {"queue__mode": "on", "health__interval_s": 60.0}
    async with (
        Engines(1, num_gpu_blocks=64, time_model=slow, reply_tokens=200) as (engine,),
        on_stage(engine, **settings) as stage,
        asyncio.TaskGroup() as tg,
    ):
        for text in ((words(1, 130),), (words(1, 130), "yes", words(2, 20))):
            await turn(stage, *text, X_Session_ID=one)
            await stage.settled(engine)
        busy = tg.create_task(
            stage.ask(answered(words(3), max_tokens=200), headers={"X-Session-ID": two})
        )
        await stage.until(lambda: num_live(stage) == 2)
        waits = tg.create_task(turn(stage, words(4), X_Session_ID=three))
        await stage.until(lambda: stage.metric("warmroute_waiting_requests") == 1)
        await stage.until(lambda: stage.metric("warmroute_inflight_uncached_tokens") == 0)
        await stage.admin("/admin/state")  # a first token has come, and the queue was looked at
        still_waits = stage.metric("warmroute_waiting_requests") == 1
        await tell(stage, "claude", "SessionEnd", one)
        await waits
        was_busy = not busy.done()
        third = await last_turn(stage, three)
        busy.cancel()

    assert still_waits
    assert was_busy
    assert third["waited_for"] == "room"


@pytest.mark.parametrize(
    ("agent", "headers"),
    [
        ("claude", {"x_claude_code_session_id": "s"}),
        ("codex", {"session_id": "s", "thread_id": "s"}),
        ("opencode", {"x_session_affinity": "s"}),
    ],
    ids=["claude", "codex", "opencode"],
)
async def test_an_ended_session_gives_its_place_back(agent: str, headers: dict[str, str]) -> None:
    """It goes on as any other if its agent resumes it."""
    name = f"{SECRET}-s"
    headers = {"X_Session_ID": ""} | dict.fromkeys(headers, name)
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await turn(stage, words(1), **headers)
        await stage.settled(engine)
        before = num_live(stage)
        await tell(stage, agent, "SessionEnd", name, reason="other")
        after = num_live(stage)
        ended = await known(stage, name)
        await turn(stage, words(1), "yes", words(2), **headers)
        resumed = await last_turn(stage, name)
        metric = stage.metric("warmroute_agent_hooks_total", agent=agent, result="ended")
        log = stage.log

    assert (before, after) == (1, 0)
    assert ended["ended"]
    assert ended["turns"] == 1
    assert "unknown" not in resumed["computed"]["tokens"]
    assert metric == 1
    assert "agent's hook what=ended" in log


@pytest.mark.parametrize(
    ("agent", "main", "child"),
    [
        (
            "claude",
            {"x_claude_code_session_id": "s"},
            {"x_claude_code_session_id": "s", "x_claude_code_agent_id": "a"},
        ),
        (
            "codex",
            {"session_id": "s", "thread_id": "s"},
            {"session_id": "s", "thread_id": "a", "x_codex_parent_thread_id": "s"},
        ),
        (
            "opencode",
            {"x_session_affinity": "s"},
            {"x_session_affinity": "a", "x_parent_session_id": "s"},
        ),
    ],
    ids=["claude", "codex", "opencode"],
)
async def test_a_sub_agent_that_stops_ends_alone(
    agent: str, main: dict[str, str], child: dict[str, str]
) -> None:
    """And with its parent, if that ends."""
    main, child = (
        {"X_Session_ID": ""} | {key: f"{SECRET}-{value}" for key, value in headers.items()}
        for headers in (main, child)
    )
    parent, id_ = f"{SECRET}-s", f"{SECRET}-a"
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        live = []
        for event, more in (("SubagentStop", {"agent_id": id_}), ("SessionEnd", {})):
            await turn(stage, words(1), **main)
            await turn(stage, words(2), **child)
            await stage.settled(engine)
            await tell(stage, agent, "SubagentStart", parent, agent_id=id_, agent_type="Explore")
            before = num_live(stage)
            await tell(stage, agent, event, parent, last_assistant_message=SECRET, **more)
            live.append((before, num_live(stage)))
            (below,) = (await known(stage, parent))["children"]
            assert below["ended"]

    assert live == [(2, 1), (2, 0)]


async def test_a_compacted_session_has_its_place_again_with_its_next_turn() -> None:
    """That turn's change is said to be a compaction, although its prompt is longer."""
    name = session("one")
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await turn(stage, words(1), "yes", words(2), X_Session_ID=name)
        await stage.settled(engine)
        await tell(stage, "claude", "PreCompact", name, trigger="auto")
        before = num_own_tokens(stage)
        await tell(stage, "claude", "PostCompact", name, compact_summary=SECRET)
        after, live = num_own_tokens(stage), num_live(stage)
        await turn(stage, words(8, 300), "yes", words(9), X_Session_ID=name)
        at_last = num_own_tokens(stage)
        found = await last_turn(stage, name)

    assert before > 100  # the request for a summary needs them
    assert (after, live) == (0, 1)
    assert at_last > 900
    assert found["computed"]["change"]["part"] == "compacted"


async def test_a_hook_is_about_the_sessions_of_its_tenant(tmp_path: Path) -> None:
    """Two tenants use the same session id; without a tenant, both of them end."""
    name, path = session("one"), tenants_file(tmp_path)
    async with Engines(1) as (engine,), on_stage(engine, tenants__file=path) as stage:
        live = []
        for query in ("?tenant=a", ""):
            for tenant in (A, B):
                headers = tenant | {"X-Session-ID": name}
                await stage.ask(answered(words(1)), headers=headers)
            await stage.settled(engine)
            await stage.admin(f"/hooks/claude{query}", hook("SessionEnd", name))
            live.append(num_live(stage))
        wrong = await stage.admin("/hooks/claude?tenant=nobody", hook("SessionEnd", name))

    assert live == [1, 0]
    assert (wrong.status, wrong.error["param"]) == (400, "tenant")


async def test_an_agent_is_not_disturbed_by_what_is_unknown() -> None:
    """A session that the router does not know, events that have no effect here."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await tell(stage, "claude", "SessionEnd", session("nobody"))
        await tell(stage, "codex", "PostCompact", session("nobody"))
        await tell(stage, "claude", "PostToolUse", session("nobody"), tool_input={"a": SECRET})
        unknown = stage.metric("warmroute_agent_hooks_total", result="unknown")
        ignored = stage.metric("warmroute_agent_hooks_total", result="ignored")

    assert (unknown, ignored) == (2, 1)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "hook_event_name"),
        (SECRET.encode(), 400, "hook_event_name"),
        (b"[]", 400, "hook_event_name"),
        (b"{}", 400, "hook_event_name"),
        (b'{"hook_event_name": "SessionEnd"}', 400, "session_id"),
        (b'{"hook_event_name": "SessionEnd", "session_id": ""}', 400, "session_id"),
        (b'{"hook_event_name": "SessionEnd", "session_id": 5}', 400, "session_id"),
        (b'{"hook_event_name": "SubagentStop", "session_id": "s"}', 400, "agent_id"),
        (b'{"hook_event_name": "X", "session_id": "s", "a": ' + b"[" * 100_000, 400, "send"),
        (b'{"hook_event_name": "X", "session_id": "' + b"s" * 600_000, 413, "524,288"),
    ],
    ids=[
        "empty",
        "text",
        "list",
        "object",
        "session",
        "no_id",
        "number",
        "sub_agent",
        "deep",
        "large",
    ],
)
async def test_garbage_is_refused_and_not_quoted(body: bytes, status: int, said: str) -> None:
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        reply = await stage.admin("/hooks/claude", body)

    assert reply.status == status
    assert said in reply.error["message"]
    assert SECRET not in reply.error["message"]


async def test_a_hook_needs_the_admin_token(tmp_path: Path) -> None:
    """And comes from no web page."""
    path = tmp_path / "token"
    path.write_text(f"{SECRET}-token")
    token = {"Authorization": f"Bearer {SECRET}-token"}
    async with Engines(1) as (engine,), on_stage(engine, admin__token_file=path) as stage:
        statuses = [
            (await stage.admin("/hooks/claude", hook("SessionEnd", "s"), headers)).status
            for headers in ({}, token, token | {"Origin": "http://elsewhere"})
        ]

    assert statuses == [401, 204, 403]


async def test_a_hook_at_one_router_counts_at_all(start_redis: Start) -> None:
    """Turns went to the one router, the hook goes to the other."""
    name = session("one")
    async with (
        Engines(1) as (engine,),
        on_stages(engine, redis=start_redis()) as (one, other),
    ):
        await turn(one, words(1), "yes", words(2), X_Session_ID=name)
        await one.until(lambda: num_own_tokens(other) > 100 and num_own_tokens(one) > 100)
        await tell(other, "claude", "PostCompact", name)
        await one.until(lambda: num_own_tokens(one) == num_own_tokens(other) == 0)
        await one.until(lambda: other.leftovers() == [])
        await tell(other, "claude", "SessionEnd", name)
        await one.until(lambda: num_live(one) == num_live(other) == 0)
        ended = await known(one, name)

    assert ended["ended"]


async def test_the_last_of_many_tenants_is_found(tmp_path: Path) -> None:
    """Whose session it is, a hook does not say; requests are served in between."""
    name, key = session("one"), f"sk-{SECRET}-last"
    more = [
        f"{{name: t{number}, keys: ['{written(digest_of(f'sk-{SECRET}-{number}'))}']}}"
        for number in range(250)
    ]
    more.append(f"{{name: last, keys: ['{written(digest_of(key))}']}}")
    path = tenants_file(tmp_path, *more)
    async with Engines(1) as (engine,), on_stage(engine, tenants__file=path) as stage:
        headers = {"Authorization": f"Bearer {key}", "X-Session-ID": name}
        await stage.ask(answered(words(1)), headers=headers)
        before = num_live(stage)
        await tell(stage, "claude", "SessionEnd", name)
        after = num_live(stage)

    assert (before, after) == (1, 0)
