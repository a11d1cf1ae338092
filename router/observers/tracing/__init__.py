"""OpenTelemetry traces: one SERVER span a request, one CLIENT span a try (extra `otel`).

    context  W3C trace context: what clients send and engines get       `Context`
    trace    what is followed of one request, and when it is followed   `Tracer`, `Trace`, `Attempt`
    spans    the spans of a trace that has ended: pure                   `spans_of`
    names    the names of attributes and events
    export   a queue, and a thread that sends                            `Exporter`
    otlp     OpenTelemetry's own exporter                                `OtlpCollector`

Without `tracing.endpoint` there is no `Tracer`, and no request has a `Trace`. With one, a request
only notes times and ids. Everything else is made of its decision record, off the event loop, once
it has ended. Only `otlp` imports OpenTelemetry.
"""
