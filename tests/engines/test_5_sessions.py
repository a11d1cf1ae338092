"""Sessions whose tokens the router does not know stay where real engines cached them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engines.harness import Engine, Router

SYSTEM = {"role": "system", "content": "You answer in few words, and never say why. " * 60}


def test_sessions_without_tokens_reuse_their_last_turn(
    start_router: Callable[..., Router], replicas: tuple[Engine, Engine]
) -> None:
    """Each stays at its replica, which reports the last turn as cached. Nothing is predicted."""
    settings = {
        "replicas": [{"url": engine.url} for engine in replicas],
        # A mode that the router does not know, and engines that tokenize too late.
        "tokens": {"tokenizer_modes": {"tiny": "custom"}, "engine_timeout_s": 1e-6},
    }
    sessions: list[list[dict[str, Any]]] = [
        [SYSTEM, {"role": "user", "content": f"I am {name}. " * 60}] for name in ("one", "two")
    ]
    homes: list[set[str]] = [set(), set()]
    with start_router(config=settings) as router:
        for turn in range(4):
            for messages, seen in zip(sessions, homes, strict=True):
                answer = router.chat({"model": "tiny", "messages": messages, "max_tokens": 8})
                assert answer.status_code == 200, answer.text
                seen.add(answer.headers["x-warmroute-replica"])
                usage = answer.json()["usage"]
                reported = usage["prompt_tokens_details"]["cached_tokens"]
                messages.append({"role": "assistant", "content": "A cat."})
                messages.append({"role": "user", "content": f"And {turn}? " * 20})

                assert "x-warmroute-cached" not in answer.headers
                assert turn == 0 or reported > 0.6 * usage["prompt_tokens"]

        assert [len(seen) for seen in homes] == [1, 1]
        assert router.metric("warmroute_tokenized_requests_total", way="unknown") == 8
        assert router.metric("warmroute_audited_total") == 0
