"""A collector for tests: OTLP over HTTP, read by OpenTelemetry's own message types."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msgspec import Struct
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

KINDS = {
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
}


class Event(Struct, kw_only=True):
    """An event of a span."""

    name: str
    at_ns: int
    attributes: dict[str, Any]


class Received(Struct, kw_only=True):
    """A span as it arrived; ids as hex digits, "" for none."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[Event]
    is_error: bool

    def event(self, name: str) -> Event:
        """Return the only event of a name."""
        (found,) = [event for event in self.events if event.name == name]
        return found

    @property
    def event_names(self) -> list[str]:
        return [event.name.removeprefix("warmroute.") for event in self.events]


class Receiver:
    """What has arrived."""

    def __init__(self) -> None:
        self.url = ""
        self.raw: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.num_asked = 0
        self.asked = threading.Event()  # once
        self.status = 200  # that it answers with
        self.location = ""  # of a redirect
        self.hangs = threading.Event()
        self.hangs.set()  # cleared: it does not answer

    @property
    def spans(self) -> list[Received]:
        """Read all spans, in the order in which they began."""
        spans = [span for body in list(self.raw) for span in _spans(body)]
        return sorted(spans, key=lambda span: span.begun_ns)

    def of(self, kind: str) -> list[Received]:
        return [span for span in self.spans if span.kind == kind]

    @property
    def server(self) -> Received:
        """Return the only SERVER span of the router."""
        (span,) = [span for span in self.of("server") if span.service == "warmroute"]
        return span


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a collector, in threads of its own: a router that ends waits for it."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.num_asked += 1
            receiver.asked.set()
            receiver.hangs.wait()
            if self.path == "/v1/traces" and receiver.status == 200:
                receiver.headers.append(dict(self.headers.items()))
                receiver.raw.append(body)
            self.send_response(receiver.status if self.path == "/v1/traces" else 404)
            answer = ExportTraceServiceResponse().SerializeToString()
            if receiver.location:
                self.send_header("Location", receiver.location)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.hangs.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _spans(body: bytes) -> Iterator[Received]:
    request = ExportTraceServiceRequest.FromString(body)
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    service=service,
                    name=span.name,
                    kind=KINDS.get(span.kind, "other"),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    begun_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    events=[
                        Event(
                            name=event.name,
                            at_ns=event.time_unix_nano,
                            attributes=_attributes(event.attributes),
                        )
                        for event in span.events
                    ],
                    is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")
