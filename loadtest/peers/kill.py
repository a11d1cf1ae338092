"""What clients see when a replica dies under them.

Agents on three emulated replicas; one is killed when a third of the turns is done, and stays
away. A turn that fails ends its agent's work.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

from msgspec import Struct

from loadtest.agents import Profile, make_sessions
from loadtest.peers.contestants import Contestant
from loadtest.peers.front import in_front
from loadtest.results import TurnResult, summarize
from loadtest.runner.sessions import drive
from loadtest.runner.stack import start_replicas

NUM_REPLICAS: Final = 3
NUM_SESSIONS: Final = 24
NUM_TURNS: Final = 10
_FLAGS: Final = ("--preset", "a100-8b", "--speed", "2", "--num-gpu-blocks", "6000")
_SESSION_HEADER: Final = "x-session-id"
_SILENCE_S: Final = 60.0


class Killed(Struct, frozen=True, kw_only=True):
    """What became of the agents of one run; `errors` counts failed turns by kind."""

    name: str
    seed: int
    num_planned: int  # turns
    num_done: int
    num_sessions: int
    errors: dict[str, int]
    num_recomputed_tokens: int
    ttft_mean_s: float
    ttft_p99_s: float


async def kill(
    contestant: Contestant,
    seed: int,
    folder: Path,
    log_dir: Path,
    *,
    is_quick: bool = False,
) -> Killed:
    """Run agents through a contestant and kill one of the replicas; about half a minute.

    Raises:
        ChildDied: it, or a replica, did not start.
    """
    num_sessions = 4 if is_quick else NUM_SESSIONS
    profile = Profile(
        num_sessions=num_sessions,
        num_turns=3 if is_quick else NUM_TURNS,
        turns_sigma=0.0,
        seed=seed,
        num_shared_tokens=2_000,
        num_large_result_tokens=2_000,
        num_output_tokens=60,
        output_sigma=0.3,
        tool_wait_s=0.5,
        tool_wait_sigma=0.5,
        ramp_s=3.0,
        sub_agent_share=0.0,
    )
    sessions = make_sessions(profile)
    num_planned = sum(session.num_turns for session in sessions)
    num_before = num_planned // 3
    async with start_replicas(_FLAGS, NUM_REPLICAS, log_dir) as replicas:
        urls = [replica.announced[1] for replica in replicas]
        async with in_front(contestant, urls, folder, log_dir) as front:
            num_seen = 0

            def seen(_: TurnResult) -> None:
                nonlocal num_seen
                num_seen += 1
                if num_seen == num_before:
                    os.kill(replicas[0].pid, signal.SIGKILL)

            results = await drive(
                front.url,
                sessions,
                concurrency=num_sessions,
                session_header=_SESSION_HEADER,
                scripted=True,
                timeout_s=_SILENCE_S,
                on_result=seen,
            )
    summary = summarize(results)
    return Killed(
        name=contestant.name,
        seed=seed,
        num_planned=num_planned,
        num_done=summary.num_turns - summary.num_errors,
        num_sessions=num_sessions,
        errors=summary.errors,
        num_recomputed_tokens=summary.num_recomputed_tokens,
        ttft_mean_s=summary.ttft_mean_s,
        ttft_p99_s=summary.ttft_p99_s,
    )
