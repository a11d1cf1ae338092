"""The admin port's pages about sessions, when there are many."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from policies.view import CandidateId
from router.observers.sessions.session_ledger import SessionLedger, Thread
from tests.faults.stage import Engines, on_stage


@pytest.mark.parametrize("kind", ["json", "csv"])
async def test_a_list_of_all_sessions_does_not_hold_the_loop(kind: str) -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        fill(stage.ledger, 10_000)
        gaps: list[float] = []
        reply: asyncio.Task[Any]
        async with asyncio.TaskGroup() as tg:
            path = f"/admin/sessions?order=cost&limit=20000&format={kind}"
            reply = tg.create_task(stage.admin(path))
            before_s = time.thread_time()
            while not reply.done():
                await asyncio.sleep(0)
                now_s = time.thread_time()
                gaps.append(now_s - before_s)
                before_s = now_s

    separator = b"\n" if kind == "csv" else b'"session":'
    assert reply.result().body.count(separator) in (10_000, 10_001)
    assert max(gaps) < 0.1  # at once it takes 0.5 s


def fill(ledger: SessionLedger, num_sessions: int) -> None:
    for number in range(1, num_sessions + 1):
        thread = Thread(
            space=1,
            contract=None,
            keys=[],
            num_tokens=9,
            parts=None,
            candidate=CandidateId("r1"),
            num_emptied=0,
            at_s=0.0,
        )
        ledger.remember(number, None, thread, num_computed=9)
