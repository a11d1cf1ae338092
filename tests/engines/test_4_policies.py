"""What all of it is for: fewer tokens computed for the same sessions."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from loadtest.agents import make_sessions
from loadtest.dev.league.spoken import Spoken
from loadtest.generated import Agents
from loadtest.results import Summary, summarize
from loadtest.runner import ReplayOptions, replay
from loadtest.workload import Workload
from tests.engines.drive import drive
from tests.engines.harness import Engine, Router
from tests.engines.turns import PROFILE

SESSIONS = replace(PROFILE, num_sessions=12, seed=5, sub_agent_share=0.25)
OVERRUN = Agents(
    num_sessions=25, num_turns=10, rate=10.0, pauses="short", scale_tokens=0.2,
    num_output_tokens=120, sub_agent_share=0.0, block_size=32, seed=8,
)  # fmt: skip
"""At their ends the contexts take 2.5 times the caches of two replicas of the suite."""


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
    """Contexts beyond the caches: waiting saves much of what a hash by session computes.

    The agents of `loadtest.dev.league`, 25 of them at once. These engines have idle time, which
    would go into prompts without room (`strict_router`).
    """
    workload = OVERRUN.workload()
    queue = {"mode": "on"}
    module = "tests.engines.strict_router"
    addresses = [{"url": replica.url} for replica in replicas]
    queued = start_router(
        policy="kv_aware", config={"replicas": addresses, "queue": queue}, module=module
    )
    ours = await send_all(workload, queued, replicas)
    theirs = await send_all(workload, start_router(policy="session_hash"), replicas)

    for found in (ours, theirs):
        assert found.num_errors == 0
        assert found.num_prompt_tokens >= workload.num_input_tokens
    assert ours.num_computed_tokens < 0.75 * theirs.num_computed_tokens


async def send_all(workload: Workload, router: Router, replicas: tuple[Engine, Engine]) -> Summary:
    """Send all sessions at once, from cold caches."""
    for replica in replicas:
        replica.reset_prefix_cache()
    with router:
        sent = await replay(
            workload,
            router.url,
            options=ReplayOptions(loop="closed", session_header="x-session-id"),
            prompts=Spoken(workload, OVERRUN.seed),
        )
    return summarize(sent.turns)
