"""One run of the grid: a cell's sessions under one variant, on real engines or simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from loadtest.compare.arms import arm_of
from loadtest.dev.studies.cells import NUM_ENGINES, UNLIMITED_BLOCKS, Cell, Prefill
from loadtest.dev.studies.draw import Draw
from loadtest.engine_model.time_model import PRESETS, StepWork
from loadtest.machine import Machine
from loadtest.results import TurnResult, percentile, summarize
from loadtest.simulator import PoolSetup, Setup, TierSetup, simulate
from loadtest.whole_sessions import SessionTimes, session_times
from policies import Policy

SCHEMA: Final = "warmroute.grid/2"
ENGINES: Final[dict[Prefill, str]] = {"fast": "cpu-tiny", "slow": "cpu-slow"}
MODEL: Final = "tiny"  # as the real engines serve it, so sessions have the same hashes
_BATCH_TOKENS: Final = 2_048  # Source: vLLM 0.32.0, EngineArgs.get_batch_defaults, CPU, API server
_BATCH_REQUESTS: Final = 128
_POOL_SPEED: Final[dict[Prefill, float]] = {"fast": 0.3, "slow": 2.5}
"""A fetched token over a computed one, attention left out; over TCP, fitted on 133, 130 to 132."""
_TIER_SPEED: Final[dict[Prefill, float]] = {"fast": 13.0, "slow": 30.0}
"""The same of the CPU tier: the blocks of `pair` at 4 GB/s, which a core here copies."""
_POOL_PACE: Final = 1.15  # engines also look up and write; fitted in the same way
_EVENT_LAG_S: Final = 0.01
_TO_ENGINE_S: Final = 0.02  # rendering, tokenizing, queueing; fitted in the same way

DEFAULT: Final = "kv_aware"
WITHOUT_QUEUE: Final = f"{DEFAULT}:queue.mode=off"

Kind = Literal["real", "simulated"]


def pace_of(prefill: Prefill, num_tokens: int, took_s: float) -> float:
    """Return how long engines took to compute a prompt over what their profile says."""
    chunks = [
        (start, min(_BATCH_TOKENS, num_tokens - start))
        for start in range(0, num_tokens, _BATCH_TOKENS)
    ]
    profile = PRESETS[ENGINES[prefill]]
    return took_s / sum(
        profile.step_s(StepWork(num_prefill_tokens=num, num_prefill_pairs=num * (start + num / 2)))
        for start, num in chunks
    )


class GridRun(Struct, frozen=True, kw_only=True):
    """What one run found; times in seconds.

    `num_exact` of `num_predicted` turns: the engine reported as many cached tokens as the router
    predicted. `num_moved` turns went to another replica than the one before in their session.
    `router_p99_ms`: time in the router but for its queue; None: simulated, or another router.
    `pace`: how long the engines took over their profile in the simulator, measured before the run.
    """

    kind: Kind
    cell: Cell
    arm: str
    seed: int
    round: int = 0
    working_set: float
    num_turns: int
    num_errors: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_ideal_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    num_predicted: int
    num_exact: int
    num_moved: int
    router_p99_ms: float | None = None
    ttft_p99_s: float | None = None  # None: recorded before it was counted
    ttft_longest_s: float | None = None  # as before
    sessions: SessionTimes | None = None  # as before, or no session ended
    span_s: float
    pace: float = 1.0
    is_report: bool = False  # of a seed that nothing was tuned on
    turns: tuple[TurnResult, ...] = ()


class StudyFile(Protocol):
    """What a study writes."""

    @property
    def schema(self) -> str:
        """Its family and version."""


Read = TypeVar("Read", bound=StudyFile)


def read_study(path: Path, kind: type[Read], schema: str) -> Read:
    """Read the file of an earlier command.

    Raises:
        OSError, ValueError: the file cannot be read, or is none of this study.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path}: {exc}") from exc
    if found.schema != schema:
        raise ValueError(f"{path}: {found.schema!r} is not {schema!r}")
    return found


class GridFile(Struct, frozen=True, kw_only=True):
    """All runs of one command, and what they ran on."""

    schema: str = SCHEMA
    machine: Machine
    command: str
    runs: tuple[GridRun, ...]


def run_of(
    draw: Draw,
    arm: str,
    turns: Sequence[TurnResult],
    *,
    kind: Kind = "real",
    round: int = 0,
    num_exact: int | None = None,
    pace: float = 1.0,
    is_report: bool = False,
    keeps_turns: bool = False,
) -> GridRun:
    """Sum a run up; `num_exact` None: count it from the turns' headers."""
    summary = summarize(turns)
    good = [turn for turn in turns if turn.error is None]
    predicted = [turn for turn in good if turn.predicted is not None]
    router_ms = sorted(turn.router_ms for turn in good if turn.router_ms is not None)
    if num_exact is None:
        num_exact = sum(_is_exact(turn) for turn in predicted)
    return GridRun(
        kind=kind,
        cell=draw.cell,
        arm=arm,
        seed=draw.seed,
        round=round,
        working_set=draw.working_set,
        num_turns=summary.num_turns,
        num_errors=summary.num_errors,
        num_prompt_tokens=summary.num_prompt_tokens,
        num_computed_tokens=summary.num_computed_tokens,
        num_ideal_tokens=draw.num_ideal_tokens,
        ttft_mean_s=summary.ttft_mean_s,
        ttft_p50_s=summary.ttft_p50_s,
        ttft_p90_s=summary.ttft_p90_s,
        num_predicted=len(predicted),
        num_exact=num_exact,
        num_moved=num_moved(good),
        router_p99_ms=percentile(router_ms, 0.99) if router_ms and kind == "real" else None,
        ttft_p99_s=summary.ttft_p99_s,
        ttft_longest_s=max((turn.ttft_s for turn in good if turn.ttft_s is not None), default=None),
        sessions=session_times([turns]),
        span_s=summary.span_s,
        pace=pace,
        is_report=is_report,
        turns=tuple(turns) if keeps_turns else (),
    )


def _is_exact(turn: TurnResult) -> bool:
    return turn.predicted is not None and turn.predicted.total == turn.num_cached_tokens


def num_moved(turns: Sequence[TurnResult]) -> int:
    """Count turns that another replica served than the turn before in their session."""
    places = {(turn.session_id, turn.number): turn.replica for turn in turns}
    return sum(
        replica is not None and places.get((session_id, number - 1), replica) not in (replica, None)
        for (session_id, number), replica in places.items()
    )


def setup_of(draw: Draw, repeat: int = 0, pace: float = 1.0) -> Setup:
    """Describe the two engines to the simulator; each repeat has its own way to them.

    Milliseconds decide which request comes first, and so what is evicted. One run of an
    over-committed cell therefore says little, simulated or real.
    """
    cell = draw.cell
    pace *= _POOL_PACE if cell.has_pool else 1.0
    to_engine = 1.0 + 0.1 * (-1) ** repeat * ((repeat + 1) // 2)
    setup = fleet(NUM_ENGINES, draw.num_blocks, draw.seed, cell.prefill, pace)
    return replace(
        setup,
        pool=PoolSetup(speed=_POOL_SPEED[cell.prefill]) if cell.has_pool else None,
        tier=TierSetup(
            num_blocks=round(cell.tier * draw.num_blocks), speed=_TIER_SPEED[cell.prefill]
        )
        if cell.tier
        else None,
        to_engine_s=setup.to_engine_s * to_engine,
    )


def fleet(
    num_engines: int, num_blocks: int, seed: int, prefill: Prefill, pace: float = 1.0
) -> Setup:
    """Describe engines without a pool, as they were fitted, to the simulator."""
    return Setup(
        num_replicas=num_engines,
        num_blocks=num_blocks,
        engine=ENGINES[prefill],
        time_model=PRESETS[ENGINES[prefill]].slower(pace),
        max_num_batched_tokens=_BATCH_TOKENS,
        max_num_seqs=_BATCH_REQUESTS,
        load=None,
        loop="closed",
        to_engine_s=pace * _TO_ENGINE_S,
        event_lag_s=_EVENT_LAG_S,
        model=MODEL,
        seed=seed,
    )


def under(label: str, setup: Setup) -> tuple[Policy, Setup]:
    """Return a variant's policy, and a fleet with the variant's queue.

    Raises:
        ValueError: `label` names no variant.
    """
    arm = arm_of(label)
    if arm.is_unlimited:
        setup = replace(setup, num_blocks=UNLIMITED_BLOCKS)
    return arm.make_policy(), replace(setup, queue=arm.queue_rules())


def simulated(
    draw: Draw,
    arm: str,
    *,
    repeat: int = 0,
    pace: float = 1.0,
    is_report: bool = False,
    advance: Callable[[int], None] = lambda num: None,
) -> GridRun:
    """Simulate a draw under a policy, for the first or a further time.

    Raises:
        ValueError: `arm` names none.
    """
    policy, setup = under(arm, setup_of(draw, repeat, pace))
    found = simulate(draw.workload, policy, setup, label=arm, advance=advance)
    turns = found.run.turns
    num_exact = len(turns) - found.num_mispredicted
    return run_of(
        draw,
        arm,
        turns,
        kind="simulated",
        round=repeat,
        num_exact=num_exact,
        pace=pace,
        is_report=is_report,
    )
