"""One state line, and one feed, of several workers.

Most sections are shared through Redis: those of the worker that has run for longest are taken. What
counts a worker's own requests is added up: its queue, tokens, audited predictions, tenants. What is
wrong at one worker alone is said with its number.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import Any, Final

import msgspec
from aiohttp import web

from router.http.admin_pages import Handler
from router.http.siblings import Sibling, Siblings
from router.observers.live.admin import (
    LIVE_HEADERS,
    NOT_STORED,
    STATE_S,
    TICK_S,
    asked_for,
)
from router.observers.live.degraded import State, degraded
from router.observers.live.feed import MAX_LISTENERS, too_many
from router.observers.live.state import MAX_FINDINGS, MAX_TENANTS, MAX_WAITING

_MAX_PENDING: Final = 2_000  # lines; then a worker's feed is read no further, and it drops some
_Row = dict[str, Any]


class MergedLive:
    """The live routes, of all workers."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings

    def routes(self) -> Mapping[str, Handler]:
        return {"GET /admin/live": self._live, "GET /admin/state": self._one_state}

    async def _one_state(self, _: web.Request) -> web.Response:
        state = merged_state(await self._states(), self._siblings.worker.total)
        return web.Response(
            body=msgspec.json.encode(state), content_type="application/json", headers=NOT_STORED
        )

    async def _states(self) -> dict[int, State]:
        lines = await self._siblings.gather("/admin/state")
        if not lines:
            raise self._siblings.none_answers()
        return {number: msgspec.json.decode(line) for number, line in lines.items()}

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Stream until the client leaves: each worker's share of what the listener wants."""
        per_s, num_last = asked_for(request.query)
        siblings = self._siblings
        total = siblings.worker.total
        known = (await self._states()).values()  # any worker may have the other listeners
        if any(state["router"]["listeners"] >= MAX_LISTENERS for state in known):
            raise too_many()
        feed = MergedFeed(total)
        path = f"/admin/live?per_s={max(1, per_s // total)}"
        if num_last:
            path += f"&last={-(-num_last // total)}"
        response = web.StreamResponse(headers=LIVE_HEADERS)
        await response.prepare(request)
        followed: set[Sibling] = set()

        async def follow(sibling: Sibling) -> None:
            try:
                await siblings.follow(sibling, path, feed.take)
            finally:
                followed.discard(sibling)
                feed.ended(sibling.number)

        try:
            async with asyncio.TaskGroup() as tg:
                while True:
                    found = siblings.found()
                    for each in found:  # those that were started again, too
                        if each not in followed:
                            followed.add(each)
                            tg.create_task(follow(each), name=f"feed of worker {each.number}")
                    lines = feed.lines(time.monotonic(), [each.number for each in found])
                    if lines:
                        await response.write(b"\n".join([*lines, b""]))
                    await asyncio.sleep(TICK_S)
        except* ConnectionError:
            pass  # the client has left
        return response


class MergedFeed:
    """What one listener is sent: the workers' requests, and one state of all."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._pending: list[bytes] = []
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._states: dict[int, State] = {}
        self._lost: Counter[int] = Counter()  # requests left out, of each worker
        self._lost_before = 0  # of workers that ended
        self._num_lost = 0
        self._state_due_s = 0.0

    async def take(self, number: int, line: bytes) -> None:
        """Keep a line of a worker's feed."""
        if not line.endswith(b"\n"):  # cut off: the worker ended
            return
        if line.startswith(b'{"kind":"decision"'):
            await self._has_room.wait()
            self._pending.append(line.rstrip(b"\n"))
            if len(self._pending) >= _MAX_PENDING:
                self._has_room.clear()
            return
        fields = msgspec.json.decode(line)
        if fields["kind"] == "state":
            self._states[number] = fields
        else:
            self._lost[number] = fields["decisions"]

    def ended(self, number: int) -> None:
        """Drop what a worker said last: it is gone, or its feed is."""
        self._states.pop(number, None)
        self._lost_before += self._lost.pop(number, 0)

    def lines(self, now_s: float, order: Iterable[int]) -> list[bytes]:
        """Return what is due; `order`: the workers, that which has run for longest first."""
        lines, self._pending = self._pending, []
        self._has_room.set()
        num_lost = self._lost_before + self._lost.total()
        if num_lost != self._num_lost:
            self._num_lost = num_lost
            lines.append(msgspec.json.encode({"kind": "lost", "decisions": num_lost}))
        states = {number: self._states[number] for number in order if number in self._states}
        if states and now_s >= self._state_due_s:
            self._state_due_s = now_s + STATE_S
            lines.append(msgspec.json.encode(merged_state(states, self._total)))
        return lines


def merged_state(states: Mapping[int, State], total: int) -> State:
    """Merge states by worker, of which the first has precedence; there should be `total`."""
    every = list(states.values())
    first = every[0]
    merged = first | {
        "router": _router(every),
        "replicas": _replicas(every),
        "queue": _queue([state["queue"] for state in every]),
        "tokens": _tokens([state["tokens"] for state in every]),
        "findings": _findings([state["findings"] for state in every]),
        "tenants": _tenants([state["tenants"] for state in every]),
        "workers": _workers(states, total),
    }
    return merged | {"degraded": degraded(merged)}


def _workers(states: Mapping[int, State], total: int) -> _Row:
    """List which workers answer, and what is wrong at some of them only."""
    first = next(iter(states.values()))["degraded"]
    others = {number: state["degraded"] for number, state in states.items()}
    return {
        "total": total,
        "missing": [number for number in range(1, total + 1) if number not in states],
        "degraded": [
            f"worker {number}: {text}"
            for number, texts in others.items()
            for text in texts
            if text not in first
        ],
    }


def _router(states: list[State]) -> _Row:
    about: _Row = states[0]["router"]
    hosts = [host for state in states for host in state["router"]["unresolved"]]
    return about | {
        "listeners": max(state["router"]["listeners"] for state in states),
        "unresolved": list(dict.fromkeys(hosts)),
    }


def _replicas(states: list[State]) -> _Row:
    """Return the replicas of the first; add up the predictions, which each worker audits itself."""
    first: _Row = states[0]["replicas"]
    audits: dict[str, Counter[str]] = {}
    predictions: Counter[str] = Counter()
    for replicas in (state["replicas"] for state in states):
        predictions.update(replicas["predictions"])
        for row in replicas["shown"]:
            audit = {"right": row["right"], "audited": row["audited"]}
            audits.setdefault(row["name"], Counter()).update(audit)
    shown = [row | audits[row["name"]] for row in first["shown"]]
    return first | {"predictions": predictions, "shown": shown}


def _queue(queues: list[_Row]) -> _Row:
    waiting: Counter[str] = Counter()
    for queue in queues:
        waiting.update(queue["for"])
    rows = [row for queue in queues for row in queue["shown"]]
    return queues[0] | {
        "waiting": sum(queue["waiting"] for queue in queues),
        "batch": sum(queue["batch"] for queue in queues),
        "for": waiting,
        "shown": nlargest(MAX_WAITING, rows, key=lambda row: row["waited_s"]),
    }


def _tokens(histories: list[_Row]) -> _Row:
    """Add up the tokens of each step; workers began at different times, so steps are rounded."""
    first, step_s = histories[0], histories[0]["step_s"]
    steps: dict[int, list[int]] = {}
    for history in histories:
        for at, *tokens in history["steps"]:
            row = steps.setdefault(int(at // step_s), [0, *[0] * len(tokens)])
            row[0] = max(row[0], at)
            row[1:] = map(sum, zip(row[1:], tokens, strict=True))
    totals = [sum(column) for column in zip(*(h["totals"] for h in histories), strict=True)]
    return first | {"totals": totals, "steps": [steps[at] for at in sorted(steps)]}


def _findings(lists: list[list[_Row]]) -> list[_Row]:
    """Keep one finding of each kind: the one that is about most tokens."""
    most: dict[tuple[Any, Any], _Row] = {}
    for row in (row for rows in lists for row in rows):
        of = row.get("tenant"), row.get("part")
        if of not in most or row["tokens"] > most[of]["tokens"]:
            most[of] = row
    return list(most.values())[: MAX_FINDINGS + 1]


def _tenants(sections: list[_Row | None]) -> _Row | None:
    known = [section for section in sections if section is not None]
    if not known:
        return None
    rows: dict[str, dict[str, float]] = {}
    for row in (row for section in known for row in section["shown"]):
        sums = rows.setdefault(row["name"], {})
        for name, value in row.items():
            if name != "name":
                sums[name] = sums.get(name, 0.0) + value
    top = nlargest(MAX_TENANTS, rows.items(), key=lambda pair: pair[1].get("uncached", 0.0))
    return known[0] | {"shown": [{"name": name, **row} for name, row in top]}
