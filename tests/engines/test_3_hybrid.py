"""Hybrid models: predicted cached tokens are the reported ones, through a router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.engines.vllm import TOOL_OPTIONS
from tests.engines.harness import Engine, EventTap, Router, all_up, wait_until
from tests.engines.hybrid_models import CONFIGS, make_model
from tests.engines.turns import MIN_EXACT_RATIO, mixed_sessions, take_turns, wrong_predictions

NUM_TURNS = 5
NUM_BLOCKS = {"windows": 400, "convolutions": 140}  # of 32 tokens, and of 64


@pytest.fixture(params=CONFIGS)
def engine(request: pytest.FixtureRequest, log_dir: Path) -> Iterator[Engine]:
    """One engine of the model, with a cache that a few sessions overrun."""
    model = make_model(request.param, log_dir / request.param)
    engine = Engine(
        request.param,
        log_dir,
        num_blocks=NUM_BLOCKS[request.param],
        max_model_len=8192,
        options=(*TOOL_OPTIONS, "--model", str(model)),
    )
    with all_up((engine,)):
        yield engine


async def test_hits_of_hybrid_models_are_predicted(engine: Engine, log_dir: Path) -> None:
    """Turn by turn; of three siblings of a prompt the second pays, and the third one hits."""
    with EventTap(engine.events_endpoint) as tap, Router((engine,), log_dir) as router:
        sessions = mixed_sessions(num_sessions=2, num_turns=NUM_TURNS)
        results = [result for _, result in await take_turns(router.url, sessions)]
        stem = list(range(400, 1000))
        prompts = [stem + [300 + number] * 50 for number in range(3)]
        siblings = [ask(router, prompt) for prompt in prompts[:2]]
        # That the second left a window where the prompts part is known from its events alone.
        third = {"model": "tiny", "prompt": prompts[2]}
        wait_until(lambda: router.num_known_tokens(third)["r1"] > 0, 60, "the second one's events")
        siblings.append(ask(router, prompts[2]))

        assert router.state("r1") == "exact"
        num_removed = sum(event["type"] == "BlockRemoved" for event in tap.events())

    wrong = wrong_predictions(results)
    assert len(results) >= 3 * NUM_TURNS
    assert len(wrong) <= (1 - MIN_EXACT_RATIO) * len(results), "\n".join(wrong)
    assert sum(result.num_cached_tokens or 0 for result in results) > 5_000
    assert num_removed > 50, "the cache was not overrun: nothing was proved"
    assert [predicted for predicted, _ in siblings] == [reported for _, reported in siblings]
    assert [reported > 0 for _, reported in siblings] == [False, False, True]


def test_what_drafts_drop_of_each_hit_is_predicted(log_dir: Path) -> None:
    """By EAGLE, in a model of windows and full attention, as configured."""
    target = make_model("windows", log_dir / "windows")
    drafts = {
        "method": "eagle",
        "num_speculative_tokens": 1,
        "model": str(make_model("drafts", log_dir / "drafts")),
    }
    options = ("--model", str(target), "--speculative-config", json.dumps(drafts))
    engine = Engine("eagle", log_dir, num_blocks=800, max_model_len=8192, options=options)
    config = {"replicas": [{"url": engine.url, "eagle": True}]}
    errors = []
    with all_up((engine,)), Router((engine,), log_dir, config=config) as router:
        for number in range(4):
            stem = list(range(400 + 13 * number, 1000 + 29 * number))
            num_stored = router.metric("warmroute_kv_events_total", kind="stored")
            ask(router, stem)
            # What its windows left is known from these alone.
            wait_until(
                lambda num=num_stored: (  # type: ignore[misc]
                    router.metric("warmroute_kv_events_total", kind="stored") > num
                ),
                60,
                "the first one's events",
            )
            predicted, reported = ask(router, [*stem, *range(300, 350)])
            errors.append(predicted - reported)
            assert reported > 300

        assert router.metric("warmroute_last_block_dropped") == 1
    assert errors == [0] * len(errors)


def ask(router: Router, prompt: list[int]) -> tuple[int, int]:
    """Send token ids; return how many cached tokens were predicted, and reported."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60).raise_for_status()
    gpu = answer.headers["x-warmroute-cached"].split(";")[0].removeprefix("gpu=")
    return int(gpu), answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
