"""Made-up runs for the demo's tests: no process."""

from __future__ import annotations

from loadtest.demo.run import Ended, Run
from loadtest.results import Predicted, TurnResult


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
        replica=None if error else f"r{1 + int(session_id[1:].partition('.')[0]) % 3}",
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
    return Run(
        policy=policy,
        seed=seed,
        results=results,
        ended=Ended(
            cache_views={"r1": "exact", "r2": view, "r3": "exact"},
            elapsed_s=9.0,
            router_url="http://127.0.0.1:1",
            admin_url="http://127.0.0.1:2",
            replica_urls=("http://127.0.0.1:3", "http://127.0.0.1:4", "http://127.0.0.1:5"),
        ),
    )
