"""Each thing that must hold is seen when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.dev.chaos.faults import Done
from loadtest.dev.chaos.ledger import Ledger, Outcome, Seen
from loadtest.dev.chaos.plan import KINDS, Fault
from loadtest.dev.chaos.stack import Life
from loadtest.dev.chaos.verdict import Evidence, could_be_saved, judge
from loadtest.dev.chaos.watch import Sample

KIND = {kind.name: kind for kind in KINDS}
GAUGES = {"warmroute_inflight_requests": 0.0}


def seen(outcome: Outcome = "right", **fields: Any) -> Seen:
    """Write down a request of one second, ten seconds into the run."""
    known: dict[str, Any] = {
        "id": "x-1",
        "kind": "agent",
        "api": "chat",
        "router": "a",
        "life": 0,
        "start_s": 10.0,
        "end_s": 11.0,
        "status": 200,
        "outcome": outcome,
    }
    return Seen(**known | fields)


def done(name: str, target: str, start_s: float, end_s: float | None) -> Done:
    """Write down a fault."""
    fault = Fault(number=1, kind=KIND[name], target=target, at_s=start_s, duration_s=1.0)
    return Done(fault=fault, start_s=start_s, end_s=end_s)


def run(*requests: Seen, time_line: list[Done] | None = None, **fields: Any) -> Evidence:
    """Put together a run in which all else is well."""
    ledger = Ledger()
    for one in requests:
        ledger.close(one)
    known: dict[str, Any] = {
        "start_s": 0.0,
        "end_s": 61.0,
        "ledger": ledger,
        "time_line": time_line or [],
        "lives": {name: [Life(number=0, start_s=0.0, ready_s=1.0)] for name in ("a", "b")},
        "gauges": {("a", 0): GAUGES, ("b", 0): GAUGES},
        "samples": {},
        "logs": [],
        "engine_lines": [],
        "is_partial": False,
    }
    return Evidence(**known | fields)


def broken(evidence: Evidence) -> list[str]:
    """Name what does not hold."""
    return [check.name for check in judge(evidence) if check.holds is False]


def test_a_good_run_holds() -> None:
    """Answers, refusals, clients that leave, and streams of engines that died."""
    assert broken(run(seen(), seen("left", status=None))) == []


@pytest.mark.parametrize("outcome", ["unclear", "wrong"])
def test_an_unclear_end_and_a_wrong_answer_break_it(outcome: Outcome) -> None:
    """Whatever else happened at that time."""
    bad = seen(outcome, has_text=True)

    assert len(broken(run(bad, time_line=[done("router killed", "b", 9.0, 12.0)]))) >= 1


@pytest.mark.parametrize(("has_text", "num_broken"), [(False, 1), (True, 0)])
def test_an_abort_before_any_text_could_have_been_saved(has_text: bool, num_broken: int) -> None:
    """Behind text it is passed on: the client has a part of the answer."""
    assert len(broken(run(seen("aborted", has_text=has_text)))) == num_broken


@pytest.mark.parametrize(
    ("faults", "is_saveable"),
    [
        ([], True),
        ([done("replica killed", "r1", 9.0, 12.0)], True),
        ([done("replica killed", f"r{i}", 9.0, 12.0) for i in (1, 2, 3)], True),
        ([done("replica killed", f"r{i}", 9.0, 12.0) for i in (1, 2, 3, 4)], False),
        ([done("http held", f"a-r{i}", 9.0, None) for i in (1, 2, 3, 4)], False),
        ([done("http held", f"b-r{i}", 9.0, None) for i in (1, 2, 3, 4)], True),
        ([done("replica killed", f"r{i}", 2.0, 6.0) for i in (1, 2, 3, 4)], False),
        ([done("replica killed", f"r{i}", 1.0, 2.0) for i in (1, 2, 3, 4)], True),
        ([done("router paused", "a", 9.0, 12.0)], False),
        ([done("router paused", "b", 9.0, 12.0)], True),
        ([done("redis killed", "redis", 9.0, 12.0)], True),
    ],
)
def test_what_could_have_been_saved(faults: list[Done], is_saveable: bool) -> None:
    """One replica that is well, for this router, and long enough; a router that is well."""
    assert could_be_saved(seen("error", status=503), faults) == is_saveable


def test_an_answer_computed_twice_needs_a_reason() -> None:
    """Where nothing broke, no client had to try again."""
    lines = [{"request": "x-1", "is_end": True, "is_whole": True}] * 2

    assert len(broken(run(seen(), engine_lines=lines))) == 1
    reason = [done("http reset", "a-r1", 10.5, 10.5)]
    assert broken(run(seen(), engine_lines=lines, time_line=reason)) == []


def test_what_is_left_in_flight_is_named() -> None:
    """A gauge that does not come back to zero is a leak."""
    gauges = {"warmroute_inflight_requests": 1.0}

    assert broken(run(gauges={("a", 0): gauges, ("b", 0): gauges})) == [
        "nothing is in flight in the end"
    ]


def test_growth_is_noticed() -> None:
    """A megabyte a second, and a descriptor."""
    samples = [
        Sample(at_s=float(i), rss_bytes=i << 20, num_descriptors=100 + i) for i in range(240)
    ]

    assert len(broken(run(samples={("a", 0): samples}))) == 2


@pytest.mark.parametrize(("leak_bytes", "is_leak"), [(0, False), (8_000, False), (60_000, True)])
def test_what_comes_and_goes_and_what_fills_is_no_leak(leak_bytes: int, is_leak: bool) -> None:
    """30 MiB that fill in a minute, and 25 MiB free that go back once a minute: ten requests/s."""
    samples = [
        Sample(
            at_s=float(i),
            rss_bytes=(min(i, 60) << 19) + (min(i % 60, 25) << 20) + 10 * i * leak_bytes,
            num_descriptors=60,
        )
        for i in range(400)
    ]
    requests = [seen(start_s=i / 10 - 1.0, end_s=i / 10) for i in range(4_000)]

    checks = {check.name: check for check in judge(run(*requests, samples={("a", 0): samples}))}

    assert checks["memory of routers is flat"].holds is not is_leak


def test_a_process_that_ends_by_itself_is_named() -> None:
    """So is one that does not end well when asked to."""
    for life in (
        Life(number=0, start_s=0.0, end_s=9.0, how="died", status=1),
        Life(number=0, start_s=0.0, end_s=9.0, how="ended", status=1),
    ):
        lives = {"a": [life], "b": [Life(number=0, start_s=0.0)]}
        assert broken(run(lives=lives)) == ["no process ends unless it is made to"]


def test_a_traceback_is_found(tmp_path: Path) -> None:
    """In any life of a router."""
    log = tmp_path / "a.log"
    log.write_text("Traceback (most recent call last):\n")

    assert broken(run(logs=[log])) == ["no traceback in the logs of routers"]
