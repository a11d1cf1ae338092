"""Requests to a router in front of a producer and a consumer."""

from __future__ import annotations

from typing import Any

import httpx

from tests.engines.harness import Router, wait_until

NUM_WORDS = 1500


def chat(number: int) -> dict[str, Any]:
    text = " ".join(f"line {number} of {i}" for i in range(NUM_WORDS // 3))
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
    }


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def assert_halves_are_refused(router: Router) -> None:
    """Ask a router whose replicas r1, a producer, and r2, a consumer, have no roles."""
    # Until the other one is known the producer may be no half.
    wait_until(lambda: router.chat(chat(9)).status_code == 503, 60, "both replicas' facts")
    answer = router.chat(chat(9))

    assert answer.status_code == 503
    assert "computed at r1 (kv_producer)" in answer.json()["error"]["message"]
