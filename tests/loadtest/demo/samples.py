"""Made-up runs for the demo's tests: no process, no clock."""

from __future__ import annotations

from loadtest.demo.run import Run, Sample
from loadtest.results import Predicted, TurnResult
from loadtest.runner.tally import ReplicaLoad


def turn(
    session_id: str,
    number: int,
    *,
    ttft_s: float | None = 0.1,
    prompt: int = 1000,
    cached: int = 800,
    output: int = 20,
    error: str | None = None,
    predicted: int | None = None,
) -> TurnResult:
    """Make one turn; a failed one knows no tokens."""
    return TurnResult(
        session_id=session_id,
        number=number,
        start_s=0.5 * number,
        total_s=(ttft_s or 0.0) + 0.2,
        ttft_s=None if error else ttft_s,
        error=error,
        num_prompt_tokens=None if error else prompt,
        num_cached_tokens=None if error else cached,
        num_output_tokens=None if error else output,
        predicted=None if predicted is None else Predicted(gpu=predicted),
        router_ms=1.5,
    )


def made_run(
    policy: str,
    *,
    ttft_s: float = 0.1,
    cached: int = 800,
    seed: int = 1,
    num_sessions: int = 12,
    failed: bool = False,
    view: str = "exact",
) -> Run:
    """Make a run of `num_sessions` sessions of three turns; first tokens differ by session."""
    results = [
        turn(f"s{s}", n, ttft_s=ttft_s * (1 + 0.1 * (s % 3)), cached=cached, predicted=cached)
        for s in range(num_sessions)
        for n in range(3)
    ]
    if failed:
        results[-1] = turn(f"s{num_sessions - 1}", 2, error="http_503")
    samples = [
        Sample(
            at_s=float(at),
            loads=tuple(
                ReplicaLoad(
                    num_running=r,
                    num_prompt_tokens=(r + 1) * 4000 * at,
                    num_cached_tokens=(r + 1) * 3000 * at,
                )
                for r in range(3)
            ),
        )
        for at in range(10)
    ]
    return Run(
        policy=policy,
        seed=seed,
        results=results,
        samples=samples,
        cache_views={"r1": "exact", "r2": view, "r3": "exact"},
        driver_lag_p99_s=0.002,
        start_up_s=3.0,
        elapsed_s=9.0,
        cpu_s={"router": 1.0, "driver": 0.5},
    )
