"""Replicas that sleep: no requests until they are awake, and nothing is counted on that they lost.

An engine that sleeps answers /health and queues what it is sent; only a metric shows it (source:
vllm/v1/metrics/loggers.py and v1/engine/core.py, 0.32.0):

    vllm:engine_sleep_state{sleep_state="awake"}  0     it sleeps; /pause alone does not show
    "weights_offloaded", "discard_all"            1     level 1, 2: its KV cache is gone, and with a
                                                        MooncakeStoreConnector all of the pool
    AllBlocksCleared                                    is published with its first step afterwards

What it held is dropped when it is seen asleep; and again when it is awake and has not said so yet,
for history read meanwhile has the blocks from before. The pool is the master's to report
(router.pool.follower).
"""

from __future__ import annotations

import logging

from router.discovery.engine_pages import SleepState
from router.index.cache_view import CacheView
from router.kv_events.stream import RankStream
from router.replicas.fleet import Fleet
from router.replicas.replica import candidates_of

logger = logging.getLogger(__name__)


class Sleepers:
    """Knows which replicas sleep."""

    def __init__(self, fleet: Fleet, caches: CacheView) -> None:
        self._fleet = fleet
        self._caches = caches
        self._emptied: dict[str, list[tuple[RankStream, int]]] = {}  # and clears until then

    def note(self, name: str, state: SleepState) -> None:
        """Note what a replica's metrics say; a change takes effect at once."""
        replica = next((each for each in self._fleet.replicas if each.name == name), None)
        if replica is None:
            return
        if replica.asleep != (state != "awake"):
            self._fleet.set_asleep(name, state != "awake")
            if state == "awake":
                logger.info("replica awake again", extra={"replica": name})
            else:
                logger.warning(
                    "replica sleeps: it gets no requests; it lost its cache and emptied its pool"
                    if state == "emptied"
                    else "replica sleeps: it gets no requests",
                    extra={"replica": name},
                )
        if state == "emptied" and name not in self._emptied:
            streams = self._streams(name)
            self._clear(streams)
            self._emptied[name] = [(each, each.counters.num_clears) for each in streams]
        elif state == "awake":
            emptied = self._emptied.pop(name, ())
            self._clear([each for each, num in emptied if each.counters.num_clears == num])

    def forget(self, name: str) -> None:
        """Forget a replica: another process answers there now, or none."""
        self._emptied.pop(name, None)

    def _clear(self, streams: list[RankStream]) -> None:
        for stream in streams:
            stream.cleared()

    def _streams(self, name: str) -> list[RankStream]:
        """List the streams that this router reads itself; others publish what they clear."""
        replica = self._fleet.replica(name)
        found = [self._caches.stream(candidate.id) for candidate in candidates_of(replica)]
        return [stream for stream in found if isinstance(stream, RankStream)]
