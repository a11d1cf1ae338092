"""The live feed, through a whole router in front of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from router.observers.live.recent import MAX_LISTENERS
from tests.faults.stage import (
    ONE_AT_A_TIME,
    PATIENCE_S,
    SECRET,
    STUCK,
    Engines,
    Stage,
    chat,
    on_stage,
    streamed,
    words,
)

Line = dict[str, Any]


class Live:
    """An open feed, and the lines that came."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.bytes = b""

    async def next(self, kind: str) -> Line:
        """Read up to the next line of a kind."""
        async with asyncio.timeout(PATIENCE_S):
            async for raw in self._answer.content:
                self.bytes += raw
                line: Line = orjson.loads(raw)
                if line["kind"] == kind:
                    return line
        raise AssertionError(f"the feed ended before a {kind}")


@asynccontextmanager
async def live(stage: Stage, query: str = "", headers: Any = None) -> AsyncIterator[Live]:
    """Follow the feed, from a state on."""
    async with aiohttp.ClientSession() as client:
        url = f"{stage.admin_url}/admin/live{query}"
        async with client.get(url, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            found = Live(answer)
            await found.next("state")
            yield found
            answer.close()


async def test_a_request_is_a_line() -> None:
    """With its session, its causes, and what each candidate would have cost; without its text."""
    async with Engines(2) as engines, on_stage(*engines) as stage, live(stage) as feed:
        reply = await stage.ask(streamed(chat(words(1))))
        line = await feed.next("decision")

    assert line["replica"] == reply.replica
    assert (line["outcome"], line["status"]) == ("ok", 200)
    assert line["reported"] == reply.reported == 0
    assert line["causes"] == {"new": line["tokens"]}
    assert line["sources"] == {"gpu": 0, "cpu": 0, "pool": 0, "computed": line["tokens"]}
    assert line["ttft_ms"] <= line["total_ms"]
    assert {cost["replica"] for cost in line["costs"]} == {"r1", "r2"}
    assert [cost["replica"] for cost in line["costs"] if cost["chosen"]] == [reply.replica]
    assert SECRET.encode() not in feed.bytes


async def test_those_who_ask_get_the_last_requests_first() -> None:
    """No more than are kept, the newest last; others get only what follows."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        asked = [
            (await stage.ask(streamed(chat(words(number))))).headers["x-request-id"]
            for number in range(3)
        ]
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{stage.admin_url}/admin/live?last=2") as answer:
                feed = Live(answer)
                last = [(await feed.next("decision"))["request"] for _ in range(2)]
            async with client.get(f"{stage.admin_url}/admin/live?last=21") as answer:
                refused = answer.status, await answer.text()
        async with live(stage) as feed:
            asked.append((await stage.ask(streamed(chat(words(9))))).headers["x-request-id"])
            only = (await feed.next("decision"))["request"]

    assert last == asked[1:3]
    assert only == asked[3]
    assert refused[0] == 400
    assert "last must be a number from 1 to 20" in refused[1]


async def test_the_next_turn_says_where_its_tokens_came_from() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage, live(stage) as feed:
        await stage.ask(streamed(chat(words(1))))
        await stage.settled(*engines)
        await feed.next("decision")
        reply = await stage.ask(streamed(chat(words(1), "yes", words(2))))
        line = await feed.next("decision")

    assert line["sources"]["gpu"] == reply.reported > 0
    assert sum(line["sources"].values()) == line["tokens"]
    assert len(line["session"]) == 16


async def test_the_state_has_replicas_sessions_and_tokens() -> None:
    async with Engines(2) as engines, on_stage(*engines) as stage, live(stage) as feed:
        await stage.ask(streamed(chat(words(1))))
        await stage.settled(*engines)
        await feed.next("decision")
        state = await feed.next("state")
        while not state["sessions"]["shown"][0]["turns"]:
            state = await feed.next("state")
        polled = (await stage.admin("/admin/state")).json()

    replicas, tokens = state["replicas"], state["tokens"]
    assert replicas["total"] == sum(replicas["by_cache"].values()) == 2
    assert replicas["by_cache"]["exact"] >= 1  # the other one has published nothing yet
    assert [row["id"] for row in replicas["shown"]] == ["r1", "r2"]
    assert sum(row["num_gpu_blocks"] for row in replicas["shown"]) > 0
    assert sum(row["audited"] for row in replicas["shown"]) == 1
    assert tokens["totals"][tokens["columns"].index("new")] > 0
    assert sum(step[1 + tokens["columns"].index("new")] for step in tokens["steps"]) > 0
    assert state["sessions"]["total"] == 1
    assert state["queue"]["waiting"] == 0
    assert state["tenants"] is None
    assert polled["replicas"]["total"] == 2
    assert SECRET.encode() not in feed.bytes


async def test_the_state_says_who_waits() -> None:
    """The replica takes one prompt at a time; the next ones wait in the router."""
    on: Any = {"queue__mode": "on", "queue_rules": ONE_AT_A_TIME, "health__interval_s": 60.0}
    async with Engines(1, time_model=STUCK) as engines, on_stage(*engines, **on) as stage:
        async with live(stage) as feed, AsyncExitStack() as stack:
            for number in range(3):
                await stack.enter_async_context(stage.hanging_up(streamed(chat(words(number)))))
            state = await feed.next("state")
            while state["queue"]["waiting"] < 2:
                state = await feed.next("state")
            queue = state["queue"]

    assert queue["on"]
    assert queue["for"] == {"window": 2}
    assert [each["for"] for each in queue["shown"]] == ["window"] * 2
    assert queue["shown"][0]["tokens"] > 0
    assert [each["before"] for each in queue["shown"]] == [0, 1]
    assert all(0.0 < each["late_s"] <= 570.0 for each in queue["shown"])


async def test_a_listener_that_wants_few_lines_loses_the_rest() -> None:
    """What was lost is counted, and said."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        async with live(stage, "?per_s=1") as feed:
            asked = (streamed(chat(words(number, 5))) for number in range(20))
            await asyncio.gather(*(stage.ask(body) for body in asked))
            await feed.next("decision")
            lost = await feed.next("lost")

    assert 1 <= lost["decisions"] <= 19


async def test_too_many_listeners_are_refused_and_leave_no_trace() -> None:
    async with (
        Engines(1) as engines,
        on_stage(*engines) as stage,
        aiohttp.ClientSession() as client,
    ):
        url = f"{stage.admin_url}/admin/live"
        open_ = [await client.get(url) for _ in range(MAX_LISTENERS)]
        refused = await stage.admin("/admin/live")
        for answer in open_:
            answer.close()
        await stage.until(lambda: stage.num_following == 0)

    assert refused.status == 503
    assert str(MAX_LISTENERS) in refused.error["message"]


@pytest.mark.parametrize("per_s", ["0", "501", "1000000", "-1", "many", ""])
async def test_a_rate_that_makes_no_sense_is_refused(per_s: str) -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        reply = await stage.admin(f"/admin/live?per_s={per_s}")

    assert (reply.status, reply.error["param"]) == (400, "per_s")


async def test_the_feed_is_for_operators(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}-token")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=file) as stage:
        refused = [(await stage.admin(f"/admin/{path}")).status for path in ("live", "state")]
        async with live(stage, headers={"Authorization": f"Bearer {SECRET}-token"}):
            pass

    assert refused == [401, 401]


async def test_an_open_feed_does_not_hold_up_the_routers_end() -> None:
    """The stage ends while the client still reads."""
    async with aiohttp.ClientSession() as client, asyncio.timeout(PATIENCE_S):
        async with Engines(1) as engines, on_stage(*engines) as stage:
            answer = await client.get(f"{stage.admin_url}/admin/live")
            assert await answer.content.readline()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
