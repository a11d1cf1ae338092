"""`/v1/messages` in front of real engines: turns as an agent takes them, whole and streamed."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from router.api.sessions import session_hash, session_of
from router.config import Config
from tests.engines.harness import Engine, EventTap, Router, wait_until
from tests.engines.turns import SETTLE_S

TOOL: dict[str, Any] = {
    "name": "read_file",
    "description": "Read a file.",
    "input_schema": {"properties": {"path": {"type": "string"}}, "required": ["path"]},
    "cache_control": {"type": "ephemeral"},
}
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.139; cch=0;"},
    {
        "type": "text",
        "text": "You are a coding agent. " * 30,
        "cache_control": {"type": "ephemeral"},
    },
]


def _turns() -> list[Any]:
    """Write a conversation: thinking, parallel calls, results out of order, a reminder."""
    calls = [
        {"type": "tool_use", "id": f"toolu_{i}", "name": "read_file", "input": {"path": f"{i}é.py"}}
        for i in range(2)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "import os\n" * 40},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_0",
            "content": [{"type": "text", "text": "кэш 🚀 " * 30}, {"type": "text", "text": "b"}],
        },
        {"type": "text", "text": "Go on."},
    ]
    thinking = {"type": "thinking", "thinking": "Two files.", "signature": "c2ln"}
    return [
        {"role": "user", "content": [{"type": "text", "text": "Read the files. " * 20}]},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "Yes."}, *calls]},
        {"role": "user", "content": results},
        {"role": "assistant", "content": "Both are short."},
        {"role": "system", "content": "<system-reminder>Be brief.</system-reminder>"},
        {"role": "user", "content": "And now?"},
    ]


def _usage(answer: httpx.Response) -> dict[str, int]:
    if answer.headers["content-type"] == "application/json":
        found: dict[str, int] = answer.json()["usage"]
        return found
    lines = [line[5:] for line in answer.text.splitlines() if line.startswith("data:")]
    events = [json.loads(line) for line in lines]
    assert events[-1]["type"] == "message_stop"
    [found] = [event["usage"] for event in events if event["type"] == "message_delta"]
    return found


def _record(router: Router, request_id: str) -> dict[str, Any]:
    """Wait for a request's record, which is written after the answer."""

    def found() -> list[dict[str, Any]]:
        if not router.decisions_path.exists():
            return []
        return [each for each in router.decisions() if each["request_id"] == request_id]

    wait_until(lambda: bool(found()), 60, "the record")
    return found()[0]


def test_turns_through_messages(router: Router, replicas: tuple[Engine, Engine]) -> None:
    """Turns go to the first one's replica; cached and prompt tokens are as the engine reports."""
    turns, placed = _turns(), []
    before = router.metric("warmroute_token_mismatches_total")
    for number, end in enumerate((1, 3, 6)):
        for stream in (False, True):
            body = {
                "model": "tiny", "max_tokens": 8, "temperature": 0, "stream": stream,
                "system": SYSTEM, "tools": [TOOL], "messages": turns[:end],
                "thinking": {"type": "disabled"},
            }  # fmt: skip
            answer = httpx.post(f"{router.url}/v1/messages", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            usage = _usage(answer)
            predicted = dict(
                part.split("=") for part in answer.headers["x-warmroute-cached"].split(";")
            )
            record = _record(router, answer.headers["x-warmroute-request-id"])
            num_cached = usage["cache_read_input_tokens"]
            num_prompt = sum(value for key, value in usage.items() if "input" in key)

            assert record["api"] == "messages"
            assert int(predicted["gpu"]) == num_cached == record["num_reported_cached_tokens"]
            assert num_prompt == record["num_prompt_tokens"]
            assert (num_cached > 0) == (number > 0 or stream)
            placed.append(answer.headers["x-warmroute-replica"])
            time.sleep(SETTLE_S)
    assert len(set(placed)) == 1
    assert router.metric("warmroute_token_mismatches_total") == before


def test_tokens_are_counted_as_the_engine_counts(
    router: Router, replicas: tuple[Engine, Engine]
) -> None:
    """The router counts once answers have confirmed it; the engine's own count is the same."""
    body = {"model": "tiny", "system": SYSTEM, "tools": [TOOL], "messages": _turns()}
    generated = httpx.post(f"{router.url}/v1/messages", json={**body, "max_tokens": 1}, timeout=120)
    before = router.metric("warmroute_counted_requests_total", by="router")
    counted = [
        httpx.post(f"{url}/v1/messages/count_tokens", json=body, timeout=60).json()
        for url in (router.url, replicas[0].url)
    ]

    assert generated.status_code == 200
    assert counted[0] == counted[1]
    assert router.metric("warmroute_counted_requests_total", by="router") == before + 1


def test_events_name_the_session(router: Router, taps: tuple[EventTap, EventTap]) -> None:
    """What an agent or its sub-agent has computed is published under the digest of its session."""
    body = {"model": "tiny", "max_tokens": 1, "system": SYSTEM, "messages": _turns()[:1]}
    for headers in (
        {"x-claude-code-session-id": "s"},
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
    ):
        body["system"] = [{"type": "text", "text": f"{headers} " * 20}]  # blocks of its own
        answer = httpx.post(f"{router.url}/v1/messages", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        session = session_of(headers, body, Config().session.read, "/v1/messages")
        assert session is not None
        assert (session.parent is not None) == (len(headers) > 1)
        name = f"{session_hash(session.name, 'tiny'):016x}"
        wait_until(
            lambda name=name: any(
                event["type"] == "BlockStored" and event.get("session_id") == name
                for tap in taps
                for event in tap.events()
            ),
            60,
            f"blocks of the session {name}",
        )
