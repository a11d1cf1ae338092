"""Predicted cached tokens are the reported ones, evictions included (see `turns` for settled)."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from loadtest.agents import make_sessions
from tests.engines.drive import drive
from tests.engines.harness import Engine, EventTap, Router, num_removed
from tests.engines.turns import (
    MIN_EXACT_RATIO,
    PROFILE,
    mixed_sessions,
    settled,
    take_turns,
    wrong_predictions,
)


async def test_second_turn_goes_to_the_first_ones_replica(router: Router) -> None:
    """Another turn of each session runs where the first ran, and its cache is predicted."""
    turns = await take_turns(router.url, mixed_sessions(num_sessions=2), max_rounds=2)
    firsts, seconds = turns[: len(turns) // 2], turns[len(turns) // 2 :]

    for (_, first), (_, second) in zip(firsts, seconds, strict=True):
        assert first.session_id == second.session_id
        assert second.replica == first.replica
        assert second.predicted is not None
        assert second.predicted.gpu == second.num_cached_tokens
        assert second.predicted.gpu >= (first.num_prompt_tokens or 0) // 32 * 32


async def test_predictions_hold_one_at_a_time(
    router: Router, taps: tuple[EventTap, EventTap]
) -> None:
    """With every request settled and both caches overrun, predictions are right to the block."""
    turns = await take_turns(router.url, mixed_sessions(num_sessions=9))
    results = [result for _, result in turns]

    wrong = wrong_predictions(results)
    assert len(results) >= 80
    assert num_removed(taps) > 200, "the caches were not overrun: nothing was proved"
    assert all(result.predicted is not None for result in results)
    assert len(wrong) <= (1 - MIN_EXACT_RATIO) * len(results), "\n".join(wrong)
    for replica in ("r1", "r2"):
        assert router.state(replica) == "exact"


async def test_predictions_hold_under_load(router: Router, taps: tuple[EventTap, EventTap]) -> None:
    """Among sessions that run at once, with sub-agents, the settled requests are predicted."""
    sessions = mixed_sessions(num_turns=6, sub_agent_share=0.44, scale_time=0.1)
    results = await drive(router.url, sessions, concurrency=3)
    chosen = settled(results)

    wrong = wrong_predictions(chosen)
    assert [result.error for result in results if result.error is not None] == []
    assert len(chosen) >= 40, f"only {len(chosen)} of {len(results)} were settled"
    assert num_removed(taps) > 200
    assert len(wrong) <= (1 - MIN_EXACT_RATIO) * len(chosen), "\n".join(wrong)


def test_a_late_router_learns_the_past(
    replicas: tuple[Engine, Engine], start_router: Callable[..., Router]
) -> None:
    """What was cached before the router joined comes by replay: it knows it when it is ready."""
    turn = make_sessions(replace(PROFILE, num_sessions=1, seed=31))[0].next_turn()
    assert turn is not None
    replicas[1].chat(turn.body)

    with start_router() as late:
        known = late.num_known_tokens(turn.body)

    reported = replicas[1].chat(turn.body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert known == {"r1": 0, "r2": reported}
