"""router.observers.shadows: what others would have done, beside the requests and exactly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from policies import POLICIES, create
from policies.naming import parse
from policies.policy import Policy
from policies.view import Decision, Snapshot
from router.observers.shadows import Shadows, shadow_decisions
from router.observers.shadows.metrics import ShadowMetrics
from router.records.record import DecisionRecord, PrefillRecord
from tests.faults.stage import Engines, Stage, chat, on_stage, records_in, streamed, words
from tests.policies.snapshots import replica, snapshot

ALL = list(POLICIES)


async def sessions(stage: Stage, num: int = 4, num_turns: int = 3) -> None:
    """Have some conversations at once, in turns."""
    for turn in range(num_turns):
        async with asyncio.TaskGroup() as tg:
            for number in range(num):
                texts = [words(number), *(words(100 * number + t, 20) for t in range(2 * turn))]
                headers = {"X-Session-ID": f"s{number}"}
                tg.create_task(stage.ask(streamed(chat(*texts)), headers=headers))


@pytest.mark.parametrize("name", ALL)
async def test_a_record_is_decided_again_identically(name: str, tmp_path: Path) -> None:
    """Offline, from the file alone: by the live policy and by all others that were asked."""
    file = tmp_path / "decisions.jsonl"
    others = [*[other for other in ALL if other != name][:7], "kv_aware:alpha=0.5"]
    settings = {"policy__name": name, "shadow__policies": others, "log__decisions": file}
    async with Engines(3) as engines, on_stage(*engines, **settings) as stage:
        await sessions(stage)
    records = records_in(file)

    assert len(records) == 12
    for record in records:
        live = create(record.policy, record.policy_params)
        assert live.decide(record.snapshot) == record.decision
        assert [shadow.policy for shadow in record.shadows] == others
        for shadow in record.shadows:
            decision = parse(shadow.policy).decide(record.snapshot)
            assert shadow.candidate == decision.candidate
            assert shadow.agrees == (decision.candidate == record.decision.candidate)


async def test_shadows_are_counted_and_change_nothing(tmp_path: Path) -> None:
    """Agreements, sums for shadow and live; requests go as without."""
    file = tmp_path / "decisions.jsonl"
    settings = {"shadow__policies": ["kv_aware", "session_hash"], "log__decisions": file}
    async with Engines(3) as engines, on_stage(*engines, **settings) as stage:
        await sessions(stage)
        await stage.ask(None, "/v1/responses/r1", method="GET")  # no policy's decision
        await stage.until(lambda: stage.metric("warmroute_shadow_decisions_total") == 24)
        named = {"shadow": "session_hash"}
        agreed = stage.metric("warmroute_shadow_decisions_total", agrees="yes", **named)
        ttft_s = {
            choice: stage.metric("warmroute_shadow_ttft_seconds_total", choice=choice, **named)
            for choice in ("live", "shadow")
        }
        recomputed = stage.metric(
            "warmroute_shadow_tokens_total", choice="shadow", kind="recomputed", **named
        )
        same = stage.metric("warmroute_shadow_decisions_total", shadow="kv_aware", agrees="yes")
        assert stage.metric("warmroute_shadow_regret_seconds_count", **named) == 12
        assert stage.metric("warmroute_shadow_dropped_total") == 0
    mine = [shadow for record in records_in(file) for shadow in record.shadows[1:]]

    assert same == 12
    assert agreed == sum(shadow.agrees for shadow in mine)
    assert ttft_s["shadow"] == pytest.approx(sum(shadow.ttft_ms for shadow in mine) / 1000)
    assert ttft_s["live"] - ttft_s["shadow"] == pytest.approx(
        sum(shadow.regret_ms for shadow in mine) / 1000
    )
    assert recomputed == sum(shadow.num_uncached_tokens for shadow in mine)


# -- one after the other -------------------------------------------------------------------------


class Broken(Policy, frozen=True, kw_only=True):
    """A policy with a bug."""

    name = "broken"

    def decide(self, snapshot: Snapshot) -> Decision:
        raise ZeroDivisionError


def record_of(shown: Snapshot, policy: str = "kv_aware") -> DecisionRecord:
    return DecisionRecord(
        request_id="r",
        at=0.0,
        api="chat",
        model="m",
        policy=policy,
        state="exact",
        snapshot=shown,
        decision=create(policy).decide(shown),
        tries=(),
        outcome="ok",
        status=200,
        num_prompt_tokens=shown.request.num_tokens,
        num_predicted_cached_tokens=0,
        num_reported_cached_tokens=None,
        num_completion_tokens=None,
        router_ms=0.1,
        predicted_ttft_ms=None,
        ttft_ms=None,
        total_ms=1.0,
    )


WARM = snapshot(replica("r1", gpu=900, queue_ms=50.0), replica("r2", requests=1), tokens=1000)


def test_regret_is_what_the_shadow_would_have_saved() -> None:
    """In predicted first-token time, alike for both choices."""
    record = record_of(WARM, "least_loaded")
    (shadow,), live = shadow_decisions([("min_ttft", create("min_ttft"))], record)

    assert (record.decision.candidate, shadow.candidate) == ("r2", "r1")
    assert live.ttft_ms == pytest.approx(110.0)  # 10 + 0.1 x 1000
    assert shadow.ttft_ms == pytest.approx(70.0)  # 50 + 10 + 0.1 x 100
    assert shadow.regret_ms == pytest.approx(40.0)
    assert (shadow.num_uncached_tokens, live.num_uncached_tokens) == (100, 1000)


async def test_where_prompts_are_placed_apart_shadows_are_asked_about_these() -> None:
    """What answers is no choice of theirs; a prompt that stays there is written without."""
    decode = record_of(snapshot(replica("d1"), replica("d2"), tokens=1000))
    prompt = record_of(WARM, "least_loaded")
    local = PrefillRecord(result="local", why="cheaper", here_ms=1.0, there_ms=2.0)
    remote = replace(local, result="remote", snapshot=prompt.snapshot, decision=prompt.decision)
    written: list[DecisionRecord] = []
    shadows = Shadows([create("min_ttft")], share=1.0, metrics=ShadowMetrics())

    for prefill in (local, remote):
        shadows.put(replace(decode, prefill=prefill), written.append)
    shadows.close()

    assert [[s.candidate for s in record.shadows] for record in written] == [[], ["r1"]]


async def test_a_share_of_the_decisions_is_put_to_them() -> None:
    """Drawn by the decision's number; the others are written at once."""
    written: list[DecisionRecord] = []
    shadows = Shadows([create("random")], share=0.3, metrics=ShadowMetrics())
    for number in range(1000):
        shadows.put(record_of(replace(WARM, number=number)), written.append)
    at_once = len(written)
    shadows.close()

    assert 600 < at_once < 800
    assert sum(bool(record.shadows) for record in written) == 1000 - at_once


async def test_what_finds_no_room_is_written_without() -> None:
    """Nothing waits for shadows that are behind; it is counted."""
    metrics, written = ShadowMetrics(), list[DecisionRecord]()
    shadows = Shadows([create("random")], share=1.0, metrics=metrics, max_waiting=10)
    for _ in range(25):
        shadows.put(record_of(WARM), written.append)
    assert [record.shadows for record in written] == [()] * 15
    assert metrics.registry.get_sample_value("warmroute_shadow_dropped_total") == 15
    shadows.close()

    assert len(written) == 25
    assert all(record.shadows for record in written[15:])


async def test_the_loop_is_left_to_others_in_between() -> None:
    """A long queue is worked off by and by, in order."""
    written: list[DecisionRecord] = []
    shadows = Shadows([create("kv_aware")], share=1.0, metrics=ShadowMetrics())
    for number in range(500):
        shadows.put(record_of(replace(WARM, number=number)), written.append)
    assert not written
    turns = 0
    async with asyncio.timeout(30):
        while len(written) < 500:
            turns += 1
            await asyncio.sleep(0)

    assert turns > 1
    assert [record.snapshot.number for record in written] == list(range(500))


async def test_a_shadow_with_a_bug_costs_its_answer_only() -> None:
    """The record is written without, and it is counted."""
    metrics, written = ShadowMetrics(), list[DecisionRecord]()
    shadows = Shadows([Broken()], share=1.0, metrics=metrics)
    shadows.put(record_of(WARM), written.append)
    shadows.close()

    assert [record.shadows for record in written] == [()]
    assert metrics.registry.get_sample_value("warmroute_shadow_dropped_total") == 1


def test_a_record_from_before_is_still_read() -> None:
    """Without parameters, arm or shadows; fields that are not known are passed over."""
    packed = msgspec.to_builtins(record_of(WARM))
    for name in ("policy_params", "assignment", "shadows"):
        del packed[name]
    read = msgspec.convert(packed | {"later": 1}, DecisionRecord)

    assert (read.policy_params, read.assignment, read.shadows) == ({}, None, ())
