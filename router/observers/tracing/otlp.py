"""OpenTelemetry's SDK: spans, their sampling, and a thread that sends them by OTLP over HTTP.

No other file imports OpenTelemetry. What the SDK would read from the environment is given here,
except for what docs/reference/records.md lists.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Final
from urllib.parse import urlsplit

import requests
from multidict import CIMultiDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.base.errors import ConfigError
from router.config import TracingConfig
from router.metrics import Metrics
from router.observers.tracing.spans import Span, Trace

logger = logging.getLogger(__name__)

# It logs each batch that fails, and its settings where they are wrong: these may be secrets.
logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

MAX_WAITING: Final = 4096  # spans
EVERY_S: Final = 1.0
LAST_S: Final = 2.0  # for what waits when the router ends
_BATCH: Final = 32  # spans; to encode them holds the interpreter for 2 ms
_PATH: Final = "/v1/traces"
_PARENT: Final = "traceparent"
_MOST: Final = 128  # attributes, events and links of a span, which have far fewer
_WRITER: Final = TraceContextTextMapPropagator()


class Spans:
    """Begins spans, and ends with them.

    Raises:
        ConfigError: a variable OTEL_EXPORTER_OTLP_* is wrong.
    """

    def __init__(self, config: TracingConfig, metrics: Metrics) -> None:
        assert config.endpoint is not None
        self._joins = config.join_clients
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=_resource(),
            shutdown_on_exit=False,
            span_limits=SpanLimits(*[_MOST] * 6, *[SpanLimits.UNSET] * 2),
        )
        self._queue = _Queue(Collector(config.endpoint, metrics), metrics)
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("warmroute", version("warmroute"))

    def begin(self, headers: Mapping[str, str], method: str) -> Trace | None:
        """Begin to follow a request. None: its client says that it is not sampled.

        What is not sampled here goes to engines as such. An engine that is told nothing would
        begin a trace of its own.
        """
        context, now_ns = Context(), time.time_ns()
        header = headers.get(_PARENT) if self._joins else None
        if header is not None and len(header) <= 512:
            context = _WRITER.extract({_PARENT: header}, context)  # its state is not for spans
        parent = get_current_span(context).get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:
            return None  # its headers pass through
        span = self._tracer.start_span(
            method, context, SpanKind.SERVER, start_time=now_ns, record_exception=False
        )
        return Trace(span, method, now_ns, is_joined=parent.is_valid, error_status=StatusCode.ERROR)

    def below(self, trace: Trace, at_ns: int) -> Span:
        """Begin a try of a request."""
        context = set_span_in_context(trace.span, Context())
        return self._tracer.start_span("try", context, SpanKind.CLIENT, start_time=at_ns)

    def write(self, span: Span, headers: CIMultiDict[str]) -> None:
        """Write a span's context into an engine's headers."""
        _WRITER.inject(headers, set_span_in_context(span, Context()))

    def close(self) -> None:
        """Send what waits, if the collector takes it soon."""
        ending = threading.Thread(target=self._queue.shutdown, name="traces end", daemon=True)
        ending.start()
        ending.join(LAST_S)


class _Queue(BatchSpanProcessor):
    """The SDK's queue and thread; counts what does not fit."""

    def __init__(self, collector: Collector, metrics: Metrics) -> None:
        super().__init__(collector, MAX_WAITING, 1e3 * EVERY_S, _BATCH, 1e4)
        self._collector = collector
        self._dropped = metrics.spans.labels("dropped")
        self._num_put = 0  # without those dropped

    def on_end(self, span: ReadableSpan) -> None:
        if self._num_put - self._collector.num_taken >= MAX_WAITING:
            self._dropped.inc()  # the SDK drops the oldest one
        else:
            self._num_put += 1
        super().on_end(span)


class Collector(SpanExporter):
    """A collector at a URL. OTEL_EXPORTER_OTLP_* says the rest: headers, certificates, timeout.

    Args:
        endpoint: Its URL.
        metrics: Count its spans.

    Raises:
        ConfigError: one of these variables is wrong.
    """

    def __init__(self, endpoint: str, metrics: Metrics) -> None:
        session = requests.Session()
        session.trust_env = False  # no proxy, no password of ~/.netrc
        session.max_redirects = 0  # the collector is where the configuration says
        try:
            self._exporter = OTLPSpanExporter(endpoint=_full(endpoint), session=session)
        except Exception as exc:
            why = f"{type(exc).__name__}; see the variables OTEL_EXPORTER_OTLP_*"
            raise ConfigError(f"tracing.endpoint: {why}", param="tracing.endpoint") from exc
        self.num_taken = 0  # spans, sent or not
        self._host = urlsplit(endpoint).netloc
        self._spans = metrics.spans
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans, in the thread of the queue."""
        self.num_taken += len(spans)
        reason = "refused, or not reached in time"
        try:
            result = self._exporter.export(spans)
        except Exception as exc:  # whatever a library does
            result, reason = SpanExportResult.FAILURE, type(exc).__name__
        is_sent = result is SpanExportResult.SUCCESS
        if is_sent == self._is_failing:
            self._is_failing = not is_sent
            where = {"collector": self._host}
            if is_sent:
                logger.info("spans are sent again", extra=where)
            else:  # once; the metric counts on
                logger.warning("spans lost", extra={**where, "reason": reason})
        # last: its log is there
        self._spans.labels("sent" if is_sent else "failed").inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Drop what is tried again."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _resource() -> Resource:
    """Describe this router. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add to it."""
    own = Resource(
        {
            "service.name": "warmroute",
            "service.version": version("warmroute"),
            "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        }
    )
    return own.merge(OTELResourceDetector().detect())


def _full(endpoint: str) -> str:
    """Return where traces go: an endpoint without a path has the usual one."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else parts._replace(path=_PATH).geturl()
