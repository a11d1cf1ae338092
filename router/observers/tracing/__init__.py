"""OpenTelemetry traces: one SERVER span a request, one CLIENT span a try (extra `otel`).

    trace       what is followed of one request                            `Trace`, `Attempt`
    observer    begins and ends a request's spans                          `Tracing`
    traced_app  the public port's requests, from arrival to answer         `TracedApp`
    spans       what a request's spans say, from its record                `finish`
    names       the names of attributes and events
    otlp        OpenTelemetry's SDK and its exporter                       `Spans`

Without `tracing.endpoint` no request is followed. With one, a sampled request begins its spans as
it goes. They are described and ended with their own times once its record is complete. Only `otlp`
imports OpenTelemetry.
"""
