"""Follows candidates' engines, each from the blocks that Redis has of it."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing, suppress
from typing import Final

from policies.view import CandidateId
from router.cluster.candidate_names import CandidateNames
from router.cluster.candidate_source import CandidateSource
from router.cluster.index_writer import IndexWriter, StreamWriter
from router.cluster.link import Link
from router.cluster.snapshot_loader import SnapshotLoader
from router.index.cache_view import CacheView
from router.kv_events.follower import follow
from router.kv_events.stream import RankStream

SETTLE_S: Final = 5.0
"""How long a candidate waits for Redis before its engine is followed without the blocks there."""


class Following:
    """Follows candidates, with Redis and without.

    Args:
        caches: Where candidates' streams and blocks are.
        names: The candidates' names among routers.
        writer: Writes what is followed to Redis.
        loader: Loads what Redis has.
        link: Whether Redis is there.
    """

    def __init__(
        self,
        *,
        caches: CacheView,
        names: CandidateNames,
        writer: IndexWriter,
        loader: SnapshotLoader,
        link: Link,
    ) -> None:
        self._caches = caches
        self._names = names
        self._writer = writer
        self._loader = loader
        self._link = link
        self._restarted: set[CandidateId] = set()

    async def follow(self, source: CandidateSource) -> None:
        """Follow a candidate's blocks until cancelled.

        Raises:
            ConfigError: its event endpoint is not valid.
        """
        with closing(source.events()) as events:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._link.settled.wait()
            stream_id = self._names.stream_id_of(source.candidate)
            if stream_id is None:  # removed meanwhile
                return
            writer = self._writer.add(stream_id, source.candidate)
            try:
                await follow(await self.start(writer), events)
            finally:
                self._writer.remove(writer)

    async def start(self, writer: StreamWriter) -> RankStream:
        """Return the candidate's stream, with the blocks that Redis has if nothing is known."""
        candidate, index = writer.candidate, self._caches.index
        stream = self._caches.stream(candidate)
        assert isinstance(stream, RankStream)
        if candidate in self._restarted:  # Redis has the blocks of the process before
            self._restarted.discard(candidate)
            return stream
        if not self._link.is_up or not stream.is_blind:
            return stream
        loaded = await self._loader.load(writer.stream_id)
        if loaded is not None:
            is_usable = stream.resume(
                loaded.position, loaded.status, time.monotonic(), newest=loaded.newest
            )
            if is_usable:
                index.replace(candidate, loaded.staged)
                writer.loaded(loaded.head, loaded.num_logged)
            else:
                index.discard(loaded.staged)
        return stream

    def restarted(self, candidate: CandidateId) -> None:
        """Record that a candidate's engine is a new process, whose cache is empty."""
        self._restarted.add(candidate)
