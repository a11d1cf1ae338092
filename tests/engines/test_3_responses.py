"""The Responses API on real replicas: their tokens, their blocks, their responses."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.engines.harness import BLOCK_SIZE, Engine, Router, wait_until
from tests.redis_servers import Start
from tests.tokens.corpus_responses import responses_bodies

TOOLS = [{"type": "function", "name": "ls", "parameters": {"type": "object", "properties": {}}}]


def respond(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], httpx.Headers]:
    """Ask for a response; return it, and the router's headers."""
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json(), answer.headers
    lines = [line for line in answer.text.splitlines() if line.startswith("data:")]
    events = [json.loads(line[5:]) for line in lines]
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    return events[-1]["response"], answer.headers


def step(number: int) -> list[dict[str, Any]]:
    """Write a step of an agent: what it called, and what it got."""
    output = " ".join(f"file_{number}_{i}.py" for i in range(60))
    return [
        {"type": "function_call", "name": "ls", "call_id": f"c{number}", "arguments": "{}"},
        {"type": "function_call_output", "call_id": f"c{number}", "output": output},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_every_turn_is_predicted(router: Router, stream: bool) -> None:
    """An agent's turns find what the last one left, and the router knew how much."""
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "You mend parsers. " * 30},
        {"role": "user", "content": [{"type": "input_text", "text": f"Go {stream}."}]},
    ]
    replicas = set()
    for number in range(4):
        body = {
            "model": "tiny",
            "input": items,
            "instructions": "Be brief.",
            "tools": TOOLS,
            "max_output_tokens": 8,
            "stream": stream,
        }
        explained = router.explain(body)
        made, headers = respond(router.url, body)
        usage = made["usage"]
        assert explained["way"] == "local"
        assert explained["num_tokens"] == usage["input_tokens"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert headers["x-warmroute-cached"] == f"gpu={cached};cpu=0;pool=0"
        assert (cached > 0) == (number > 0)
        replica = headers["x-warmroute-replica"]
        replicas.add(replica)
        held = (usage["input_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
        wait_until(lambda: router.num_known_tokens(body)[replica] >= held, 60, "its blocks")  # noqa: B023
        items += step(number)
    assert len(replicas) == 1


def test_the_corpus_has_the_engines_tokens(router: Router, replicas: tuple[Engine, Engine]) -> None:
    """Generated odd requests: the engine computes exactly the ids that the router knew."""
    num_compared = 0
    for body in responses_bodies(seed=3, count=60):
        asked = {**body, "enable_response_messages": True}
        answer = httpx.post(f"{replicas[0].url}/v1/responses", json=asked, timeout=60)
        if answer.status_code != 200:
            continue  # refused by the engine: nothing to be cached
        (given,) = answer.json()["input_messages"]
        explained = router.explain(body)
        if explained["way"] == "local":
            assert explained["token_ids"] == given["tokens"], json.dumps(body)
            num_compared += 1

    assert num_compared >= 45


def test_a_response_is_found_through_any_router(
    start_router: Callable[..., Router], start_redis: Start
) -> None:
    """GET and previous_response_id work through the router that asked for it and another one."""
    options = ("--redis", start_redis().url, "--set", f"redis.namespace={uuid.uuid4().hex}")
    with ExitStack() as stack:
        routers = [
            stack.enter_context(start_router(options=options, policy="round_robin"))
            for _ in range(2)
        ]
        for router in routers:
            wait_until(lambda: router.metric("warmroute_redis_up") == 1, 60, "redis")  # noqa: B023
        body = {"model": "tiny", "input": "Remember me.", "max_output_tokens": 4}
        made = [respond(routers[0].url, body)[0]["id"] for _ in range(6)]
        for number, response_id in enumerate(made):
            for router in routers:
                url = f"{router.url}/v1/responses/{response_id}"
                wait_until(lambda: httpx.get(url, timeout=30).status_code == 200, 60, url)  # noqa: B023
            after = {**body, "previous_response_id": response_id}
            assert respond(routers[number % 2].url, after)[0]["previous_response_id"] == response_id
        assert routers[1].metric("warmroute_responses_found_total", result="redis") == 6
        lost = httpx.get(f"{routers[0].url}/v1/responses/resp_unheard_of", timeout=30)
        assert lost.status_code == 404


def test_what_runs_in_the_background_is_reached(
    start_router: Callable[..., Router], replicas: tuple[Engine, Engine]
) -> None:
    """Read until it is done, its events from a point on, cancelled: all at the engine that has it.

    An engine without these routes (vLLM 0.32 has no input_items) says so itself.
    """
    with start_router(policy="round_robin") as router:
        body = {"model": "tiny", "input": "Count.", "max_output_tokens": 24, "background": True}
        made = [httpx.post(f"{router.url}/v1/responses", json=body, timeout=60) for _ in range(4)]
        long = {**body, "max_output_tokens": 12_000, "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/responses", json=long, timeout=60) as stream:
            events = (json.loads(line[5:]) for line in stream.iter_lines() if line[:5] == "data:")
            running = next(events)["response"]["id"]

        url = f"{router.url}/v1/responses/{running}"
        replayed = httpx.stream(
            "GET", url, params={"stream": True, "starting_after": 1}, timeout=60
        )
        with replayed as stream:
            events = (json.loads(line[5:]) for line in stream.iter_lines() if line[:5] == "data:")
            assert next(events)["sequence_number"] == 2
        cancelled = httpx.post(f"{url}/cancel", timeout=60)
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        assert httpx.get(url, timeout=30).json()["status"] == "cancelled"

        for answer in made:
            assert answer.json()["status"] in ("queued", "in_progress", "completed")
            url = f"{router.url}/v1/responses/{answer.json()['id']}"
            wait_until(
                lambda: httpx.get(url, timeout=30).json()["status"] in ("completed", "incomplete"),  # noqa: B023
                60,
                "the response",
            )
            lacking = httpx.get(f"{url}/input_items", timeout=30)  # no vLLM 0.32 has it
            assert lacking.status_code == 404
            assert lacking.json()["error"]["message"].startswith("No replica serves GET")
        assert len({answer.headers["x-warmroute-replica"] for answer in made}) == 2
