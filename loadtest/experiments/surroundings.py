"""What records and fleet lack: lost records, blind decisions, changed replicas, other starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from loadtest.experiments.arms import ArmSummary
from loadtest.experiments.findings import Finding, note, warning
from loadtest.experiments.observations import Observations
from loadtest.experiments.records import Named, Records, Request
from loadtest.words import moment, percent

_LOST: Final = 0.005  # of decisions
_BLIND: Final = 0.05  # of requests
_OTHER_FLEET: Final = 0.01
_OTHER_POLICY: Final = 0.02
_LISTED: Final = 5


def check_surroundings(
    records: Records, observations: Observations | None, arms: tuple[ArmSummary, ...]
) -> Iterator[Finding]:
    """Yield findings; `observations` None: there is no experiment."""
    yield from _left_out(records)
    yield from _lost(records)
    yield from _states(arms)
    yield from _policies(arms)
    if observations is None:
        yield from _fleet(records.requests, lambda each: each.model)
    else:
        yield from _fleet(observations.requests, lambda each: each.assignment.arm)  # type: ignore[union-attr]


def _left_out(records: Records) -> Iterator[Finding]:
    if records.num_bad:
        named = "; ".join(str(line) for line in records.bad_lines[:3])
        yield note("bad_lines", f"{records.num_bad:,} lines were left out: {named}")
    if records.num_twice:
        yield note("twice", f"{records.num_twice:,} records were there twice; each is counted once")


def _lost(records: Records) -> Iterator[Finding]:
    """Count the decisions that a router numbered and no record has.

    A router numbers its decisions of each model, retries included. Its seed identifies the process.
    """
    numbers: dict[tuple[int | None, str], list[Request]] = {}
    for each in records.requests:
        if each.number is not None:
            numbers.setdefault((each.seed, each.model), []).append(each)
    seen = lost = 0
    for own in numbers.values():
        given = {each.number for each in own if each.number is not None}
        if len(given) == len(own):  # else several processes have the same seed
            num_tries = sum(each.num_tries for each in own)
            seen += num_tries
            lost += max(0, max(given) - min(given) + 1 - num_tries)
    if lost > max(10, _LOST * (seen + lost)):
        yield warning(
            "lost_records",
            f"about {lost:,} of {seen + lost:,} decisions have no record (numbers are "
            "missing): the disk was slow, or a file is missing. Routers count dropped records in "
            "warmroute_decision_records_dropped_total. Times are too good if slow moments lost "
            "more records",
        )


def _states(arms: tuple[ArmSummary, ...]) -> Iterator[Finding]:
    for arm in arms:
        for state, does in (
            ("blind", "cache contents were guessed"),
            ("degraded", "cache contents were only partly known"),
        ):
            share = arm.states.get(state, 0.0)
            if share > _BLIND:
                yield warning(
                    f"{state}_decisions",
                    f"{percent(share)} of {arm.name}'s decisions were {state.upper()}: {does}",
                )


def _policies(arms: tuple[ArmSummary, ...]) -> Iterator[Finding]:
    for arm in arms:
        main = next(iter(arm.policies.values()), 0)
        others = sum(arm.policies.values()) - main
        if others > _OTHER_POLICY * (main + others):
            counts = ", ".join(f"{name} {count:,}" for name, count in arm.policies.items())
            yield warning("several_policies", f"{arm.name} ran several policies: {counts}")


def _fleet(requests: Sequence[Request], group: Callable[[Request], str]) -> Iterator[Finding]:
    """Compare the replicas that decisions could choose from, within each group of requests."""
    fleets: dict[str, Counter[str]] = {}
    for each in requests:
        if each.fleet:
            fleets.setdefault(group(each), Counter())[each.fleet] += 1
    total = sum(counts.total() for counts in fleets.values())
    usual = sum(max(counts.values()) for counts in fleets.values())
    names = {name for counts in fleets.values() for fleet in counts for name in fleet.split()}
    if total and total - usual > _OTHER_FLEET * total:
        yield warning(
            "fleet_changed",
            f"the fleet changed: {percent((total - usual) / total)} of decisions had other replicas"
            f" to choose from than usual ({len(names)} in all). Replicas that come with cold "
            "caches, or go, move both variants, and not always equally",
        )


def check_trials(chosen: Named, known: list[Named]) -> Iterator[Finding]:
    """Yield the starts of a name that are left out, or joined.

    Args:
        chosen: The starts that are reported on.
        known: All starts of that name, the newest first.
    """
    left = [each for each in known if not set(each.trials) & set(chosen.trials)]
    if left:
        listed = ", ".join(
            f"{each.trials[0]} (from {moment(each.begin_s)}, {each.num_requests:,} requests)"
            for each in left[:_LISTED]
        )
        yield note(
            "other_trials",
            f"this is trial {' and '.join(chosen.trials)}, from {moment(chosen.begin_s)}. Other "
            f"starts of the name are left out: {listed}. --trial ID chooses, several are joined",
        )
    if any(each.begin_s < chosen.end_s and chosen.begin_s < each.end_s for each in left):
        yield warning(
            "trials_overlap",
            "another start of the name ran at the same time: routers that did not receive each "
            "other's orders? Join them with --trial ID --trial ID",
        )
