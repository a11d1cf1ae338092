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
    outcomes: dict[bool | None, Outcome] = {
        True: "passed", False: "warned", None: "does not apply"
    }  # fmt: skip
    found = []
    for name, asked in QUESTIONS.items():
        passes, figure, meaning = asked(case)
        meaning = meaning if passes is False else ""
        found.append(Check(name=name, outcome=outcomes[passes], figure=figure, meaning=meaning))
    return tuple(found)


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


Answer = tuple[bool | None, str, str]
"""Whether it passes (None: does not apply), the figure, and what a warning means."""


def _completeness(case: _Case) -> Answer:
    """Warn if a variant has fewer runs than another, or a run was cut short."""
    num_done = sum(run.info.is_complete for run in case.runs)
    wanted = len(case.setting.labels) * case.setting.num_rounds
    missing = what_is_missing(case.setting, case.runs)
    return num_done == wanted, f"{num_done} of {wanted} runs complete", missing


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


def _errors(case: _Case) -> Answer:
    """Warn if a turn failed; by variant and kind."""
    num_turns = sum(len(run.turns) for run in case.runs)
    kinds = Counter(
        (run.info.label, turn.error)
        for run in case.runs
        for turn in run.turns
        if turn.error is not None
    )
    named = "; ".join(f"{label}: {num} {kind}" for (label, kind), num in sorted(kinds.items()))
    return not kinds, f"{kinds.total()} of {num_turns} turns failed", named


def _common_turns(case: _Case) -> Answer:
    """Warn if more than 1 % of the turns of two variants have no counterpart that succeeded."""
    found = [c for c in case.comparisons if c.measure == "mean TTFT"]
    if not found:
        return False, "no turn succeeded in two variants", ""
    worst = min(found, key=lambda c: c.num_turns / (c.num_turns + c.num_left_out))
    total = worst.num_turns + worst.num_left_out
    return (
        worst.num_turns / total >= _COMPARED,
        f"{worst.num_left_out} of {total} turns of {worst.arm} and {worst.baseline} not compared",
        "they failed or never came in one of the two; what is left may be the easier part",
    )


def _same_tokens(case: _Case) -> Answer:
    """Warn if a prompt or a reply had another length in another run."""
    prompts, replies = num_differing_tokens([run.turns for run in case.runs])
    return (
        not (prompts or replies),
        f"{prompts} prompts, {replies} replies of another length in another run",
        "prompts differ in length: the variants did not do the same work"
        if prompts
        else "replies differ in length: later prompts and whole turns are not quite the same",
    )


def _cold_caches(case: _Case) -> Answer:
    """Warn if more than 5 % of the prompt that was answered first in a run was found cached."""
    warmest, where = 0.0, ""
    for run in case.sent:
        first = min(run.turns, key=_first_token_at_s)  # not sent: it may have been overtaken
        share = (first.num_cached_tokens or 0) / (first.num_prompt_tokens or 1)
        if share > warmest:
            warmest, where = share, f" ({run.info.label}, round {run.info.round})"
    return warmest <= _COLD, f"at most {warmest:.1%} of a run's first prompt was cached{where}", ""


def _first_token_at_s(turn: TurnResult) -> float:
    return turn.start_s + (math.inf if turn.ttft_s is None else turn.ttft_s)


def _unseen_bytes(case: _Case) -> Answer:
    """Warn if two live runs sent the same bytes: had the same `--salt`."""
    if not case.live:
        return None, "simulated caches start empty", ""
    salts = {str(run.info.settings.get("salt", "")) for run in case.live}
    return (
        len(salts) == len(case.live),
        f"{len(salts)} salts in {len(case.live)} runs",
        "runs on the same caches found what others had left, unless engines were restarted",
    )


def _on_time(case: _Case) -> Answer:
    """Warn if the driver was late at its P99 by more than 10 ms and by more than a tenth of the
    median first-token time; then times get no verdict.
    """
    if not case.live:
        return None, "simulated", ""
    late = max(case.sent, key=late_p99_s, default=None)
    if late is None:
        return None, "nothing was sent", ""
    return (
        not lateness(case.sent),
        f"at most {milliseconds(late_p99_s(late))} late at the P99 of a run "
        f"({late.info.loop} loop)",
        "times are compared without a verdict; token counts hold",
    )


def _drift_within(case: _Case) -> Answer:
    """Warn if median first-token times of the last third to the first third of a run are 50 %
    apart between variants (from 60 turns on).
    """
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
        return None, "too few turns", ""
    figure = ", ".join(f"{label} × {change:.2f}" for label, change in changes.items())
    return (
        max(changes.values()) / max(min(changes.values()), 1e-9) <= _DRIFT_APART,
        f"median TTFT, last third : first third: {figure}",
        "the variants go different ways as the run goes on (queues grow, caches warm): a longer "
        "run would show another ratio",
    )


def _repetitions(case: _Case) -> Answer:
    """Warn if a variant has fewer than two complete rounds."""
    done = Counter(run.info.label for run in case.runs if run.info.is_complete)
    num_rounds = min(done[label] for label in case.setting.labels)
    return (
        num_rounds >= _MIN_ROUNDS,
        f"{num_rounds} complete round{'s' if num_rounds != 1 else ''} of every variant",
        "how far a variant differs from itself is unknown",
    )


def _sessions(case: _Case) -> Answer:
    """Warn below 20 sessions, sub-agents not counted."""
    num = len(set(roots({turn.session_id for run in case.runs for turn in run.turns}).values()))
    return (
        num >= _MIN_SESSIONS,
        f"{num} sessions, sub-agents counted with their parents",
        "few: intervals are rough, and hang on single ones",
    )


def _slo(case: _Case) -> Answer:
    """Warn if there is no SLO, and so no goodput."""
    bounds = {"TTFT": case.setting.slo_ttft_s, "TBT": case.setting.slo_tbt_s}
    stated = [f"{name} ≤ {bound:g} s" for name, bound in bounds.items() if bound is not None]
    return (
        bool(stated),
        " and ".join(stated) or "none",
        "no goodput without one: --slo-ttft, --slo-tbt",
    )


QUESTIONS: Final[dict[str, Callable[[_Case], Answer]]] = {
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
"""Check to the function that answers it; its docstring says when it warns."""
