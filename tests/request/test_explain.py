"""`POST /admin/explain`: what the queue would do with a request."""

from __future__ import annotations

import time

from policies.view import CandidateId
from tests.faults.stage import ONE_AT_A_TIME, STUCK, Engines, chat, on_stage, streamed, words


async def test_it_says_whether_a_request_would_wait_and_for_what() -> None:
    body = chat(words(9))
    async with (
        Engines(1, time_model=STUCK) as engines,
        on_stage(*engines, queue__mode="on", queue_rules=ONE_AT_A_TIME) as stage,
    ):
        goes = (await stage.admin("/admin/explain", body)).json()["queue"]
        async with stage.hanging_up(streamed(chat(words(1)))):
            await stage.until(lambda: stage.metric("warmroute_inflight_requests") == 1)
            waits = (await stage.admin("/admin/explain", body)).json()["queue"]

    assert (goes["goes_at_once"], goes["why"], goes["num_waiting"]) == (True, "room", 0)
    assert (waits["goes_at_once"], waits["why"], waits["num_waiting"]) == (False, "window", 0)
    assert goes["class"] == waits["class"] == "interactive"
    assert waits["expected_ttft_ms"] > 0


async def test_it_says_who_takes_the_room() -> None:
    """A conversation that does not fit beside another waits for it."""
    async with (
        Engines(1, num_gpu_blocks=160, max_model_len=2400) as engines,
        on_stage(*engines, queue__mode="on") as stage,
    ):
        found, r1 = stage.router.fleet.conversations, CandidateId("r1")
        found.begin(1, r1, 2_500, 0, time.monotonic(), cost_s=1_000.0)
        waits = (await stage.admin("/admin/explain", chat(words(2, 300)))).json()["queue"]

    assert (waits["goes_at_once"], waits["why"], waits["where"]) == (False, "room", "r1")
    assert 2000 <= waits["capacity_tokens"] < 3000
    assert waits["num_sessions"] == 1
    assert waits["num_session_tokens"] > 1000
