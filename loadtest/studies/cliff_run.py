"""One point of the cliff: so many agent sessions alive at once, under one variant.

Simulated, or on two real engines. What must live here: the sessions, the fleet, what is counted.
What must not: which points there are (cliff), the picture (cliff_map).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.agents import Session, plan_session
from loadtest.generated.agents import agent_sessions
from loadtest.results import TurnResult, percentile
from loadtest.simulator import Setup, simulate
from loadtest.studies.cells import (
    BLOCK_SIZE,
    NUM_ENGINES,
    NUM_USABLE_BLOCKS,
    Cell,
    Prefill,
    Think,
)
from loadtest.studies.draw import session_of
from loadtest.studies.grid_run import fleet, under
from loadtest.studies.pair import Arm, Pair
from loadtest.workload import Workload

NUM_EACH: Final = 3  # sessions, one after the other, in the place of each that is alive
RAMP_S: Final = 4.0  # the first ones start spread over it
_SETTLED_S: Final = 6.0  # nothing before is counted


class Setting(Struct, frozen=True, kw_only=True):
    """What all runs of one study have in common.

    `slo_ttft_s`: a first token that comes later is not counted. An idle engine computes the longest
    contexts here from nothing in a third of the default.
    """

    think: Think = "short"
    prefill: Prefill = "slow"
    slo_ttft_s: float = 2.0


SETTING: Final = Setting()


class CliffRun(Struct, frozen=True, kw_only=True):
    """What one run found.

    Turns are counted by their first token, from when the sessions have started until the last one
    starts: so many are alive all the time. Waits and completion times are of all sessions, the last
    ones included. Times in seconds.
    """

    num_replicas: int
    num_sessions: int  # alive at once
    arm: str
    seed: int
    setting: Setting = SETTING
    counted_s: float
    num_turns: int
    num_good: int  # first token within `setting.slo_ttft_s`
    num_uncached_tokens: int
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    longest_wait_s: float
    completion_mean_s: float
    completion_max_s: float
    num_errors: int = 0
    is_real: bool = False  # real engines, not simulated ones

    @property
    def goodput(self) -> float:
        """Good turns per second."""
        return self.num_good / self.counted_s

    @property
    def throughput(self) -> float:
        """Turns per second."""
        return self.num_turns / self.counted_s


def sessions(num_sessions: int, seed: int, think: Think = "short") -> Workload:
    """Draw sessions as those of the grid on real engines, `NUM_EACH` for each that is alive."""
    num_all = NUM_EACH * num_sessions
    profile = Cell(working_set=1.0, think=think).profile(seed)
    starts = iter([RAMP_S * index / num_sessions for index in range(num_all)])
    script = agent_sessions(replace(profile, num_sessions=num_all), BLOCK_SIZE, starts)
    return script.workload(f"{num_sessions} sessions at once, seed {seed}")


def real_sessions(num_sessions: int, seed: int, think: Think = "short") -> list[Session]:
    """Draw the same sessions as conversations to send."""
    profile = Cell(working_set=1.0, think=think).profile(seed)
    made = []
    for index in range(NUM_EACH * num_sessions):
        first, *others = plan_session(profile, index)
        start_s = RAMP_S * index / num_sessions if index < num_sessions else 0.0  # once it may
        made.append(session_of(profile, index, (replace(first, wait_s=start_s), *others)))
    return made


def setup_of(
    num_replicas: int, num_sessions: int, seed: int, prefill: Prefill = SETTING.prefill
) -> Setup:
    """Describe the fleet: engines as the grid's."""
    return replace(fleet(num_replicas, NUM_USABLE_BLOCKS, seed, prefill), concurrency=num_sessions)


def run(
    num_replicas: int,
    num_sessions: int,
    arm: str,
    seed: int,
    setting: Setting = SETTING,
) -> CliffRun:
    """Simulate one point.

    Raises:
        ValueError: `arm` names none.
    """
    policy, setup = under(arm, setup_of(num_replicas, num_sessions, seed, setting.prefill))
    found = simulate(sessions(num_sessions, seed, setting.think), policy, setup, label=arm)
    return run_of(found.run.turns, num_replicas, num_sessions, arm, seed, setting)


async def run_real(
    pair: Pair,
    num_sessions: int,
    arm: str,
    seed: int,
    setting: Setting = SETTING,
) -> CliffRun:
    """Measure one point on two real engines, whose prefill costs what the setting says.

    Raises:
        ValueError: `arm` names none.
        ChildDied, RuntimeError, TimeoutError: the router did not start, or every turn failed.
    """
    drawn = real_sessions(num_sessions, seed, setting.think)
    turns = await pair.run(drawn, Arm(label=arm), lambda _: None, num_alive=num_sessions)
    good = [turn for turn in turns if turn.error is None]
    if not good:
        raise RuntimeError(f"{num_sessions} sessions, {arm}: every turn failed: {turns[0].error}")
    found = run_of(good, NUM_ENGINES, num_sessions, arm, seed, setting)
    return replace(found, num_errors=len(turns) - len(good), is_real=True)


def run_of(
    turns: Sequence[TurnResult],
    num_replicas: int,
    num_sessions: int,
    arm: str,
    seed: int,
    setting: Setting = SETTING,
) -> CliffRun:
    """Sum a run up."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for turn in turns:
        session, end_s = turn.session_id, turn.start_s + turn.total_s
        starts[session] = min(starts.get(session, turn.start_s), turn.start_s)
        ends[session] = max(ends.get(session, end_s), end_s)
    last_s = max(starts.values())
    begin_s = min(_SETTLED_S, 0.5 * last_s)
    counted = [turn for turn in turns if begin_s <= turn.start_s + _ttft(turn) < last_s]
    ttfts = sorted(map(_ttft, counted))
    completions = [ends[session] - start_s for session, start_s in starts.items()]
    return CliffRun(
        num_replicas=num_replicas,
        num_sessions=num_sessions,
        arm=arm,
        seed=seed,
        setting=setting,
        counted_s=last_s - begin_s,
        num_turns=len(counted),
        num_good=sum(ttft_s <= setting.slo_ttft_s for ttft_s in ttfts),
        num_uncached_tokens=sum(
            (turn.num_prompt_tokens or 0) - (turn.num_cached_tokens or 0) for turn in counted
        ),
        ttft_mean_s=fmean(ttfts) if ttfts else 0.0,
        ttft_p90_s=percentile(ttfts, 0.9),
        ttft_p99_s=percentile(ttfts, 0.99),
        longest_wait_s=max(map(_ttft, turns)),
        completion_mean_s=fmean(completions),
        completion_max_s=max(completions),
    )


def _ttft(turn: TurnResult) -> float:
    return turn.ttft_s or 0.0
