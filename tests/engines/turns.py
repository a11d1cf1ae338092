"""Agent sessions taken turn by turn, and what may be asked of a prediction.

A request is *settled* if nothing could change its replica's cache between the router's decision
and the engine's look-up: from `SETTLE_S` before the request was sent until its first token, no
other request was in flight on the replica that served it. (`SETTLE_S` is the time the events of
the last step before take to arrive. What runs after a request's first token does not matter: the
engine counts `cached_tokens` when it schedules a request first.) Siblings of a sub-agent, and
those that share a replica with a running request, are not settled: there the router predicts what
will be computed, and may be wrong by what the engine schedules in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack

from msgspec.structs import replace

from loadtest.agents import Profile, Session, Turn, make_sessions
from loadtest.results import TurnResult
from loadtest.runner.sending import make_client
from router.base.contracts import block_key
from tests.engines.drive import send_turn
from tests.engines.harness import EventTap

SETTLE_S = 0.05
MIN_EXACT_RATIO = 0.99  # DESIGN, section 15
MIN_POOLED_RATIO = 0.98  # evictions included: the pool moves between answer and look-up

PROFILE = Profile(
    num_sessions=6,
    num_turns=8,
    turns_sigma=0.3,
    scale_tokens=0.12,  # 1.4K tokens first, 4K to 8K at the end
    scale_time=0.02,
    max_context_tokens=100_000,  # 12K scaled: half of a replica's cache
    sub_agent_share=0.0,
    num_output_tokens=60,  # a fifth of an agent's: a token costs as much as 50 of a prompt
    salts=(None, "t1", "t2"),
)
"""Twelve of these sessions (six of each seed) fill two small caches, which take turns to evict a
little; eighteen need about twice what the caches hold, however a policy spreads them."""

WILD = {"temperature": 1.0}
"""Sampling that makes the dummy model say bytes no text has: replies that tokenize anew.

Without `seed`: in vLLM 0.32.0 a seeded request whose prefill is chunked kills a CPU engine
("CPU Generator does not use offset").
"""


def mixed_sessions(**changes: object) -> list[Session]:
    """Build two preambles' sessions: one model that repeats itself, one that talks wild."""
    calm = make_sessions(replace(PROFILE, seed=1, **changes))
    wild = make_sessions(replace(PROFILE, seed=2, extra_body=WILD, **changes))
    for session in wild:
        session.id = f"wild-{session.id}"
    return [session for pair in zip(calm, wild, strict=True) for session in pair]


async def take_turns(
    base_url: str | Sequence[str],
    sessions: Iterable[Session],
    *,
    max_rounds: int | None = None,
    scripted: bool = False,
    settle_s: float = SETTLE_S,
) -> list[tuple[Turn, TurnResult]]:
    """Run sessions in rotation, one request at a time: every request is settled.

    Args:
        base_url: Of the router; of several: every session goes from one to the next and back.
        scripted: Go on with scripted replies, so that every run sends the same prompts.
        settle_s: Pause between requests.

    Raises:
        AssertionError: a turn failed.
    """
    taken: list[tuple[Turn, TurnResult]] = []
    running = list(enumerate(sessions))
    rounds = 0
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(make_client(base_url=url, timeout_s=120))
            for url in ([base_url] if isinstance(base_url, str) else base_url)
        ]
        while running and rounds != max_rounds:
            for position, session in list(running):
                turn = session.next_turn()
                if turn is None:
                    running.remove((position, session))
                    continue
                result, reply = await send_turn(clients[(position + rounds) % len(clients)], turn)
                assert result.error is None, f"{result.error}: {result.error_message}"
                session.advance(None if scripted else reply)
                taken.append((turn, result))
                await asyncio.sleep(settle_s)
            rounds += 1
    return taken


def settled(results: Sequence[TurnResult]) -> list[TurnResult]:
    """Select the settled requests of a drive (see the module's definition)."""
    return [
        result
        for result in results
        if result.error is None
        and not any(_disturbs(other, result) for other in results if other is not result)
    ]


def num_pooled(results: Iterable[TurnResult]) -> int:
    """Count the requests of which something was predicted to come from the pool."""
    return sum(r.predicted is not None and r.predicted.pool > 0 for r in results)


def wrong_predictions(results: Iterable[TurnResult]) -> list[str]:
    """Describe the requests whose predicted and reported cached tokens differ."""
    return [
        f"{r.session_id} turn {r.number} on {r.replica} at {r.start_s:.3f} s: predicted"
        f" {r.predicted}, reported {r.num_cached_tokens} of {r.num_prompt_tokens} tokens"
        for r in results
        if r.predicted is not None and r.predicted.total != r.num_cached_tokens
    ]


def _disturbs(other: TurnResult, result: TurnResult) -> bool:
    assert result.ttft_s is not None
    return (
        other.replica == result.replica
        and other.start_s < result.start_s + result.ttft_s
        and other.start_s + other.total_s > result.start_s - SETTLE_S
    )


def published_blocks(tap: EventTap) -> dict[int, list[int]]:
    """Read a tap: key of every stored block to its token ids."""
    blocks: dict[int, list[int]] = {}
    for event in tap.events():
        if event["type"] == "BlockStored":
            size = event["block_size"]
            for k, external in enumerate(event["block_hashes"]):
                blocks[block_key(external)] = event["token_ids"][k * size : (k + 1) * size]
    return blocks
