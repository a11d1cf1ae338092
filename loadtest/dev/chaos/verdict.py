"""The promises of a run, and whether they held.

A retry *could have saved* a failed request if all of this holds:

    1  nothing of an answer had reached its client
    2  its router was not killed, paused or out of descriptors meanwhile
    3  one replica was undisturbed for this router, from `SETTLED_S` before the request to its end
    4  it had not been sent to two disturbed replicas; a router tries work only once more

Memory of a router is flat if its *floor* is flat: its minimum in the second half of a life,
compared with the first half. Memory above the floor follows the requests in flight.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from msgspec import Struct

from loadtest.dev.chaos.faults import Done
from loadtest.dev.chaos.ledger import FAILED, Ledger, Seen
from loadtest.dev.chaos.plan import REPLICAS, ROUTERS
from loadtest.dev.chaos.stack import Life
from loadtest.dev.chaos.watch import Sample

NONE_RESENT: Final[Mapping[str, int]] = {}
SETTLED_S: Final = 5.0  # until routers use a replica again that was disturbed
_WARM_S: Final = 20.0  # of a life
_LONG_S: Final = 40.0  # shorter records say nothing about growth
_FULL_S: Final = 75.0  # of a life: what is remembered of prompts has filled
_FLOOR_S: Final = 60.0  # a router gives back what is free once a minute
# Lives of five minutes grew by 27 to 40 MiB over 2,800 to 4,400 requests, one of 25 minutes without
# faults by 70 over 25,800 (2026-11-30): a part for the allocator, and a part for each request of
# either router, which is remembered: new blocks of the pool, token ids, its session's causes. All
# have bounds (docs/operate/sizing.md).
_SWAY_BYTES: Final = 40 * 1024 * 1024
_FILL_BYTES: Final = 2 * 1024
_FILLED_BYTES: Final = 560 * 1024 * 1024
_GROWTH_DESCRIPTORS: Final = 40
_NOT_WORKED_ON: Final = (b'"upstream_unreachable"', b'"status_503"')
_OF_ROUTERS: Final = frozenset(
    {"router killed", "router paused", "router out of descriptors", "router ended"}
)


class Check(Struct, frozen=True, kw_only=True):
    """One thing that must hold. `holds` None: the run was too short to say."""

    name: str
    holds: bool | None
    figures: str
    failures: Sequence[str] = ()


class Evidence(Struct, kw_only=True):
    """All that is known of a run when it is over. Seconds of the loop's clock."""

    start_s: float
    end_s: float
    ledger: Ledger
    time_line: list[Done]
    lives: Mapping[str, list[Life]]
    gauges: Mapping[tuple[str, int], Mapping[str, float]]
    samples: Mapping[tuple[str, int], list[Sample]]
    logs: Sequence[Path]
    engine_lines: Sequence[Mapping[str, Any]]
    is_partial: bool
    resent: Mapping[str, int] = {}  # request -> how often its router sent it once more


def judge(evidence: Evidence) -> list[Check]:
    """Check everything."""
    return [
        _ends_clearly(evidence),
        _is_right(evidence),
        _none_lost(evidence),
        _none_twice(evidence),
        _gauges_are_zero(evidence),
        _memory_is_flat(evidence),
        _descriptors_are_flat(evidence),
        _none_died(evidence),
        _no_traceback(evidence),
    ]


def could_be_saved(
    seen: Seen, time_line: Iterable[Done], resent: Mapping[str, int] = NONE_RESENT
) -> bool:
    """Return whether a retry could have saved a failed request; see the module."""
    if seen.has_text or seen.outcome not in FAILED or seen.kind != "agent":
        return False
    if resent.get(seen.id, 0) > 0:
        return False
    hurt: set[str] = set()
    for done in time_line:
        fault = done.fault
        if fault.kind.group == "router" and fault.target == seen.router:
            if fault.kind.name in _OF_ROUTERS and done.overlaps(seen.start_s, seen.end_s):
                return False
        elif fault.kind.group == "replica" and done.overlaps(seen.start_s - SETTLED_S, seen.end_s):
            router, _, replica = fault.target.rpartition("-")
            if router in ("", seen.router):
                hurt.add(replica)
    return len(hurt) < len(REPLICAS)


def around(seen: Seen, evidence: Evidence) -> str:
    """Describe a request and the faults about it, so that it can be looked into."""
    at_s = seen.start_s - evidence.start_s
    faults = [
        f"{done.fault.kind.name} {done.fault.target} {done.start_s - evidence.start_s:.1f}-"
        f"{(done.end_s or evidence.end_s) - evidence.start_s:.1f}"
        for done in evidence.time_line
        if done.overlaps(seen.start_s - 2.0, seen.end_s)
    ]
    return (
        f"{at_s:.1f}+{seen.end_s - seen.start_s:.1f} s {seen.id} ({seen.kind}, {seen.api}) at "
        f"{seen.router}: {seen.outcome}: {seen.detail} | faults: {'; '.join(faults) or 'none'}"
    )


def _check(name: str, failures: Sequence[str], figures: str) -> Check:
    return Check(name=name, holds=not failures, figures=figures, failures=failures)


def _failures(evidence: Evidence, found: Iterable[Seen]) -> list[str]:
    return [around(seen, evidence) for seen in found]


def _ends_clearly(evidence: Evidence) -> Check:
    seen = evidence.ledger.seen
    found = [one for one in seen if one.outcome == "unclear"]
    return _check(
        "every request ends in an answer or one clear error",
        _failures(evidence, found),
        f"{len(found)} of {len(seen):,} did not",
    )


def _is_right(evidence: Evidence) -> Check:
    found = [one for one in evidence.ledger.seen if one.outcome == "wrong"]
    return _check(
        "every answer is its own request's, and right: text, end, usage once",
        _failures(evidence, found),
        f"{evidence.ledger.count('right'):,} right, {len(found)} wrong",
    )


def _none_lost(evidence: Evidence) -> Check:
    seen = [one for one in evidence.ledger.seen if one.outcome in FAILED and one.kind == "agent"]
    found = [one for one in seen if could_be_saved(one, evidence.time_line, evidence.resent)]
    num_begun = sum(one.has_text for one in seen)
    num_twice = sum(evidence.resent.get(one.id, 0) > 0 for one in seen if not one.has_text)
    return _check(
        "none failed that a retry could have saved",
        _failures(evidence, found),
        f"{len(found)} of {len(seen)} that failed ({num_begun} in a stream that had begun, "
        f"{num_twice} at two replicas)",
    )


def _none_twice(evidence: Evidence) -> Check:
    """Check that engines computed a request twice only if something broke."""
    num_whole: Counter[str] = Counter()
    num_started: Counter[str] = Counter()
    for line in evidence.engine_lines:
        name = str(line["request"])
        if not line["is_end"]:
            num_started[name] += 1
        elif line["is_whole"]:
            num_whole[name] += 1
    by_id = {one.id: one for one in evidence.ledger.seen}
    twice = [by_id[name] for name, number in num_whole.items() if number > 1 and name in by_id]
    found = [
        one
        for one in twice
        if not any(done.overlaps(one.start_s - 1.0, one.end_s) for done in evidence.time_line)
    ]
    num_resent = sum(number - 1 for number in num_started.values())
    return _check(
        "none computed twice where nothing broke",
        _failures(evidence, found),
        f"{num_resent} tries abandoned, {len(twice)} of them computed whole, "
        f"{len(found)} for no reason",
    )


def _gauges_are_zero(evidence: Evidence) -> Check:
    failures: list[str] = []
    num_gauges = 0
    for router in ROUTERS:
        gauges = evidence.gauges.get((router, evidence.lives[router][-1].number))
        if gauges is None:
            failures.append(f"router {router} does not answer in the end")
            continue
        num_gauges += len(gauges)
        failures += [f"router {router}: {k} is {v:g}" for k, v in gauges.items() if v]
    return _check(
        "nothing is in flight in the end",
        failures,
        f"{num_gauges} gauges at zero" if not failures else "",
    )


def _memory_is_flat(evidence: Evidence) -> Check:
    """Compare the floors of both halves of each long life, once what it remembers has filled."""
    figures: list[str] = []
    failures: list[str] = []
    for (router, life), samples in sorted(evidence.samples.items()):
        full = _since_ready(evidence, router, life, samples, _FULL_S)
        if not full or full[-1].at_s - full[0].at_s < 2 * _FLOOR_S:
            continue
        middle_s = (full[0].at_s + full[-1].at_s) / 2
        first, last = (
            min((s for s in full if (s.at_s > middle_s) is late), key=lambda s: s.rss_bytes)
            for late in (False, True)
        )
        num_requests = sum(first.at_s < seen.end_s <= last.at_s for seen in evidence.ledger.seen)
        grown = last.rss_bytes - first.rss_bytes
        line = (
            f"{router}: {first.rss_bytes / 2**20:.0f} MiB to {last.rss_bytes / 2**20:.0f} MiB "
            f"over {num_requests:,} requests of both routers"
        )
        figures.append(line)
        if grown > _SWAY_BYTES + min(_FILLED_BYTES, _FILL_BYTES * num_requests):
            failures.append(f"life {life} of router {line}")
    return _flatness("memory of routers is flat", figures, failures)


def _descriptors_are_flat(evidence: Evidence) -> Check:
    """Compare the medians of the first and the last fifth of each long life, once warm."""
    figures: list[str] = []
    failures: list[str] = []
    for (router, life), samples in sorted(evidence.samples.items()):
        warm = _since_ready(evidence, router, life, samples, _WARM_S)
        if not warm or warm[-1].at_s - warm[0].at_s < _LONG_S:
            continue
        fifth = len(warm) // 5
        first = statistics.median(s.num_descriptors for s in warm[:fifth])
        last = statistics.median(s.num_descriptors for s in warm[-fifth:])
        figures.append(f"{router}: {first:.0f} to {last:.0f}")
        if last - first > _GROWTH_DESCRIPTORS:
            failures.append(f"life {life} of router {figures[-1]}")
    return _flatness("descriptors of routers are flat", figures, failures)


def _since_ready(
    evidence: Evidence, router: str, life: int, samples: Sequence[Sample], after_s: float
) -> list[Sample]:
    """Leave out what was seen until `after_s` after it was ready; all, if it never was."""
    ready_s = evidence.lives[router][life].ready_s
    return [s for s in samples if ready_s is not None and s.at_s > ready_s + after_s]


def _flatness(name: str, figures: Sequence[str], failures: Sequence[str]) -> Check:
    return Check(
        name=name,
        holds=None if not figures else not failures,
        figures="; ".join(figures) or "no life was long enough",
        failures=failures,
    )


def _none_died(evidence: Evidence) -> Check:
    failures: list[str] = []
    num_lives = 0
    for name, lives in evidence.lives.items():
        for life in lives:
            num_lives += 1
            if life.how == "died":
                failures.append(f"{name}, life {life.number}: ended with status {life.status}")
            elif name in ROUTERS and life.how == "ended" and life.status != 0:
                failures.append(f"{name}, life {life.number}: asked to end, status {life.status}")
    return _check(
        "no process ends unless it is made to",
        failures,
        f"{num_lives} lives of {len(evidence.lives)} servers",
    )


def _no_traceback(evidence: Evidence) -> Check:
    failures = []
    for log in evidence.logs:
        number = log.read_bytes().count(b"Traceback (most recent call last)") if log.exists() else 0
        if number:
            failures.append(f"{log}: {number}")
    return _check("no traceback in the logs of routers", failures, f"{len(evidence.logs)} logs")


def resent(logs: Iterable[Path]) -> Counter[str]:
    """Count how often routers sent requests once more, though a replica may have worked on them."""
    found: Counter[str] = Counter()
    for log in logs:
        for line in log.read_bytes().split(b"\n"):
            is_retry = b'"retried on another replica before' in line
            if is_retry and not any(why in line for why in _NOT_WORKED_ON):
                found[orjson.loads(line)["request"]] += 1
    return found


def engine_lines(path: Path) -> list[Mapping[str, Any]]:
    """Read the engines' request log; a last line that a kill cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [orjson.loads(line) for line in lines if line.endswith(b"}")]
