"""Checks of a comparison, each with a figure.

Every check is in every report: passed, warned, or why it does not apply. A warning names another
explanation of the figures. Only a late driver removes the verdicts on times (`blurred`), because
then the times contain its delay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, Literal

from msgspec import Struct

from loadtest.results import Run, TurnResult
from loadtest.statistics import Comparison, num_differing_tokens
from loadtest.whole_sessions import roots
from loadtest.words import milliseconds

LATE_S: Final = 0.01  # as late as a quiet driver is at its P99
_LATE_SHARE: Final = 0.1  # of the median first-token time: less blurs nothing
_MIN_SESSIONS: Final = 20
_MIN_ROUNDS: Final = 2
_COMPARED: Final = 0.99  # of the turns
_COLD: Final = 0.05  # of a first prompt may be cached: a template's beginning
_DRIFT_APART: Final = 1.5  # within a run, between variants
_MIN_TURNS: Final = 60  # of a variant, for a drift

Outcome = Literal["passed", "warned", "does not apply"]


class Check(Struct, frozen=True, kw_only=True):
    """One question, its answer with a figure, and what that means."""

    name: str
    outcome: Outcome
    figure: str
    meaning: str = ""


class Setting(Struct, frozen=True, kw_only=True):
    """What is compared; `labels` are those of the variants."""

    workload: str
    labels: tuple[str, ...]
    baseline: str
    num_rounds: int
    slo_ttft_s: float | None = None
    slo_tbt_s: float | None = None

    @property
    def has_slo(self) -> bool:
        return self.slo_ttft_s is not None or self.slo_tbt_s is not None


class _Case(Struct, frozen=True):
    setting: Setting
    runs: Sequence[Run]
    comparisons: Sequence[Comparison]

    @property
    def live(self) -> list[Run]:
        return [run for run in self.runs if run.info.target != "simulated"]

    @property
    def sent(self) -> list[Run]:
        return [run for run in self.runs if run.turns]


def check(
    setting: Setting, runs: Sequence[Run], comparisons: Sequence[Comparison]
) -> tuple[Check, ...]:
    """Go through all questions."""
    case = _Case(setting, runs, comparisons)
    return tuple(asked(case) for asked in QUESTIONS.values())


def late_p99_s(run: Run) -> float:
    """Return how late the driver sent, at its P99; 0.0 if nothing was sent."""
    late = sorted(turn.late_s for turn in run.turns)
    return late[int(0.99 * (len(late) - 1))] if late else 0.0


def lateness(runs: Sequence[Run]) -> str:
    """Return why the times of these runs have no verdict; "": they have one."""
    for run in runs:
        late_s = late_p99_s(run)
        ttfts = [turn.ttft_s for turn in run.turns if turn.ttft_s is not None]
        if late_s > max(LATE_S, _LATE_SHARE * median(ttfts or [0.0])):
            return f"the driver was {milliseconds(late_s)} late (P99, {run.info.label})"
    return ""


def _completeness(case: _Case) -> Check:
    """Warn if a variant has fewer runs than another, or a run was cut short."""
    num_done = sum(run.info.is_complete for run in case.runs)
    wanted = len(case.setting.labels) * case.setting.num_rounds
    return Check(
        name="all runs done",
        outcome="passed" if num_done == wanted else "warned",
        figure=f"{num_done} of {wanted} runs complete",
        meaning=what_is_missing(case.setting, case.runs),
    )


def what_is_missing(setting: Setting, runs: Sequence[Run]) -> str:
    """Name the runs that are cut short or not there; "": none is."""
    parts = [
        f"{run.info.label}, round {run.info.round}: {run.info.note or 'cut short'}"
        for run in runs
        if not run.info.is_complete
    ]
    for label in setting.labels:
        num_runs = sum(run.info.label == label for run in runs)
        if num_runs < setting.num_rounds:
            parts.append(f"{label}: {num_runs} of {setting.num_rounds} runs")
    return "; ".join(parts)


def _errors(case: _Case) -> Check:
    """Warn if a turn failed; by variant and kind."""
    num_turns = sum(len(run.turns) for run in case.runs)
    kinds = Counter(
        (run.info.label, turn.error)
        for run in case.runs
        for turn in run.turns
        if turn.error is not None
    )
    return Check(
        name="no errors",
        outcome="warned" if kinds else "passed",
        figure=f"{kinds.total()} of {num_turns} turns failed",
        meaning="; ".join(f"{label}: {num} {kind}" for (label, kind), num in sorted(kinds.items())),
    )


def _common_turns(case: _Case) -> Check:
    """Warn if more than 1 % of the turns of two variants have no counterpart that succeeded."""
    worst: tuple[float, Comparison] | None = None
    for found in case.comparisons:
        share = found.num_turns / (found.num_turns + found.num_left_out)
        if found.measure == "mean TTFT" and (worst is None or share < worst[0]):
            worst = share, found
    if worst is None:
        return Check(
            name="turns in common", outcome="warned", figure="no turn succeeded in two variants"
        )
    share, found = worst
    return Check(
        name="turns in common",
        outcome="passed" if share >= _COMPARED else "warned",
        figure=f"{found.num_left_out} of {found.num_turns + found.num_left_out} turns of "
        f"{found.arm} and {found.baseline} not compared",
        meaning=""
        if share >= _COMPARED
        else "they failed or never came in one of the two; what is left may be the easier part",
    )


def _same_tokens(case: _Case) -> Check:
    """Warn if a prompt or a reply had another length in another run."""
    prompts, replies = num_differing_tokens([run.turns for run in case.runs])
    meaning = ""
    if prompts:
        meaning = "prompts differ in length: the variants did not do the same work"
    elif replies:
        meaning = "replies differ in length: later prompts and whole turns are not quite the same"
    return Check(
        name="same tokens",
        outcome="warned" if prompts or replies else "passed",
        figure=f"{prompts} prompts, {replies} replies of another length in another run",
        meaning=meaning,
    )


def _cold_caches(case: _Case) -> Check:
    """Warn if more than 5 % of the prompt that was answered first in a run was found cached."""
    warmest, where = 0.0, ""
    for run in case.sent:
        first = min(run.turns, key=_first_token_at_s)  # not sent: it may have been overtaken
        share = (first.num_cached_tokens or 0) / (first.num_prompt_tokens or 1)
        if share > warmest:
            warmest, where = share, f" ({run.info.label}, round {run.info.round})"
    return Check(
        name="cold caches",
        outcome="passed" if warmest <= _COLD else "warned",
        figure=f"at most {warmest:.1%} of a run's first prompt was cached{where}",
    )


def _first_token_at_s(turn: TurnResult) -> float:
    return turn.start_s + (math.inf if turn.ttft_s is None else turn.ttft_s)


def _unseen_bytes(case: _Case) -> Check:
    """Warn if two live runs sent the same bytes: had the same `--salt`."""
    name = "unseen bytes"
    if not case.live:
        return Check(name=name, outcome="does not apply", figure="simulated caches start empty")
    salts = {str(run.info.settings.get("salt", "")) for run in case.live}
    repeated = len(salts) < len(case.live)
    return Check(
        name=name,
        outcome="warned" if repeated else "passed",
        figure=f"{len(salts)} salts in {len(case.live)} runs",
        meaning="runs on the same caches found what others had left, unless engines were restarted"
        if repeated
        else "",
    )


def _on_time(case: _Case) -> Check:
    """Warn if the driver was late at its P99 by more than 10 ms and by more than a tenth of the
    median first-token time; then times get no verdict.
    """
    name = "driver on time"
    if not case.live:
        return Check(name=name, outcome="does not apply", figure="simulated")
    late = max(case.sent, key=late_p99_s, default=None)
    if late is None:
        return Check(name=name, outcome="does not apply", figure="nothing was sent")
    why = lateness(case.sent)
    return Check(
        name=name,
        outcome="warned" if why else "passed",
        figure=f"at most {milliseconds(late_p99_s(late))} late at the P99 of a run "
        f"({late.info.loop} loop)",
        meaning="times are compared without a verdict; token counts hold" if why else "",
    )


def _drift_within(case: _Case) -> Check:
    """Warn if median first-token times of the last third to the first third of a run are 50 %
    apart between variants (from 60 turns on).
    """
    name = "drift within runs"
    changes: dict[str, float] = {}
    for label in case.setting.labels:
        turns = sorted(
            (turn for run in case.runs if run.info.label == label for turn in run.turns
             if turn.error is None and not turn.is_warm_up),
            key=lambda turn: turn.start_s,
        )  # fmt: skip
        ttfts = [turn.ttft_s for turn in turns if turn.ttft_s is not None]
        third = len(ttfts) // 3
        if len(ttfts) >= _MIN_TURNS:
            changes[label] = median(ttfts[-third:]) / (median(ttfts[:third]) or 1e-9)
    if not changes:
        return Check(name=name, outcome="does not apply", figure="too few turns")
    apart = max(changes.values()) / max(min(changes.values()), 1e-9)
    figure = ", ".join(f"{label} × {change:.2f}" for label, change in changes.items())
    return Check(
        name=name,
        outcome="warned" if apart > _DRIFT_APART else "passed",
        figure=f"median TTFT, last third : first third: {figure}",
        meaning="the variants go different ways as the run goes on (queues grow, caches warm): "
        "a longer run would show another ratio"
        if apart > _DRIFT_APART
        else "",
    )


def _repetitions(case: _Case) -> Check:
    """Warn if a variant has fewer than two complete rounds."""
    num_rounds = min(
        (sum(run.info.label == label and run.info.is_complete for run in case.runs)
         for label in case.setting.labels),
        default=0,
    )  # fmt: skip
    return Check(
        name="repetitions",
        outcome="passed" if num_rounds >= _MIN_ROUNDS else "warned",
        figure=f"{num_rounds} complete round{'s' if num_rounds != 1 else ''} of every variant",
        meaning=""
        if num_rounds >= _MIN_ROUNDS
        else "how far a variant differs from itself is unknown",
    )


def _sessions(case: _Case) -> Check:
    """Warn below 20 sessions, sub-agents not counted."""
    ids = {turn.session_id for run in case.runs for turn in run.turns}
    num = len(set(roots(ids).values()))
    return Check(
        name="sessions",
        outcome="passed" if num >= _MIN_SESSIONS else "warned",
        figure=f"{num} sessions, sub-agents counted with their parents",
        meaning="" if num >= _MIN_SESSIONS else "few: intervals are rough, and hang on single ones",
    )


def _slo(case: _Case) -> Check:
    """Warn if there is no SLO, and so no goodput."""
    bounds = [
        f"{name} ≤ {bound:g} s"
        for name, bound in (("TTFT", case.setting.slo_ttft_s), ("TBT", case.setting.slo_tbt_s))
        if bound is not None
    ]
    return Check(
        name="SLO stated",
        outcome="passed" if bounds else "warned",
        figure=" and ".join(bounds) or "none",
        meaning="" if bounds else "no goodput without one: --slo-ttft, --slo-tbt",
    )


QUESTIONS: Final[dict[str, Callable[[_Case], Check]]] = {
    "all runs done": _completeness,
    "no errors": _errors,
    "turns in common": _common_turns,
    "same tokens": _same_tokens,
    "cold caches": _cold_caches,
    "unseen bytes": _unseen_bytes,
    "driver on time": _on_time,
    "drift within runs": _drift_within,
    "repetitions": _repetitions,
    "sessions": _sessions,
    "SLO stated": _slo,
}
"""Check to the function that makes it; its docstring says when it warns."""
