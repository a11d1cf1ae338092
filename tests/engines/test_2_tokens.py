"""The router's tokens and block names are the engine's own, for every request."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.engines.harness import BLOCK_SIZE, Engine, EventTap, Router
from tests.engines.turns import mixed_sessions, published_blocks, take_turns
from tests.tokens.corpus import chat_bodies, completion_bodies


async def test_every_turn_has_the_engines_tokens_and_blocks(
    router: Router, replicas: tuple[Engine, Engine], taps: tuple[EventTap, EventTap]
) -> None:
    """Ids equal /tokenize; the chain is made of blocks the engine published for those ids."""
    turns = await take_turns(router.url, mixed_sessions(num_sessions=3))
    stored = published_blocks(taps[0]) | published_blocks(taps[1])

    assert len(turns) >= 30
    for turn, result in turns:
        explained = router.explain(turn.body)
        token_ids = explained["token_ids"]
        assert token_ids == replicas[0].tokenize(turn.body), f"{turn.session_id} {turn.number}"
        assert explained["num_tokens"] == result.num_prompt_tokens == len(token_ids)
        keys = [int(key, 16) for key in explained["keys"]]
        assert len(keys) == len(token_ids) // BLOCK_SIZE
        for k, key in enumerate(keys):
            assert stored[key] == token_ids[k * BLOCK_SIZE : (k + 1) * BLOCK_SIZE]


@pytest.mark.parametrize("api", ["chat/completions", "completions"])
def test_the_corpus_has_the_engines_tokens(
    router: Router, replicas: tuple[Engine, Engine], api: str
) -> None:
    """Odd requests, drawn again each time: wherever the engine computes, the router knew what."""
    draw = chat_bodies if api == "chat/completions" else completion_bodies
    num_compared = 0
    for body in draw(seed=2, count=120):
        asked = {**body, "return_token_ids": True}
        answer = httpx.post(f"{replicas[0].url}/v1/{api}", json=asked, timeout=60)
        if answer.status_code != 200:
            continue  # refused by the engine: nothing to be cached
        whole = answer.json()
        computed = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
        explained = router.explain(body)
        assert explained["token_ids"] == computed, f"{explained['way']}: {json.dumps(body)}"
        num_compared += 1

    assert num_compared >= 80
