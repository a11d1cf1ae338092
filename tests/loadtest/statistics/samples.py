"""Made-up turns and runs: no process, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.results import Predicted, Run, RunInfo, TurnResult


def turn(
    session_id: str,
    number: int = 0,
    *,
    ttft_s: float | None = 0.1,
    start_s: float | None = None,
    prompt: int | None = 1000,
    cached: int | None = 800,
    output: int = 20,
    error: str | None = None,
    predicted: Predicted | None = None,
    replica: str | None = None,
    tbt_s: float | None = None,
    late_s: float = 0.0,
    policy: str | None = None,
    is_warm_up: bool = False,
) -> TurnResult:
    """Make one turn; a failed one knows neither times nor tokens."""
    failed = error is not None
    return TurnResult(
        session_id=session_id,
        number=number,
        start_s=0.5 * number if start_s is None else start_s,
        total_s=(ttft_s or 0.0) + 0.2,
        ttft_s=None if failed else ttft_s,
        error=error,
        num_prompt_tokens=None if failed else prompt,
        num_cached_tokens=None if failed else cached,
        num_output_tokens=None if failed else output,
        predicted=predicted,
        replica=replica,
        tbt_mean_s=tbt_s,
        tbt_tail_s=None if tbt_s is None else 2 * tbt_s,
        late_s=late_s,
        policy=policy,
        is_warm_up=is_warm_up,
    )


def session_turns(ttft_s: float = 0.1, *, num_sessions: int = 12) -> list[TurnResult]:
    """Make three turns of each session; first tokens differ by session."""
    return [
        turn(f"s{s}", n, ttft_s=ttft_s * (1 + 0.1 * (s % 3)), cached=800)
        for s in range(num_sessions)
        for n in range(3)
    ]


def run(
    label: str,
    turns: Sequence[TurnResult],
    *,
    round: int = 1,
    target: str = "simulated",
    is_complete: bool = True,
    note: str = "",
) -> Run:
    """Wrap turns as one arm's run of one round."""
    return Run(
        info=RunInfo(
            label=label,
            target=target,
            workload="made up",
            loop="closed",
            round=round,
            is_complete=is_complete,
            note=note,
            started_at=0.0,
        ),
        turns=tuple(turns),
    )
