"""The blocks of replicas whose events this router does not receive, from their logs in Redis.

For `index.mode: redis`. Each look-up first reads what was added to the logs, in one round trip. A
log that was never read may take several look-ups.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from router.base.contracts import BlockKey
from router.base.errors import StoreUnavailable
from router.base.messages import SharedTier, StreamId
from router.cluster.redis_log import LogReader
from router.cluster.redis_store import RedisStore
from router.index.prefix import Either, leading

_KEEP_S: Final = 60.0
"""How long blocks are kept of a stream that is not looked up."""


class LogTails:
    """What was read of some streams' logs.

    Args:
        timeout_s: Longest time for one look-up.
    """

    def __init__(self, store: RedisStore, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._readers: dict[StreamId, LogReader] = {}
        self._asked_s: dict[StreamId, float] = {}
        self._reading = asyncio.Lock()

    async def lookup(
        self, chain: Sequence[BlockKey], stream_ids: Collection[StreamId]
    ) -> dict[tuple[StreamId, SharedTier], int]:
        """Count leading blocks of a chain that each stream's replica holds.

        Returns:
            Its blocks on gpu, and on gpu or cpu as tier cpu.

        Raises:
            StoreError: Redis is gone, or did not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s), self._reading:
                readers = self._wanted(stream_ids, time.monotonic())
                while readers:
                    readers = await self._read(readers)
        except TimeoutError as exc:
            raise StoreUnavailable(f"no answer within {self._timeout_s:g} s") from exc
        counts: dict[tuple[StreamId, SharedTier], int] = {}
        for stream_id in stream_ids:
            held = self._readers[stream_id].blocks.copies
            either = Either(held["gpu"], held["cpu"])
            counts[stream_id, "gpu"] = leading(chain, held["gpu"], []) if chain else 0
            counts[stream_id, "cpu"] = leading(chain, either, []) if chain else 0
        return counts

    def _wanted(self, stream_ids: Collection[StreamId], now_s: float) -> dict[StreamId, LogReader]:
        for stream_id in stream_ids:
            self._asked_s[stream_id] = now_s
            self._readers.setdefault(stream_id, LogReader())
        for stream_id, asked_s in list(self._asked_s.items()):
            if now_s > asked_s + _KEEP_S:
                del self._asked_s[stream_id], self._readers[stream_id]
        return {stream_id: self._readers[stream_id] for stream_id in stream_ids}

    async def _read(self, readers: Mapping[StreamId, LogReader]) -> dict[StreamId, LogReader]:
        """Read one part of each log; return the streams of which more follows."""
        parts = await self._store.read_logs(readers, timeout_s=self._timeout_s)
        for stream_id, part in parts.items():
            readers[stream_id].begin(part)
            for entry in part.entries:
                readers[stream_id].apply(entry)
        return {id_: reader for id_, reader in readers.items() if not parts[id_].is_end}
