"""router.api.engine_bodies: the request that has a prompt computed and nothing else."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.api.engine_bodies import decode_body, is_capped, prefill_body, transfer_params

MESSAGES = [{"role": "user", "content": "x"}]
ONE: dict[str, Any] = {"stream": False, "ignore_eos": True}

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "chat",
        {
            "model": "m", "messages": MESSAGES, "stream": True, "n": 3, "stop": ["a"],
            "stream_options": {"include_usage": True}, "max_tokens": 9, "tools": [1],
        },
        {
            "model": "m", "messages": MESSAGES, "tools": [1], **ONE,
            "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1,
        },
    ),
    (
        "completions",
        {"model": "m", "prompt": "x", "logprobs": 3, "cache_salt": "s"},
        {"model": "m", "prompt": "x", "cache_salt": "s", **ONE, "max_tokens": 1, "min_tokens": 1},
    ),
    (
        "messages",
        {
            "model": "m", "messages": MESSAGES, "max_tokens": 5000, "stop_sequences": ["a"],
            "thinking": {"type": "enabled", "budget_tokens": 2000},
        },
        {"model": "m", "messages": MESSAGES, "max_tokens": 1, "stream": False},
    ),
    (
        "messages",
        {"model": "m", "messages": MESSAGES, "thinking": {"type": "disabled"}},
        {
            "model": "m", "messages": MESSAGES, "thinking": {"type": "disabled"},
            "max_tokens": 1, "stream": False,
        },
    ),
    (
        "responses",
        {"model": "m", "input": "x", "background": True, "store": True, "stop": "a"},
        {"model": "m", "input": "x", **ONE, "max_output_tokens": 1, "store": False},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("api", "body", "wanted"), CASES)
def test_what_decides_the_prompt_stays(
    api: str, body: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """What asks for an answer goes; one token is asked for."""
    assert orjson.loads(prefill_body(api, orjson.dumps(body), None)) == wanted


def test_a_transfer_s_parameters_replace_a_client_s() -> None:
    """In both requests."""
    body = orjson.dumps({"model": "m", "prompt": "x", "kv_transfer_params": {"a": 1}})

    for made in (prefill_body("completions", body, {"b": 2}), decode_body(body, {"b": 2})):
        assert orjson.loads(made)["kv_transfer_params"] == {"b": 2}


@pytest.mark.parametrize(
    ("answer", "capped"),
    [
        ({"choices": [{"finish_reason": "length"}]}, True),
        ({"choices": [{"finish_reason": "stop"}]}, False),
        ({"stop_reason": "max_tokens"}, True),
        ({"stop_reason": "end_turn"}, False),
        ({"status": "incomplete"}, True),
        ({"status": "completed"}, False),
        ({}, False),
        ([], False),
    ],
)
def test_whether_a_prompt_ended_for_its_length(answer: Any, capped: bool) -> None:
    """Only then does its engine hand it over."""
    assert is_capped(orjson.dumps(answer)) is capped


def test_a_transfer_s_parameters_are_read() -> None:
    """Of an answer that has them, whole and as they are."""
    params = {"remote_block_ids": [[1, 2]], "remote_prefill_cached_tokens": 32}

    assert transfer_params(orjson.dumps({"choices": [], "kv_transfer_params": params})) == params
    assert transfer_params(b"{}") is None
    assert transfer_params(b"<html>") is None
