"""Replicas that sleep or are paused: they get no requests, and blocks that they lost do not count.

An engine that sleeps answers /health and queues requests. Only a metric shows it (source:
vllm/v1/metrics/loggers.py and v1/engine/core.py, 0.32.0):

    vllm:engine_sleep_state{sleep_state="awake"}  0     it sleeps; /pause alone does not show
    "weights_offloaded", "discard_all"            1     level 1, 2: its KV cache is gone, and with a
                                                        MooncakeStoreConnector all of the pool
    AllBlocksCleared                                    is published with its first step afterwards

A paused engine (`POST /pause`, for new weights) behaves in the same way, and says so at
`/is_paused`. Both routes exist in dev mode alone (entrypoints/rl/online/api_router.py). It does not
say whether it lost its cache. It did, in every `mode`, unless `clear_cache=false` (v1/engine/
core.py). An order through our own admin port is known with its parameters, at once.

From 0.33 on, a paused engine answers new requests with 503. So does an engine that elastic EP
scales or has retired. The first such answer counts (router.request.send). The next reading of
its metrics shows when it resumes. Without metrics, requests try it again after some seconds.

Requests without a first byte leave a replica that sleeps, or is paused and computes nothing. A
paused engine may still finish what it has begun (mode `wait`).

Lost blocks are dropped when the sleep is seen. They are dropped again when the replica is awake and
has not published that yet: history that was read meanwhile has the blocks from before. The master
reports what the pool lost (router.pool.follower).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from router.base.errors import SetAside
from router.discovery.engine_pages import SleepState
from router.index.cache_view import CacheView
from router.kv_events.stream import RankStream
from router.replicas.fleet import Fleet
from router.replicas.replica import Ordered, Replica, candidates_of
from router.upstream import Upstream

logger = logging.getLogger(__name__)

ASIDE_S: Final = 5.0
"""Without metrics a replica is tried again this long after its 503."""

_STILL_S: Final = 1.0
"""A paused replica whose figures moved so recently may still compute."""

_WHY: Final[dict[SleepState, str]] = {
    "asleep": "replica sleeps: it gets no requests",
    "emptied": "replica sleeps: it gets no requests; it lost its cache and emptied its pool",
    "paused": "replica is paused: it gets no requests",
}


def _ignore(order: Ordered) -> None:
    """Tell nobody: there are no other routers."""


class Sleepers:
    """Knows which replicas sleep or are paused."""

    def __init__(self, fleet: Fleet, caches: CacheView, upstream: Upstream) -> None:
        self._fleet = fleet
        self._caches = caches
        self._upstream = upstream
        self._emptied: dict[str, list[tuple[RankStream, int]]] = {}  # and clears until then
        self._ordered_s: dict[str, float] = {}
        self._aside_s: dict[str, float] = {}  # since when, by a 503
        self.on_order: Callable[[Ordered], None] = _ignore
        """Called with an order that this router sent, for other routers."""

    def note(self, name: str, state: SleepState, asked_s: float) -> None:
        """Record a replica's state, as it shows it; a change takes effect at once.

        `asked_s`: when it was asked; an order since then is newer.
        """
        if asked_s >= self._ordered_s.get(name, asked_s):
            self._change(name, state, is_lost=state == "emptied")
        if self.is_away(name) and self._fleet.members.signs(name).moved_s < asked_s - _STILL_S:
            self._upstream.abort(name, SetAside)

    def is_away(self, name: str) -> bool:
        """Return whether a replica sleeps or is paused."""
        replica = self._replica(name)
        return replica is not None and not replica.is_awake

    def set_aside(self, name: str, now_s: float) -> None:
        """Record a replica's 503 that says that it is paused, or being scaled.

        One that scales answers what it has begun, so those requests stay.
        """
        self._aside_s.setdefault(name, now_s)
        self._change(name, "paused", is_lost=False)

    def look_again(self, name: str, now_s: float) -> None:
        """Allow requests to try a replica that was set aside and whose metrics say nothing."""
        if now_s - self._aside_s.get(name, now_s) >= ASIDE_S:
            self._change(name, "awake", is_lost=False)

    def look(self, name: str) -> None:
        """Request a reading of a replica's state now."""
        self._fleet.members.signs(name).on_doubt()

    def ordered(self, order: Ordered, now_s: float) -> None:
        """Record an order of this router, and tell the others."""
        self.follow(order, now_s)
        self.on_order(order)

    def follow(self, order: Ordered, now_s: float) -> None:
        """Record an order that a replica confirmed, to this router or to another one."""
        name, state, is_lost = order
        replica = self._replica(name)
        if replica is None:
            return
        if state is None:
            self.look(name)
            return
        if not replica.asleep:  # /resume does not wake it up
            self._ordered_s[name] = now_s
            self._change(name, state, is_lost=is_lost)
        if self.is_away(name):
            self._upstream.abort(name, SetAside)

    def forget(self, name: str) -> None:
        """Drop a replica: another process answers there now, or none."""
        self._emptied.pop(name, None)
        self._ordered_s.pop(name, None)
        self._aside_s.pop(name, None)

    def _change(self, name: str, state: SleepState, *, is_lost: bool) -> None:
        replica = self._replica(name)
        if replica is None:
            return
        if state == "awake":
            self._aside_s.pop(name, None)
        asleep, paused = state in ("asleep", "emptied"), state == "paused"
        if (replica.asleep, replica.paused) != (asleep, paused):
            self._fleet.members.set_sleep(name, asleep=asleep, paused=paused)
            if state == "awake":
                what = "replica awake again" if replica.asleep else "replica resumed"
                logger.info(what, extra={"replica": name})
            else:
                logger.warning(_WHY[state], extra={"replica": name})
        if is_lost and name not in self._emptied:
            streams = self._streams(name)
            self._clear(streams)
            self._emptied[name] = [(each, each.counters.blocks.num_clears) for each in streams]
        elif state == "awake":
            emptied = self._emptied.pop(name, ())
            self._clear([each for each, num in emptied if each.counters.blocks.num_clears == num])

    def _replica(self, name: str) -> Replica | None:
        member = self._fleet.members.by_name.get(name)
        return member.replica if member is not None else None

    def _clear(self, streams: list[RankStream]) -> None:
        for stream in streams:
            stream.cleared()

    def _streams(self, name: str) -> list[RankStream]:
        """List the streams that this router reads itself; others publish what they clear."""
        replica = self._fleet.members.replica(name)
        found = [self._caches.stream(candidate.id) for candidate in candidates_of(replica)]
        return [stream for stream in found if isinstance(stream, RankStream)]
