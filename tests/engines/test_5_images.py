"""Images in front of a real engine: turns of a conversation, predicted as they are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.harness import BLOCK_SIZE, Engine, Router, all_up, wait_until
from tests.vision_model import data_url, image_part, make_vision_model, png

SYSTEM = {"role": "system", "content": "You look at pictures. " * 20}


@pytest.fixture(scope="module")
def seeing(log_dir: Path) -> Iterator[Router]:
    """Run a router in front of an engine whose model sees."""
    model = make_vision_model(log_dir / "vision")
    engine = Engine("r1", log_dir, options=("--model", str(model)))
    with all_up((engine,)), Router((engine,), log_dir) as router:
        yield router


def ask(router: Router, body: dict[str, Any]) -> tuple[int, int, int]:
    """Send a turn; return its tokens, how many were predicted to be cached, how many were.

    Ends when what the turn stored is known.
    """
    answer = router.chat({**body, "max_tokens": 1, "temperature": 0})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    num_tokens, reported = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    predicted = int(answer.headers["x-warmroute-cached"].split(";")[0].removeprefix("gpu="))
    settled = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    wait_until(
        lambda: router.num_known_tokens(body)["r1"] == settled, 20, f"{settled} tokens to be known"
    )
    return num_tokens, predicted, reported


def turns(*parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Write a conversation that grows by a picture a turn."""
    messages: list[dict[str, Any]] = [SYSTEM]
    for number, part in enumerate(parts):
        text = {"type": "text", "text": f"What is on picture {number}? " * 5}
        messages = [*messages, {"role": "user", "content": [text, part]}]
        yield {"model": "tiny", "messages": messages}
        messages = [*messages, {"role": "assistant", "content": "A colour."}]


def test_turns_with_images_are_predicted(seeing: Router) -> None:
    """Tiles, transparency, a name of the client's own: all of every turn before is reused."""
    sizes = ((30, 20), (200, 100), (64, 64), (100, 260), (30, 20), (200, 100))
    parts = [
        image_part(
            png(*size, seed, is_rgba=seed % 2 == 1), **({"uuid": "mine"} if seed == 3 else {})
        )
        for seed, size in enumerate(sizes)
    ]
    before = 0
    for number, body in enumerate(turns(*parts)):
        num_tokens, predicted, reported = ask(seeing, body)

        assert predicted == reported
        if number:
            assert reported >= before // BLOCK_SIZE * BLOCK_SIZE - 2 * BLOCK_SIZE
        assert len(seeing.explain(body)["token_ids"]) == num_tokens
        before = num_tokens
    assert seeing.metric("warmroute_tokenized_requests_total", way="media") >= len(parts)
    assert not seeing.metric("warmroute_tokenized_requests_total", way="prefix")
    assert seeing.metric("warmroute_token_mismatches_total") == 0
    assert seeing.metric("warmroute_audited_total", result="exact") == len(parts)


def test_what_is_behind_unknown_media_is_a_guess(
    seeing: Router, log_dir: Path, tmp_path: Path
) -> None:
    """A router that does not know the model's images makes the text before them.

    The rest is a guess from the second turn on: the session's last prompt, without a prediction.
    """
    model = make_vision_model(tmp_path / "blind")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if "image_token" not in key})
    )
    settings = {"replicas": [{"url": _url_of(seeing)}], "tokens": {"models": {"tiny": str(model)}}}
    messages = [
        {"role": "system", "content": "You look at another picture. " * 40},
        {"role": "user", "content": [image_part(png(31, 17, 9))]},
    ]
    with Router((), log_dir, config=settings) as blind:
        for number in range(4):
            body = {"model": "tiny", "messages": messages, "max_tokens": 1, "temperature": 0}
            answer = blind.chat(body)
            assert answer.status_code == 200, answer.text
            reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

            assert ("x-warmroute-cached" in answer.headers) == (number == 0)
            assert (reported > 0) == (number > 0)
            messages = [
                *messages,
                {"role": "assistant", "content": "A colour."},
                {"role": "user", "content": f"And {number}? " * 20},
            ]
        assert blind.metric("warmroute_tokenized_requests_total", way="prefix") >= 4
        assert blind.metric("warmroute_tokenized_requests_total", way="engine") == 0
        assert blind.metric("warmroute_audited_total", result="over") == 0
        assert blind.metric("warmroute_audited_total", result="under") == 0


def _url_of(router: Router) -> str:
    """Ask a router for the address of its replica."""
    listed = httpx.get(f"{router.admin_url}/admin/replicas", timeout=30).json()
    url: str = listed["replicas"][0]["url"]
    return url


def test_responses_with_images_are_predicted(seeing: Router) -> None:
    """A picture is the same by the Responses API; a turn reuses all of the turn before."""
    url = data_url(png(40, 30, 7))
    content = [
        {"type": "input_text", "text": "Say what you see on it. " * 20},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": content}]
    for number in range(3):
        body = {"model": "tiny", "input": items, "max_output_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{seeing.url}/v1/responses", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        reported = usage["input_tokens_details"]["cached_tokens"]
        settled = (usage["input_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE

        assert answer.headers["x-warmroute-cached"].startswith(f"gpu={reported};")
        assert (reported > 0) == (number > 0)
        assert seeing.explain(body)["way"] == "media"
        wait_until(
            lambda: seeing.num_known_tokens(body)["r1"] == settled,  # noqa: B023
            60,
            f"{settled} tokens to be known",
        )
        items = [*items, {"type": "message", "role": "user", "content": f"And {number}? " * 20}]


def test_no_hit_where_likelihood_is_asked_for(seeing: Router) -> None:
    """The engine computes the whole prompt, and so it is predicted."""
    body = {"model": "tiny", "messages": [SYSTEM], "max_tokens": 1}
    for options in ({}, {"prompt_logprobs": 0}, {"echo": True}):
        answer = seeing.chat({**body, **options})
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"] or {}

        if options:
            assert answer.headers["x-warmroute-cached"].startswith("gpu=0;")
            assert details.get("cached_tokens", 0) == 0
