"""Decision records to a file, off the event loop, bounded: a slow disk loses records, not time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from router.records import DecisionRecord

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 10_000  # records; more are dropped and counted
_FLUSH_S: Final = 0.2


class DecisionLog:
    """Appends records to `path` as JSON lines."""

    def __init__(self, path: Path, on_drop: Callable[[], None]) -> None:
        self._path = path
        self._on_drop = on_drop
        self._waiting: deque[DecisionRecord] = deque()
        self._encoder = msgspec.json.Encoder()

    def add(self, record: DecisionRecord) -> None:
        """Queue one record; drops it when the writer is too far behind."""
        if len(self._waiting) >= MAX_WAITING:
            self._on_drop()
        else:
            self._waiting.append(record)

    async def run(self) -> None:
        """Write what was queued, every fifth of a second, and once more at the end."""
        try:
            while True:
                await asyncio.sleep(_FLUSH_S)
                await self._flush()
        finally:
            self._write(self._take())

    async def _flush(self) -> None:
        if self._waiting:
            await asyncio.to_thread(self._write, self._take())

    def _take(self) -> list[DecisionRecord]:
        records = list(self._waiting)
        self._waiting.clear()
        return records

    def _write(self, records: list[DecisionRecord]) -> None:
        """Append; a full or vanished disk loses these records, nothing else."""
        if not records:
            return
        lines = b"".join(self._encoder.encode(record) + b"\n" for record in records)
        try:
            with self._path.open("ab") as file:
                file.write(lines)
        except OSError as exc:
            for _ in records:
                self._on_drop()
            logger.warning(
                "decision records lost",
                extra={"file": str(self._path), "records": len(records), "reason": exc.strerror},
            )
