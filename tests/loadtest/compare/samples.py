"""Made-up comparisons: no process, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.compare.arms import Arm
from loadtest.compare.facts import annotate
from loadtest.compare.setting import Place, Setting, make_order
from loadtest.results import Run, TurnResult
from tests.loadtest.statistics.samples import run, turn


def made_setting(
    labels: Sequence[str] = ("kv_aware", "least_loaded"),
    *,
    num_rounds: int = 2,
    place: Place = "emulated",
    slo_ttft_s: float | None = 0.23,
) -> Setting:
    return Setting(
        place=place,
        arms=tuple(Arm(label=label, policy=label) for label in labels),
        baseline=labels[0],
        order=make_order(labels, num_rounds, 1),
        workload="made up",
        num_turns=72,
        seed=1,
        slo_ttft_s=slo_ttft_s,
    )


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


def made_run(
    label: str,
    number: int,
    *,
    ttft_s: float = 0.1,
    position: int = 0,
    turns: Sequence[TurnResult] | None = None,
    is_complete: bool = True,
    note: str = "",
    shares_caches: bool = False,
) -> Run:
    made = run(
        label,
        made_turns(ttft_s, label) if turns is None else turns,
        round=number,
        target="http://127.0.0.1:1",
        is_complete=is_complete,
        note=note,
    )
    return annotate(made, position=position, cold="made up", shares_caches=shares_caches)


def made_runs(setting: Setting, ttft_s: dict[str, float]) -> list[Run]:
    order = [(number, label) for number, ls in enumerate(setting.order, 1) for label in ls]
    return [
        made_run(label, number, ttft_s=ttft_s[label], position=position)
        for position, (number, label) in enumerate(order)
    ]


TTFTS = {"kv_aware": 0.1, "least_loaded": 0.2}
