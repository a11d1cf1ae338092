"""A router that joins late, behind a replay buffer that is too short: turns prove lost blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.harness import Engine, EventTap, Router, all_up, wait_until

NUM_BLOCKS = 256  # nine of these prompts fill it
FULL = {"vllm_xargs": {"kv_cache_report_mode": "full"}}


def words(number: int, num_words: int = 300) -> str:
    """Write a text that shares no block with another number's."""
    return " ".join(f"n{number}w{i}" for i in range(num_words))


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0} | fields


def cached(answer: httpx.Response) -> tuple[int, int]:
    """Return the predicted and the reported cached tokens of an answer."""
    parts = answer.headers["x-warmroute-cached"].split(";")
    reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return sum(int(part.partition("=")[2]) for part in parts), reported


@pytest.fixture(scope="module")
def engine(log_dir: Path) -> Iterator[Engine]:
    """An engine with a small cache that can replay its last two batches."""
    made = Engine("forgetful", log_dir, num_blocks=NUM_BLOCKS, max_model_len=4096, buffer_steps=2)
    with all_up([made]):
        yield made


def test_turns_prove_lost_history(engine: Engine, log_dir: Path) -> None:
    """One turn proves a conversation's old blocks; a cache full of evictions ends the rest."""
    for number in range(4):
        engine.chat(chat(words(number)))

    with Router([engine], log_dir) as late:
        texts = [words(0)]
        turns = []
        for number in range(10, 14):
            turns.append(cached(late.chat(chat(*texts))))
            texts += ["b", words(number, 60)]
            time.sleep(1.5)  # until claims have ended, whatever proved them
        lost = late.state("r1")
        for number in range(20, 60):
            late.chat(chat(words(number)))
            if late.state("r1") == "exact":
                break
        seconds = [cached(late.chat(chat(words(number)))) for number in (100, 100, 101, 101)]

        assert [predicted for predicted, _ in turns[:2]] == [0, 0]  # the first stores no block
        assert all(reported >= 1_000 for _, reported in turns)
        assert all(predicted == reported for predicted, reported in (*turns[2:], *seconds))
        assert late.metric("warmroute_kv_events_total", kind="recovered") >= 40
        assert (lost, late.state("r1")) == ("degraded", "exact")


def test_an_announcement_looks_like_a_store(engine: Engine) -> None:
    """Why engines are not asked to announce: a block that is known would count as two copies."""
    engine.reset_prefix_cache()
    with EventTap(engine.events_endpoint) as tap:

        def stores() -> list[dict[str, Any]]:
            return [event for event in tap.events() if event["type"] == "BlockStored"]

        wait_until(lambda: engine.chat(chat(words(7))) and stores(), 30, "events")
        engine.reset_prefix_cache()
        engine.chat(chat(words(8)))
        wait_until(lambda: stores()[-1]["token_ids"] != stores()[0]["token_ids"], 30, "a store")
        computed = stores()[-1]
        num_before = len(stores())
        engine.chat(chat(words(8), **FULL))
        wait_until(lambda: len(stores()) > num_before, 30, "an announcement")
        announced = stores()[num_before]

        assert announced == computed
