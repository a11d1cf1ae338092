"""A session as a Perfetto trace: it keeps the rules of the trace event format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from policies.view import CandidateId
from router.observers.sessions.session_ledger import Session
from router.observers.sessions.timeline import MAX_TURNS, timeline
from router.observers.sessions.turns import Turn
from router.records.computed import Computed, Move

Event = dict[str, Any]

encode = msgspec.msgpack.encode


def turn(number: int, *, at: float, replica: str = "r1", **fields: Any) -> Turn:
    """A turn of 1 s that waits 0.2 s, and whose first token comes 0.5 s after that."""
    usual = {"router_ms": 1.0, "waited_ms": 200.0, "ttft_ms": 500.0, "total_ms": 1000.0}
    return Turn(
        request_id=f"q{number}",
        at=at,
        candidate=CandidateId(replica),
        model="tiny",
        outcome="ok",
        num_tokens=100,
        num_cached=60,
        **(usual | fields),
    )


def moved(origin: str) -> Computed:
    return Computed(tokens={"moved": 40}, move=Move(origin=origin))


def session(*turns: Turn, key: int = 7) -> Session:
    made = Session(key=key, tenant=None, parent=None, begun=0.0, last=0.0)
    for each in turns:
        made.totals.add(each)
        made.packed.append(encode(each))
    return made


def events(trace: dict[str, Any], ph: str, name: str | None = None) -> list[Event]:
    return [e for e in trace["traceEvents"] if e["ph"] == ph and name in (None, e["name"])]


def checked(trace: dict[str, Any]) -> dict[str, Any]:
    """Read a trace back, as a viewer would, and hold it against the format's rules.

    Source: SIGHT E: google/perfetto docs/getting-started/other-formats.md.
    """
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(trace))
    named = {(e["name"], e["pid"], e.get("tid")) for e in events(read, "M")}
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in read["traceEvents"]:
        assert event["ph"] in ("M", "X", "i", "s", "f")
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert ("process_name", event["pid"], None) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
        tracks[event["pid"], event["tid"]].append(event)
    tids = [tid for _, tid in tracks]
    assert len(tids) == len(set(tids))  # some viewers take a tid for one thread of all processes
    for track in tracks.values():
        _assert_nested([e for e in track if e["ph"] == "X"])
    for begin, end in _flows(read):
        assert begin["ts"] <= end["ts"]
        assert end["bp"] == "e"
        for at in (begin, end):
            assert any(
                e["ph"] == "X" and e["ts"] <= at["ts"] < e["ts"] + e["dur"]
                for e in tracks[at["pid"], at["tid"]]
            )
    return read


def _flows(trace: dict[str, Any]) -> Iterator[tuple[Event, Event]]:
    begins, ends = events(trace, "s"), {e["id"]: e for e in events(trace, "f")}
    assert len(begins) == len(ends)
    for begin in begins:
        yield begin, ends[begin["id"]]


def _assert_nested(slices: list[Event]) -> None:
    open_until: list[int] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        assert event["dur"] >= 1
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1], "slices of a track must nest"
        open_until.append(end)


def test_a_turn_is_queue_prefill_and_decode() -> None:
    """One behind the other, in microseconds of unix time."""
    trace = checked(timeline(session(turn(1, at=50.0)), []))

    (whole,), (queue,) = events(trace, "X", "turn"), events(trace, "X", "queue")
    (prefill,), (decode,) = events(trace, "X", "prefill"), events(trace, "X", "decode")
    assert (whole["ts"], whole["dur"]) == (50_000_000, 1_000_000)
    assert (queue["ts"], queue["dur"]) == (50_001_000, 200_000)
    assert (prefill["ts"], prefill["dur"]) == (50_201_000, 500_000)
    assert (decode["ts"], decode["dur"]) == (50_701_000, 299_000)
    assert whole["pid"] == queue["pid"] != prefill["pid"] == decode["pid"]
    assert whole["args"]["request"] == "q1"


def test_turns_at_the_same_time_have_lanes_of_their_own() -> None:
    """And a lane that is free again is used again."""
    turns = [turn(1, at=0.0), turn(2, at=0.3), turn(3, at=5.0)]
    trace = checked(timeline(session(*turns), []))

    first, second, third = events(trace, "X", "turn")
    assert first["tid"] == third["tid"] != second["tid"]
    names = [e["args"]["name"] for e in events(trace, "M", "thread_name")]
    assert len([name for name in names if "lane 2" in name]) == 2  # sessions, replica r1


def test_an_arrow_shows_a_move() -> None:
    """From the last slice at the replica that had the session."""
    turns = [
        turn(1, at=0.0),
        turn(2, at=2.0, replica="r2", computed=moved("r1")),
        turn(3, at=4.0, replica="r2"),
        turn(4, at=6.0, replica="r1", computed=moved("r2")),
    ]
    trace = checked(timeline(session(*turns), []))

    decodes, prefills = events(trace, "X", "decode"), events(trace, "X", "prefill")
    arrows = list(_flows(trace))
    assert [begin["tid"] for begin, _ in arrows] == [decodes[0]["tid"], decodes[2]["tid"]]
    assert [end["ts"] for _, end in arrows] == [prefills[1]["ts"], prefills[3]["ts"]]
    assert prefills[1]["args"]["computed"] == {"moved": 40}


def test_a_move_from_an_unknown_turn_has_no_arrow() -> None:
    """The turn that was there before is not kept any more, or has not ended."""
    turns = [turn(1, at=0.0), turn(2, at=0.1, replica="r2", computed=moved("r1"))]
    trace = checked(timeline(session(*turns), []))

    assert events(trace, "s") == []


def test_a_prefill_at_another_replica_is_drawn_there() -> None:
    trace = checked(timeline(session(turn(1, at=0.0, prefill_at=CandidateId("p1"))), []))

    processes = {e["pid"]: e["args"]["name"] for e in events(trace, "M", "process_name")}
    (prefill,), (decode,) = events(trace, "X", "prefill"), events(trace, "X", "decode")
    assert processes[prefill["pid"]] == "replica p1"
    assert processes[decode["pid"]] == "replica r1"


def test_a_pool_read_is_marked_with_its_tokens() -> None:
    trace = checked(timeline(session(turn(1, at=0.0, num_pool=32)), []))

    (read,) = events(trace, "i", "pool read")
    assert read["args"] == {"tokens": 32}


@pytest.mark.parametrize(
    "fields",
    [
        {"ttft_ms": None, "waited_ms": 0.0},
        {"ttft_ms": 0.0, "total_ms": 0.0, "waited_ms": 0.0, "router_ms": 0.0},
        {"ttft_ms": 9e9, "router_ms": -3.0},
        {"waited_ms": 9e9},
    ],
)
def test_odd_times_make_no_odd_trace(fields: dict[str, Any]) -> None:
    """No first token is known, nothing takes time, or parts take longer than the whole."""
    checked(timeline(session(turn(1, at=0.0, **fields), turn(2, at=0.0, **fields)), []))


def test_sub_agents_are_threads_of_their_own() -> None:
    """On the sessions' process, and at the replicas."""
    child = session(turn(2, at=0.2), key=8)
    trace = checked(timeline(session(turn(1, at=0.0)), [child]))

    first, second = events(trace, "X", "turn")
    assert first["pid"] == second["pid"]
    assert first["tid"] != second["tid"]


def test_a_trace_is_bounded() -> None:
    """Of many sub-agents some are left out, and it says how many turns that are."""
    children = [
        session(*(turn(n, at=float(n)) for n in range(64)), key=key) for key in range(8, 20)
    ]
    trace = checked(timeline(session(turn(1, at=0.0)), children))

    turns = events(trace, "X", "turn")
    assert len(turns) == MAX_TURNS
    assert trace["otherData"]["turns_left_out"] == 12 * 64 + 1 - MAX_TURNS
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(turns[1:60]))
