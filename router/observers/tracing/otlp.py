"""OTLP over HTTP, by OpenTelemetry's own exporter. No other file imports OpenTelemetry.

Its tracer and span processor are not used. They would make each span while its request runs, at 50
to 100 µs (sgl-project/sglang#30023).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from router.base.errors import ConfigError
from router.base.host_names import Names
from router.observers.tracing.spans import Span

# It logs each batch that fails, and its settings where they are wrong: these may be secrets.
logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

_PATH: Final = "/v1/traces"
_KINDS: Final = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_FINE: Final = Status()


class OtlpCollector:
    """A collector at a URL. OTEL_EXPORTER_OTLP_* says the rest: headers, certificates, timeout.

    Args:
        names: The addresses of hosts.

    Raises:
        ConfigError: one of these variables is wrong.
    """

    def __init__(self, endpoint: str, names: Names) -> None:
        session = requests.Session()
        session.trust_env = False  # no proxy, no password of ~/.netrc
        session.max_redirects = 0  # the collector is where the configuration says
        for scheme in ("http://", "https://"):
            session.mount(scheme, _ByAddress(names))
        try:
            self._exporter = OTLPSpanExporter(endpoint=_full(endpoint), session=session)
        except Exception as exc:
            why = f"{type(exc).__name__}; see the variables OTEL_EXPORTER_OTLP_*"
            raise ConfigError(f"tracing.endpoint: {why}", param="tracing.endpoint") from exc
        self._resource = _resource()
        self._scope = InstrumentationScope("warmroute", version("warmroute"))

    def send(self, spans: Sequence[Span]) -> bool:
        """Send spans; return whether the collector took them."""
        result = self._exporter.export([self._readable(span) for span in spans])
        return result is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Drop what is tried again."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> ReadableSpan:
        parent = None
        if span.parent_id is not None:
            parent = SpanContext(span.trace_id, span.parent_id, span.is_remote, _SAMPLED)
        return ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace_id, span.span_id, False, _SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(each.name, each.attributes, each.at_ns) for each in span.events],
            kind=_KINDS[span.kind],
            status=_FINE if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.begun_ns,
            end_time=span.ended_ns,
            instrumentation_scope=self._scope,
        )


class _ByAddress(requests.adapters.HTTPAdapter):
    """Connects to the address that a name has, and sends the name."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self._names = names

    def build_connection_pool_key_attributes(
        self, request: Any, verify: Any, cert: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is connected to, and over which TLS."""
        where, tls = super().build_connection_pool_key_attributes(request, verify, cert)
        name = where["host"]
        try:
            address = self._names.addresses_now(name)[0]
        except socket.gaierror as exc:
            raise requests.ConnectionError(exc) from exc
        if where["scheme"] == "https":
            tls |= {"server_hostname": name, "assert_hostname": name}
        return where | {"host": address}, tls

    def add_headers(self, request: Any, **_: Any) -> None:
        """Send the name that was asked for, not its address."""
        request.headers["Host"] = urlsplit(request.url).netloc.rpartition("@")[2]


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
