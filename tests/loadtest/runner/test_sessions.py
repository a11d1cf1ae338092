"""The driver against a scripted engine on a socket: what it sends, measures and survives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from loadtest.agents import Profile, make_sessions
from loadtest.results import Predicted, TurnResult, parse_predicted, summarize
from loadtest.runner.sessions import drive
from tests.faults.fake_engine import FakeEngine, hang_up
from tests.loadtest.runner.samples import DONE, answer, event, usage

PROFILE = Profile(num_sessions=3, num_turns=3, turns_sigma=0.0, scale_tokens=0.02, scale_time=0.0)
SAID = [event({"choices": [{"delta": {"content": text}}]}) for text in ("ok ", "then")]
HEADERS = {
    "x-warmroute-replica": "r1",
    "x-warmroute-cached": "gpu=60;cpu=0;pool=4",
    "x-warmroute-ms": "0.7",
    "x-warmroute-policy": "kv_aware",
}


async def said(request: web.Request) -> web.StreamResponse:
    return await answer(request, *SAID, usage(prompt=100, output=2, cached=60), DONE, **HEADERS)


def bodies(engine: FakeEngine) -> list[dict[str, Any]]:
    return [json.loads(received.body) for received in engine.received]


async def test_drives_every_turn_and_measures() -> None:
    """Every turn is sent once, with usage asked for, and its figures come back."""
    seen: list[TurnResult] = []

    async with FakeEngine(said) as engine:
        results = await drive(engine.url, make_sessions(PROFILE), on_result=seen.append)

    assert results == seen
    assert len(results) == len(engine.received) >= 9
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies(engine))
    first = results[0]
    assert first.error is None
    assert (first.status, first.replica, first.policy) == (200, "r1", "kv_aware")
    assert first.router_ms == 0.7
    assert first.predicted == Predicted(gpu=60, cpu=0, pool=4)
    assert first.num_computed_tokens == 40
    assert first.ttft_s is not None
    assert 0 < first.ttft_s <= first.total_s
    assert engine.received[0].headers["content-type"] == "application/json"
    assert "x-session-id" not in engine.received[0].headers


async def test_replies_go_into_the_next_turn() -> None:
    """Closed loop: the streamed text is the assistant's message; scripted drives ignore it."""
    async with FakeEngine(said) as engine:
        await drive(engine.url, make_sessions(PROFILE))
        texts = _assistant_texts(bodies(engine))
        engine.received.clear()

        await drive(engine.url, make_sessions(PROFILE), scripted=True)

    assert texts == {"ok then"}
    assert "ok then" not in _assistant_texts(bodies(engine))


async def test_bounds_concurrency_and_names_sessions() -> None:
    """One session at a time: its requests come one after the other, with its id in the header."""
    profile = Profile(num_sessions=3, num_turns=2, turns_sigma=0.0, scale_tokens=0.02,
                      scale_time=0.0, sub_agent_share=0.0)  # fmt: skip

    async with FakeEngine(said) as engine:
        await drive(
            engine.url, make_sessions(profile), concurrency=1, session_header="x-session-id"
        )

    assert [received.headers["x-session-id"] for received in engine.received] == [
        "s0", "s0", "s1", "s1", "s2", "s2",
    ]  # fmt: skip


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=503)


async def fail(request: web.Request) -> web.StreamResponse:
    return await answer(request, *SAID, event({"error": {"message": "died"}}))


async def cut(request: web.Request) -> web.StreamResponse:
    response = await answer(request, *SAID)
    hang_up(request)
    return response


@pytest.mark.parametrize(
    ("handler", "error", "status"),
    [(refuse, "http_503", 503), (fail, "stream", 200), (cut, "broken", 200)],
)
async def test_errors_are_results(handler: Any, error: str, status: int) -> None:
    """A failed turn is recorded by kind and ends its session."""
    async with FakeEngine(handler) as engine:
        results = await drive(engine.url, make_sessions(PROFILE))

    assert [(turn.error, turn.status) for turn in results] == [(error, status)] * 3
    assert summarize(results).errors == {error: 3}


def test_summary_counts_good_turns_only() -> None:
    """Times, tokens and the hit ratio leave failed turns out; nothing at all gives zeros."""
    good = TurnResult(session_id="s", number=0, start_s=1.0, total_s=2.0, ttft_s=0.5,
                      num_prompt_tokens=100, num_cached_tokens=75)  # fmt: skip
    bad = TurnResult(session_id="s", number=1, start_s=4.0, total_s=1.0, error="connect")

    summary = summarize([good, bad])

    assert (summary.num_turns, summary.num_errors, summary.errors) == (2, 1, {"connect": 1})
    assert (summary.hit_ratio, summary.num_computed_tokens) == (0.75, 25)
    assert (summary.ttft_p50_s, summary.ttft_p99_s, summary.total_mean_s) == (0.5, 0.5, 2.0)
    assert summary.span_s == 4.0
    assert summarize([]).hit_ratio == 0.0


def test_predicted_header_is_optional() -> None:
    """Without the header nothing was predicted, which is not a prediction of zero."""
    assert parse_predicted(None) is None
    assert parse_predicted("gpu=32;cpu=64") == Predicted(gpu=32, cpu=64, pool=0)


def _assistant_texts(bodies: list[dict[str, Any]]) -> set[str]:
    return {
        message["content"]
        for body in bodies
        for message in body["messages"]
        if message["role"] == "assistant"
    }
