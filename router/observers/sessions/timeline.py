"""A session's turns as a Perfetto trace: https://ui.perfetto.dev or chrome://tracing shows it.

    process "sessions"     a slice for each turn, its time in the queue inside; a thread a session
    process "replica r1"   prefill and decode of each turn there; an instant for a pool read
    an arrow               from the replica that had a session to the one that it moved to

Turns that overlap have lanes (threads) of their own: slices of one thread must nest.
Source: the trace event format, google/perfetto docs/getting-started/other-formats.md. Times are in
microseconds of unix time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

import msgspec

from policies.view import CandidateId
from router.api.sessions import engine_name
from router.observers.sessions.session_ledger import Session
from router.observers.sessions.turns import Turn

MAX_TURNS: Final = 300
"""The most turns in one trace, the session's own first; 300 take 6 ms of the event loop."""

_SESSIONS: Final = 1  # pid
_FIRST_TID: Final = 101  # a thread whose id is a process's would be that one's main thread

Event = dict[str, Any]


def timeline(session: Session, children: Sequence[Session]) -> dict[str, Any]:
    """Draw a session and those that it started, the newest turns of each.

    Returns:
        A trace in JSON object format; `otherData.turns_left_out` says what has no room.
    """
    tracks, arrows, num_turns = _Tracks(), count(1), 0
    events: list[Event] = []
    for each in (session, *reversed(children)):
        turns = each.turns[-(MAX_TURNS - num_turns) :] if num_turns < MAX_TURNS else []
        num_turns += len(turns)
        events += _drawn(each, turns, tracks, arrows)
    num_all = sum(each.totals.num_turns for each in (session, *children))
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*tracks.names(), *events],
        "otherData": {
            "session": engine_name(session.key),
            "turns_left_out": num_all - num_turns,
        },
    }


class _Tracks:
    """Processes by replica, and lanes by what is free; turns come in order of time."""

    def __init__(self) -> None:
        self._pids: dict[CandidateId, int] = {}
        self._lanes: dict[tuple[int, str], list[tuple[int, int]]] = {}  # (tid, busy until)
        self._threads: list[tuple[int, int, str]] = []

    def pid(self, replica: CandidateId) -> int:
        return self._pids.setdefault(replica, _SESSIONS + 1 + len(self._pids))

    def lane(self, pid: int, name: str, begin: int, end: int) -> int:
        """Choose a lane that is free from begin to end, or add one; return its thread."""
        lanes = self._lanes.setdefault((pid, name), [])
        for i, (tid, busy_until) in enumerate(lanes):
            if busy_until <= begin:
                lanes[i] = tid, end
                return tid
        tid = _FIRST_TID + len(self._threads)
        lanes.append((tid, end))
        number = f", lane {len(lanes)}" if len(lanes) > 1 else ""
        self._threads.append((pid, tid, f"{name}{number}"))
        return tid

    def names(self) -> Iterator[Event]:
        """Yield the events that name processes and threads."""
        processes = {"sessions": _SESSIONS}
        processes |= {f"replica {name}": pid for name, pid in self._pids.items()}
        for name, pid in processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for pid, tid, name in self._threads:
            args = {"name": name}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}


def _drawn(
    session: Session, turns: Sequence[Turn], tracks: _Tracks, arrows: Iterator[int]
) -> Iterator[Event]:
    """Yield the events of one session's turns."""
    name = engine_name(session.key)
    ended: dict[CandidateId, list[Event]] = {}  # the last slices at each replica, by their end
    for turn in sorted(turns, key=lambda each: each.at):
        at = _us(turn.at)
        end = at + max(2, _us(turn.total_ms / 1000))
        placed = min(end - 1, at + _us(max(0.0, turn.router_ms + turn.waited_ms) / 1000))
        tid = tracks.lane(_SESSIONS, f"session {name}", at, end)
        yield _slice("turn", _SESSIONS, tid, at, end, _described(turn))
        if turn.waited_ms > 0:
            began, why = max(at, placed - _us(turn.waited_ms / 1000)), {"for": turn.waited_for}
            yield _slice("queue", _SESSIONS, tid, began, placed, why)
        slices = list(_at_replicas(turn, name, tracks, placed, end))
        yield from slices
        move = turn.computed.move if turn.computed is not None else None
        before = ended.get(CandidateId(move.origin), []) if move is not None else []
        origin = next((each for each in reversed(before) if _end(each) <= placed), None)
        if origin is not None:
            yield from _arrow(next(arrows), origin, slices[0])
        ended.setdefault(turn.candidate, []).append(slices[-1])


def _at_replicas(
    turn: Turn, session: str, tracks: _Tracks, placed: int, end: int
) -> Iterator[Event]:
    """Yield what replicas did for a turn: its prefill first, its decode last."""
    args = _described(turn)
    prefill_at = turn.prefill_at or turn.candidate
    first = end
    if turn.ttft_ms is not None:
        first = min(end, max(placed + 1, placed + _us(turn.ttft_ms / 1000)))
    pid = tracks.pid(turn.candidate)
    name = "prefill" if turn.ttft_ms is not None else "prefill and decode"
    busy_until = end if prefill_at == turn.candidate else first
    there = tracks.pid(prefill_at)
    tid = tracks.lane(there, f"session {session}", placed, busy_until)
    yield _slice(name, there, tid, placed, first, args)
    if turn.num_pool:
        read = {"tokens": turn.num_pool}
        yield {"ph": "i", "s": "t", "name": "pool read", "cat": "warmroute", "pid": there,
               "tid": tid, "ts": placed, "args": read}  # fmt: skip
    if first < end:
        if prefill_at != turn.candidate:
            tid = tracks.lane(pid, f"session {session}", first, end)
        yield _slice("decode", pid, tid, first, end, {"output_tokens": turn.num_output})


def _slice(name: str, pid: int, tid: int, begin: int, end: int, args: Event) -> Event:
    return {"ph": "X", "name": name, "cat": "warmroute", "pid": pid, "tid": tid, "ts": begin,
            "dur": end - begin, "args": args}  # fmt: skip


def _arrow(number: int, origin: Event, target: Event) -> Iterator[Event]:
    """Yield an arrow from the end of a slice to the begin of a later one."""
    for ph, at, ts in (("s", origin, _end(origin) - 1), ("f", target, target["ts"])):
        event = {"ph": ph, "name": "moved", "cat": "warmroute", "id": number, "pid": at["pid"],
                 "tid": at["tid"], "ts": ts}  # fmt: skip
        yield event | ({"bp": "e"} if ph == "f" else {})


def _described(turn: Turn) -> Event:
    """Describe a turn: numbers and names, as its page has them."""
    fields: Event = {
        "request": turn.request_id,
        "replica": turn.candidate,
        "model": turn.model,
        "outcome": turn.outcome,
        "prompt_tokens": turn.num_tokens,
        "gpu_tokens": turn.num_gpu,
        "cpu_tokens": turn.num_cpu,
        "pool_tokens": turn.num_pool,
    }
    if turn.computed is not None:
        fields["computed"] = msgspec.to_builtins(turn.computed.tokens)
    return fields


def _end(event: Event) -> int:
    return int(event["ts"] + event["dur"])


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)
