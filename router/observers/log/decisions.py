"""Decision records to a file, off the event loop, bounded: a slow disk loses records, not time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from router.base.bounded import Backlog
from router.records.record import DecisionRecord
from router.request.observer import Observer

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 10_000  # records; more are dropped and counted
_FLUSH_S: Final = 0.2


class DecisionLog(Observer):
    """Appends records to `path` as JSON lines."""

    def __init__(self, path: Path, on_drop: Callable[[], None]) -> None:
        self._path = path
        self._on_drop = on_drop
        self._waiting: Backlog[DecisionRecord] = Backlog(MAX_WAITING)
        self._lock = threading.Lock()
        self._reason: str | None = None  # why the last records are lost
        self._encoder = msgspec.json.Encoder()

    def recorded(self, record: DecisionRecord) -> None:
        """Queue one record; drop it if the writer is too far behind."""
        if not self._waiting.offer(record):
            self._on_drop()

    def describe(self) -> dict[str, str | None]:
        """Return where records go, and why the last ones are lost (None: they are not)."""
        return {"file": str(self._path), "reason": self._reason}

    async def run(self) -> None:
        """Write what was queued, every fifth of a second, and once more at the end."""
        try:
            while True:
                await asyncio.sleep(_FLUSH_S)
                await self._flush()
        finally:
            self.close()

    def close(self) -> None:
        """Write what is left."""
        self._write()

    async def _flush(self) -> None:
        if self._waiting:
            await asyncio.to_thread(self._write)

    def _write(self) -> None:
        """Append what is queued; a full or vanished disk loses these records, nothing else.

        Takes the records itself: a write that is cancelled before its thread began loses none,
        and of two at once (the last one, at the end) the second waits.
        """
        with self._lock:
            records = self._waiting.take()
            if records:
                self._append(records)

    def _append(self, records: list[DecisionRecord]) -> None:
        lines = b"".join(self._encoder.encode(record) + b"\n" for record in records)
        try:
            with self._path.open("ab") as file:
                file.write(lines)
        except OSError as exc:
            for _ in records:
                self._on_drop()
            reason = exc.strerror or type(exc).__name__
            if self._reason is None:  # said once; the metric counts on
                logger.warning(
                    "decision records lost",
                    extra={"file": str(self._path), "reason": reason},
                )
            self._reason = reason
        else:
            self._reason = None
