"""Made-up runs of the grid: no process, no simulation."""

from __future__ import annotations

from loadtest.dev.studies.cells import Cell
from loadtest.dev.studies.grid_run import GridRun

CELL = Cell(working_set=0.3)


def run(arm: str, seed: int, num_computed_tokens: int, ttft_mean_s: float = 1.0) -> GridRun:
    return GridRun(
        kind="real",
        cell=CELL,
        arm=arm,
        seed=seed,
        working_set=0.3,
        num_turns=10,
        num_errors=0,
        num_prompt_tokens=1_000,
        num_computed_tokens=num_computed_tokens,
        num_ideal_tokens=100,
        ttft_mean_s=ttft_mean_s,
        ttft_p50_s=1.0,
        ttft_p90_s=2.0,
        num_predicted=10,
        num_exact=9,
        num_moved=1,
        span_s=5.0,
    )
