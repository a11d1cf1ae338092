"""A real engine with default arguments for its template, and tokenizers that split otherwise."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.agent_text import code
from tests.engines.harness import Engine, Router, all_up, wait_until
from tests.tokens.engine_flags import HEAD
from tests.tokens.splits import model_with

DEFAULTS = {"enable_thinking": False}
"""Without it, each of the template's prompts begins with a system message."""


@pytest.fixture(scope="module")
def engine(log_dir: Path) -> Iterator[Engine]:
    flags = ("--chat-template", str(HEAD), "--default-chat-template-kwargs", json.dumps(DEFAULTS))
    started = Engine("arguments", log_dir, options=flags)
    with all_up((started,)):
        yield started


def router_with(engine: Engine, log_dir: Path, **tokens: Any) -> Router:
    config = {
        "replicas": [engine.url],
        "log": {"json": True},
        "health": {"interval_s": 0.2},
        "tokens": {"prove_ratio": 1.0, **tokens},
    }
    return Router((engine,), log_dir, config=config)


def templates(**more: Any) -> dict[str, Any]:
    return {"chat_templates": {"tiny": str(HEAD)}, **more}


def turn(router: Router, seed: int, *, years: bool = False) -> tuple[int, int]:
    """Send two turns; return what was predicted of the second, and what the engine reports."""
    text = "2000 " * 1200 if years else code(random.Random(seed), 2000)
    messages = [{"role": "user", "content": f"{seed} {text}"}]
    for number in range(2):
        body = {"model": "tiny", "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = router.chat(body)
        assert answer.status_code == 200, answer.text
        messages = [*messages, {"role": "assistant", "content": "Yes."}]
        messages.append({"role": "user", "content": f"Why? {number}"})
        wait_until(lambda: router.metric("warmroute_index_blocks") > 0, 20, "events")
    predicted = int(answer.headers["x-warmroute-cached"].split(";")[0].removeprefix("gpu="))
    return predicted, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def hints(router: Router) -> list[str]:
    lines = router.log_path.read_text().splitlines()
    return [json.loads(line)["hint"] for line in lines if '"hint":' in line]


def test_the_flags_are_listed_and_the_engine_tokenizes(engine: Engine, log_dir: Path) -> None:
    """It makes other ids of a sample chat; the hint names the keys to compare."""
    with router_with(engine, log_dir, **templates()) as router:
        wait_until(
            lambda: router.metric("warmroute_token_mismatches_total", against="ids") == 1, 60, "ids"
        )
        predicted, reported = turn(router, 1)

        [hint] = hints(router)
        assert "tokens.chat_template_kwargs" in hint
        assert predicted == reported > 0
        assert router.metric("warmroute_tokenized_requests_total", way="engine") == 2


def test_with_the_key_prompts_are_made_here(engine: Engine, log_dir: Path) -> None:
    """And ids are handed over, once blocks of ten prompts came as they were computed here."""
    with router_with(
        engine, log_dir, **templates(chat_template_kwargs={"tiny": DEFAULTS})
    ) as router:
        found = [turn(router, seed) for seed in range(10, 16)]

        def is_handed_over() -> bool:
            turn(router, 99)
            return router.metric("warmroute_handed_over_requests_total") > 0

        wait_until(is_handed_over, 60, "ids handed over")
        assert all(predicted == reported > 0 for predicted, reported in found)
        assert router.metric("warmroute_tokenized_requests_total", way="engine") == 0
        assert router.metric("warmroute_token_mismatches_total") == 0


def test_other_ids_are_not_handed_over(engine: Engine, log_dir: Path) -> None:
    """`2000` is as many tokens on both sides, and others."""
    tokens = templates(
        chat_template_kwargs={"tiny": DEFAULTS},
        models={"tiny": model_with(log_dir / "right", "right")},
        hand_over="on",
    )
    with router_with(engine, log_dir, **tokens) as router:
        for seed in range(10):
            turn(router, 200 + seed, years=True)

        assert router.metric("warmroute_handed_over_requests_total") == 0
        assert router.metric("warmroute_token_mismatches_total", against="ids") == 1
        assert "the engine splits" in router.log_path.read_text()
