"""What all of it is for: fewer tokens computed for the same sessions."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from loadtest.agents import Profile, make_sessions
from loadtest.dev.league.spoken import Spoken
from loadtest.engines.vllm import BLOCK_SIZE
from loadtest.generated.agents import agent_sessions
from loadtest.results import Summary, summarize
from loadtest.runner import ReplayOptions, replay
from loadtest.workload import Workload
from tests.engines.drive import drive
from tests.engines.harness import Engine, Router
from tests.engines.turns import PROFILE

SESSIONS = replace(PROFILE, num_sessions=12, seed=5, sub_agent_share=0.25)
OVERRUN = Profile(
    num_sessions=25, num_turns=10, turns_sigma=0.3, seed=8, num_shared_tokens=1_000,
    num_task_tokens=400, num_large_result_tokens=900, num_result_tokens=350, result_sigma=0.8,
    max_result_tokens=2_000, num_output_tokens=24, output_sigma=0.5, max_output_tokens=64,
    tool_wait_s=0.1, tool_wait_sigma=0.5, sub_agent_share=0.0,
)  # fmt: skip
"""At their ends the contexts take 2.7 times the caches of two replicas of the suite."""
RAMP_S = 4.0


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

    25 agents at once, in the words of `loadtest.dev.league`. These engines have idle time, which
    would go into visits (`strict_router`). They recompute a context in a fraction of a second, so
    conversations keep their room in short pauses only.
    """
    num = OVERRUN.num_sessions
    starts = iter([RAMP_S * number / num for number in range(num)])
    workload = agent_sessions(OVERRUN, BLOCK_SIZE, starts).workload("overrun")
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
