"""A bounded queue of requests that have ended, and a thread that sends their spans to a collector.

A request costs the event loop one append. If the collector is slow or gone, the queue fills, and
what does not fit is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol
from urllib.parse import urlsplit

from router.base.bounded import Backlog
from router.base.errors import ConfigError
from router.base.extras import install_hint
from router.base.host_names import Names
from router.metrics import Metrics
from router.observers.tracing.spans import Span, spans_of
from router.observers.tracing.trace import Trace

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 2048  # requests
_BATCH: Final = 16  # requests; to encode their spans holds the interpreter for 2 ms
EVERY_S: Final = 1.0
SETTLED_S: Final = 1.0  # after its end a request has its record, causes included
LAST_S: Final = 2.0  # for what waits when the router ends


class Collector(Protocol):
    """Who takes spans."""

    def send(self, spans: Sequence[Span]) -> bool:
        """Send spans, in the caller's thread; return whether they were taken."""

    def close(self) -> None:
        """Drop what is tried again."""


def collector_at(endpoint: str, names: Names | None = None) -> Collector:
    """Return the collector of `tracing.endpoint`; nothing is sent yet.

    Args:
        names: The addresses of hosts; None: no other client shares them.

    Raises:
        ConfigError: OpenTelemetry is not installed, or refuses its settings.
    """
    try:
        from router.observers.tracing.otlp import OtlpCollector
    except ImportError as exc:
        raise ConfigError(
            f"tracing.endpoint: OpenTelemetry is not installed. {install_hint('otel')}",
            param="tracing.endpoint",
        ) from exc
    return OtlpCollector(endpoint, names or Names())


class Exporter:
    """The queue and the thread.

    Args:
        endpoint: Of the collector, for the log.
    """

    def __init__(self, collector: Collector, endpoint: str, metrics: Metrics) -> None:
        self._host = urlsplit(endpoint).netloc.rpartition("@")[2]
        self._collector = collector
        self._waiting: Backlog[Trace] = Backlog(MAX_WAITING)
        self._spans = metrics.spans
        self._stop = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def put(self, trace: Trace) -> None:
        """Queue a request that has ended."""
        if not self._waiting.offer(trace):
            self._spans.labels("dropped").inc(1 + len(trace.attempts))

    def close(self) -> None:
        """Send what waits, if the collector takes it soon."""
        self._stop.set()
        self._thread.join(LAST_S)
        self._collector.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(EVERY_S)
            while batch := self._due(time.monotonic(), is_last=is_last):
                self._send(batch)

    def _due(self, now_s: float, *, is_last: bool) -> list[Trace]:
        """Remove and return the next requests that have records, as many as are sent at once."""
        batch: list[Trace] = []
        while self._waiting and len(batch) < _BATCH:
            if not is_last and self._waiting[0].ended_s + SETTLED_S > now_s:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _send(self, batch: Sequence[Trace]) -> None:
        spans: list[Span] = []
        reason = "refused, or not reached in time"
        try:
            spans = [span for trace in batch for span in spans_of(trace)]
            is_sent = self._collector.send(spans)
        except Exception as exc:  # whatever a library does: the thread goes on
            is_sent, reason = False, type(exc).__name__
        num_spans = len(spans) or len(batch)
        if is_sent == self._is_failing:
            self._is_failing = not is_sent
            where = {"collector": self._host}
            if is_sent:
                logger.info("spans are sent again", extra=where)
            else:  # once; the metric counts on
                logger.warning("spans lost", extra={**where, "reason": reason})
        self._spans.labels("sent" if is_sent else "failed").inc(num_spans)  # last: its log is there
