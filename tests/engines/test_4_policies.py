"""What all of it is for: fewer tokens computed for the same sessions."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from loadtest.agents import make_sessions
from loadtest.dev.studies.cells import Cell
from loadtest.dev.studies.draw import Draw, draw
from loadtest.dev.studies.grid_run import GridRun, run_of
from loadtest.results import Summary, summarize
from loadtest.runner.sessions import drive
from tests.engines.harness import NUM_BLOCKS, Engine, Router
from tests.engines.turns import PROFILE

SESSIONS = replace(PROFILE, num_sessions=12, seed=5, sub_agent_share=0.25)


async def run(router: Router, replicas: tuple[Engine, Engine]) -> Summary:
    """Drive the same sessions, with the same replies, from cold caches."""
    for replica in replicas:
        replica.reset_prefix_cache()
    with router:
        return summarize(
            await drive(router.url, make_sessions(SESSIONS), concurrency=6, scripted=True)
        )


async def test_kv_aware_computes_less_than_round_robin(
    replicas: tuple[Engine, Engine], start_router: Callable[..., Router]
) -> None:
    """Same sessions, cold caches each: the default policy leaves far less to compute."""
    ours = await run(start_router(policy="kv_aware"), replicas)
    theirs = await run(start_router(policy="round_robin"), replicas)

    for name, summary in (("kv_aware", ours), ("round_robin", theirs)):
        print(
            f"{name}: {summary.num_turns} turns, {summary.num_prompt_tokens:,} prompt tokens,"
            f" {summary.num_computed_tokens:,} computed ({summary.hit_ratio:.1%} hit),"
            f" TTFT mean {summary.ttft_mean_s:.3f} s, P90 {summary.ttft_p90_s:.3f} s"
        )
    assert (ours.num_errors, theirs.num_errors) == (0, 0)
    assert ours.num_prompt_tokens == theirs.num_prompt_tokens
    assert ours.num_computed_tokens < 0.8 * theirs.num_computed_tokens


async def test_the_queue_keeps_overrun_caches_warm(
    replicas: tuple[Engine, Engine], start_router: Callable[..., Router]
) -> None:
    """Two and a half times what fits: waiting saves much of what a hash by session computes.

    A cell of `loadtest.dev.studies.real_grid`, for the suite's smaller caches: 25 sessions. These
    engines have idle time, which would go into prompts without room (`strict_router`).
    """
    drawn = draw(Cell(working_set=2.5), seed=8, num_blocks=NUM_BLOCKS - 1)
    queue = {"mode": "on"}
    module = "tests.engines.strict_router"
    addresses = [{"url": replica.url} for replica in replicas]
    queued = start_router(
        policy="kv_aware", config={"replicas": addresses, "queue": queue}, module=module
    )
    ours = await send_all(drawn, queued, replicas)
    theirs = await send_all(drawn, start_router(policy="session_hash"), replicas)

    for found in (ours, theirs):
        assert found.num_errors == 0
        assert found.num_prompt_tokens == drawn.workload.num_input_tokens
        assert found.num_computed_tokens >= drawn.num_ideal_tokens
    assert ours.num_computed_tokens < 0.75 * theirs.num_computed_tokens


async def send_all(drawn: Draw, router: Router, replicas: tuple[Engine, Engine]) -> GridRun:
    """Send all sessions of a draw at once, from cold caches."""
    for replica in replicas:
        replica.reset_prefix_cache()
    with router:
        turns = await drive(
            router.url,
            drawn.sessions(),
            concurrency=len(drawn.plans),
            session_header="x-session-id",
            scripted=True,
        )
    return run_of(drawn, "", turns)
