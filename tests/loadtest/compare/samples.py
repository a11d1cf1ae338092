"""Made-up comparisons: no process, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loadtest.compare.report import Report, make_report
from loadtest.results import Run, TurnResult
from tests.loadtest.statistics.samples import run, turn

TTFTS = {"kv_aware": 0.1, "least_loaded": 0.2}


def made_turns(ttft_s: float, policy: str, *, num_sessions: int = 24) -> list[TurnResult]:
    """Make three turns of each session, none of them cached at first."""
    return [
        turn(
            f"s{s}",
            n,
            ttft_s=ttft_s * (1 + 0.1 * (s % 3)),
            start_s=5.0 * n + 0.1 * s,
            cached=800 if n else 0,
            policy=policy,
            replica=f"r{s % 2}",
            tbt_s=0.02,
        )
        for n in range(3)
        for s in range(num_sessions)
    ]


def made_runs(
    ttft_s: Mapping[str, float] = TTFTS, *, num_rounds: int = 2, num_sessions: int = 24
) -> list[Run]:
    """Make a live run of each variant in each round, each with a salt of its own."""
    runs = []
    for number in range(1, num_rounds + 1):
        for label, time_s in ttft_s.items():
            turns = made_turns(time_s, label, num_sessions=num_sessions)
            made = run(label, turns, round=number, target="http://127.0.0.1:1")
            settings: dict[str, str | int | float | bool] = {"salt": f"{number}.{label}"}
            runs.append(replace(made, info=replace(made.info, settings=settings)))
    return runs


def cut(made: Run, num_turns: int, note: str) -> Run:
    """Cut a run short."""
    info = replace(made.info, is_complete=False, note=note)
    return replace(made, info=info, turns=made.turns[:num_turns])


def changed(runs: Sequence[Run], position: int | None = None, **fields: object) -> list[Run]:
    """Change all turns of one run; None: of every run."""
    return [
        replace(one, turns=tuple(replace(t, **fields) for t in one.turns))
        if position in (None, number)
        else one
        for number, one in enumerate(runs)
    ]


def report_of(runs: Sequence[Run], *, slo_ttft_s: float | None = 0.23) -> Report:
    """Compare with the first variant."""
    return make_report(runs, baseline=runs[0].info.label, slo_ttft_s=slo_ttft_s)
