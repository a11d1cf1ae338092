"""router.request.record: a record from which the decision can be made again, and audited.

What waits for events: each has its end, whatever another one does.

router.request.results: what a request keeps while its answer takes its time.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from policies.registry import create
from router.api.openai import ChatRequest
from router.request import record as settling
from router.request.record import Settling
from tests.faults.stage import (
    SLOW,
    Engines,
    arm,
    chat,
    holder,
    num_running,
    on_stage,
    records_in,
    streamed,
    words,
)


async def test_a_record_reproduces_its_decision(tmp_path: Path) -> None:
    """Snapshot in, same decision out; predictions beside what was reported."""
    file = tmp_path / "decisions.jsonl"
    async with Engines(3) as engines, on_stage(*engines, log__decisions=file) as stage:
        replies = []
        for number in (1, 2, 1, 3, 2, 1):
            replies.append(await stage.ask(streamed(chat(words(number), max_tokens=8))))
            await stage.settled(*engines)

    policy = create("kv_aware")
    records = records_in(file)
    assert len(records) == len(replies)
    for number, (record, reply) in enumerate(zip(records, replies, strict=True)):
        assert policy.decide(record.snapshot) == record.decision
        assert record.snapshot.number == number
        assert record.decision.candidate == reply.replica
        assert record.request_id == reply.headers["x-warmroute-request-id"]
        assert record.num_predicted_cached_tokens == reply.predicted
        assert record.num_reported_cached_tokens == reply.reported
        assert record.num_prompt_tokens == reply.usage["prompt_tokens"]
        assert record.num_completion_tokens == reply.usage["completion_tokens"]
        assert (record.outcome, record.status) == ("ok", 200)
        assert record.ttft_ms is not None
        assert 0 < record.ttft_ms <= record.total_ms


async def test_a_record_tells_every_try(tmp_path: Path) -> None:
    """Where it was sent first and why it did not stay; no first token where none was seen."""
    file = tmp_path / "decisions.jsonl"
    async with Engines(2) as engines, on_stage(*engines, log__decisions=file) as stage:
        first = await stage.ask(chat(words(1)))
        await stage.settled(*engines)
        arm(holder(stage, first, engines), "status", status=503, count=1)
        second = await stage.ask(chat(words(1)))

    record = records_in(file)[1]
    assert [(each.candidate, each.failure) for each in record.tries] == [
        (first.replica, "status_503"),
        (second.replica, None),
    ]
    assert record.ttft_ms is None


async def test_metrics_add_up() -> None:
    """Prompt, predicted and reported tokens by replica; stages; requests by outcome."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for _ in range(3):
            reply = await stage.ask(streamed(chat(words(1))))
            await stage.settled(*engines)
        tokens = {
            kind: stage.metric("warmroute_tokens_total", replica="r1", kind=kind)
            for kind in ("prompt", "predicted_cached", "predicted_cpu", "reported_cached")
        }

        assert tokens["prompt"] == 3 * reply.usage["prompt_tokens"]
        assert tokens["predicted_cached"] == tokens["reported_cached"] == 2 * reply.reported
        assert tokens["predicted_cpu"] == 0  # these replicas have no offload of their own
        assert stage.metric("warmroute_requests_total", api="chat", outcome="ok") == 3
        assert stage.metric("warmroute_stage_seconds_count", stage="total") == 3
        assert stage.metric("warmroute_ttft_seconds_count", replica="r1") == 3
        assert stage.metric("warmroute_ttft_prediction_error_seconds_count") == 3
        assert stage.metric("warmroute_audit_error_tokens_sum") == 0


def test_one_that_raises_ends_no_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and dropped, also where it is asked at once: a request's end calls that."""
    asked: list[bool] = []

    def raises(is_last: bool) -> bool:
        raise ValueError("secret")

    def settle(is_last: bool) -> bool:
        asked.append(is_last)
        return is_last

    waiting = Settling()
    for each in (settle, raises, settle):
        waiting.add(each, until_s=2.0)
    waiting.sweep(1.0)
    waiting.sweep(3.0)
    waiting.sweep(4.0)
    monkeypatch.setattr(settling, "MAX_WAITING", 0)
    waiting.add(raises, until_s=9.0)

    assert asked == [False, False, True, True]
    assert [record.message for record in caplog.records] == ["an answer was not settled"] * 2
    assert "secret" not in caplog.text


async def test_what_was_parsed_is_let_go_of_before_the_answer() -> None:
    """The body stays, for another replica; its messages as objects do not."""
    async with Engines(1, time_model=SLOW) as (engine,), on_stage(engine) as stage:
        async with stage.asking(streamed(chat(words(7), max_tokens=200))) as answer:
            await stage.until(lambda: num_running(engine))
            kept = [o for o in gc.get_objects() if isinstance(o, ChatRequest)]

            assert answer.status == 200
            assert kept
            assert not [request for request in kept if "n7w1" in str(request.messages)]
