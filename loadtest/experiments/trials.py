"""An experiment that was started more than once under one name: which of it is reported on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from loadtest.experiments.findings import Finding, note, warning
from loadtest.experiments.records import Named
from loadtest.words import moment

_TOGETHER: Final = 0.5
"""Trials that ran together for that share of the shorter one did not follow one another: moments
are what an order takes from one router to the next."""

_LISTED: Final = 5


def check_trials(chosen: Named, known: list[Named]) -> Iterator[Finding]:
    """Yield what the choice among the trials of a name leaves out, or joins.

    Args:
        chosen: What is reported on.
        known: All trials of that name, the newest first.
    """
    left = [each for each in known if not set(each.trials) & set(chosen.trials)]
    together = [
        each for each in left if _overlap_s(each, chosen) > _TOGETHER * _shorter(each, chosen)
    ]
    if together:
        options = " ".join(f"--trial {id_}" for each in (chosen, *together) for id_ in each.trials)
        yield warning(
            "trials_overlap",
            f"this is trial {_ids(chosen)} only; {_list(together)} ran at the same time: routers "
            f"that did not receive each other's orders? `{options}` takes all for one experiment",
        )
    before = [each for each in left if each not in together]
    if before:
        yield note(
            "other_trials",
            f"the name was given to several experiments: this is trial {_ids(chosen)}, from "
            f"{moment(chosen.begin_s)}; {_list(before)} left out (--trial ID chooses)",
        )
    if len(chosen.trials) > 1:
        yield note("joined_trials", f"trials {_ids(chosen)} are taken for one experiment")


def _overlap_s(one: Named, other: Named) -> float:
    return min(one.end_s, other.end_s) - max(one.begin_s, other.begin_s)


def _shorter(one: Named, other: Named) -> float:
    return min(one.end_s - one.begin_s, other.end_s - other.begin_s)


def _ids(named: Named) -> str:
    return " and ".join(named.trials)


def _list(trials: list[Named]) -> str:
    listed = ", ".join(
        f"{_ids(each)} (from {moment(each.begin_s)}, {each.num_requests:,} requests)"
        for each in trials[:_LISTED]
    )
    more = len(trials) - _LISTED
    return listed + (f" and {more} more" if more > 0 else "")
