"""What the suite takes for granted about the engine itself; no router takes part."""

from __future__ import annotations

import httpx

from router.base.contracts import ExtraKeys, HashContract
from tests.engines.harness import BLOCK_SIZE, Engine, EventTap, replay, unpack, wait_until
from tests.engines.turns import (
    mixed_sessions,
    published_blocks,
    take_turns,
)


def test_discovery_needs_nothing_but_the_url(replicas: tuple[Engine, Engine]) -> None:
    """An engine reports its event endpoints, its model and the model's directory."""
    engine = replicas[0]

    sources = httpx.get(f"{engine.url}/kv_event_sources").json()
    [model] = httpx.get(f"{engine.url}/v1/models").json()["data"]

    assert set(sources) == {"0"}
    assert sources["0"]["endpoint"].rpartition(":")[2] == engine.events_endpoint.rpartition(":")[2]
    assert model["id"] == "tiny"
    assert model["root"].endswith("tiny_model")


async def test_tokenize_is_what_is_computed(
    replicas: tuple[Engine, Engine], taps: tuple[EventTap, EventTap]
) -> None:
    """/tokenize, the prompt's token count and the published blocks are one and the same."""
    contract = HashContract(algorithm="sha256", block_size=BLOCK_SIZE)
    engine, tap = replicas[0], taps[0]
    stored: dict[int, list[int]] = {}

    for turn, result in await take_turns(engine.url, mixed_sessions(num_sessions=3), max_rounds=3):
        token_ids = engine.tokenize(turn.body)
        stored |= published_blocks(tap)
        extra = ExtraKeys(cache_salt=turn.body.get("cache_salt"))
        keys, _ = contract.extend(None, token_ids, extra)
        assert result.num_prompt_tokens == len(token_ids)
        assert keys
        for k, key in enumerate(keys):
            assert stored[key] == token_ids[k * BLOCK_SIZE : (k + 1) * BLOCK_SIZE]


def test_replay_gives_what_was_published(
    replicas: tuple[Engine, Engine], taps: tuple[EventTap, EventTap]
) -> None:
    """The replay's payloads are the published ones, byte for byte, from the number asked."""
    engine, tap = replicas[0], taps[0]
    wait_until(lambda: engine.complete(range(300, 400)) and tap.messages() != [], 60, "an event")
    first = int.from_bytes(tap.messages()[0][1], "big")

    *replies, end = replay(engine.replay_endpoint, first)

    assert end[2:] == [(-1).to_bytes(8, "big", signed=True), b""]
    assert [tuple(reply[1:]) for reply in replies][: len(tap.messages())] == tap.messages()
    assert unpack(replies[0][3])[1]
