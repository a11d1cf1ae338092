"""The driver against a scripted engine on a socket: what it sends, measures and survives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.agents import Profile, make_sessions
from loadtest.results import Predicted, TurnResult, parse_predicted, summarize
from loadtest.runner.sessions import drive

PROFILE = Profile(num_sessions=3, num_turns=3, turns_sigma=0.0, scale_tokens=0.02, scale_time=0.0)
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 60},
}


class ScriptedEngine:
    """Answers every chat completion with the same stream, or with a fault by turn number."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.num_running = 0
        self.max_running = 0
        self.fault: str | None = None

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers)
        self.bodies.append(json.loads(await request.read()))
        assert request.headers["content-type"] == "application/json"
        if self.fault == "http":
            return web.json_response({"error": {"message": "no"}}, status=503)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        response = web.StreamResponse(
            headers={
                "x-warmroute-replica": "r1",
                "x-warmroute-cached": "gpu=60;cpu=0;pool=4",
                "x-warmroute-ms": "0.7",
                "x-warmroute-policy": "kv_aware",
                "x-warmroute-request-id": "q",
            }
        )
        await response.prepare(request)
        await asyncio.sleep(0)
        for word in ("ok ", "then"):
            await response.write(_event({"choices": [{"delta": {"content": word}}]}))
        if self.fault == "stream":
            await response.write(_event({"error": {"message": "died"}}))
        elif self.fault == "break":
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write(_event({"choices": [], "usage": USAGE}))
            await response.write(b"data: [DONE]\n\n")
        self.num_running -= 1
        return response


@pytest.fixture
async def engine() -> AsyncIterator[tuple[ScriptedEngine, str]]:
    scripted = ScriptedEngine()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", scripted.chat)
    async with TestServer(app) as server:
        yield scripted, str(server.make_url("")).rstrip("/")


async def test_drives_every_turn_and_measures(engine: tuple[ScriptedEngine, str]) -> None:
    """Every turn is sent once, with usage asked for, and its figures come back."""
    scripted, url = engine
    seen: list[TurnResult] = []

    results = await drive(url, make_sessions(PROFILE), on_result=seen.append)

    assert results == seen
    assert len(results) == len(scripted.bodies) >= 9
    assert all(body["stream_options"] == {"include_usage": True} for body in scripted.bodies)
    first = results[0]
    assert first.error is None
    assert (first.status, first.replica, first.policy, first.router_ms) == (
        200,
        "r1",
        "kv_aware",
        0.7,
    )
    assert first.predicted == Predicted(gpu=60, cpu=0, pool=4)
    assert first.num_computed_tokens == 40
    assert first.ttft_s is not None
    assert 0 < first.ttft_s <= first.total_s
    assert "x-session-id" not in scripted.headers[0]


async def test_replies_go_into_the_next_turn(engine: tuple[ScriptedEngine, str]) -> None:
    """Closed loop: the streamed text is the assistant's message; scripted drives ignore it."""
    scripted, url = engine
    await drive(url, make_sessions(PROFILE))
    said = _assistant_texts(scripted.bodies)
    scripted.bodies.clear()

    await drive(url, make_sessions(PROFILE), scripted=True)

    assert said == {"ok then"}
    assert "ok then" not in _assistant_texts(scripted.bodies)


async def test_bounds_concurrency_and_names_sessions(engine: tuple[ScriptedEngine, str]) -> None:
    """One session at a time means one request at a time; the id goes into the named header."""
    scripted, url = engine
    profile = Profile(num_sessions=3, num_turns=2, turns_sigma=0.0, scale_tokens=0.02,
                      scale_time=0.0, sub_agent_share=0.0)  # fmt: skip

    await drive(url, make_sessions(profile), concurrency=1, session_header="x-session-id")

    assert scripted.max_running == 1
    assert [headers["x-session-id"] for headers in scripted.headers] == [
        "s0", "s0", "s1", "s1", "s2", "s2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "error", "status"),
    [
        ("http", "http_503", 503),
        ("stream", "stream", 200),
        ("break", "broken", 200),
    ],
)
async def test_errors_are_results(
    engine: tuple[ScriptedEngine, str], fault: str, error: str, status: int
) -> None:
    """A failed turn is recorded by kind and ends its session."""
    scripted, url = engine
    scripted.fault = fault

    results = await drive(url, make_sessions(PROFILE))

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


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _assistant_texts(bodies: list[dict[str, Any]]) -> set[str]:
    return {
        message["content"]
        for body in bodies
        for message in body["messages"]
        if message["role"] == "assistant"
    }
