"""OpenTelemetry traces: one SERVER span a request, one CLIENT span a try (extra `otel`).

    observer    the public port's requests, from arrival to answer         `TracedApp`, `Tracing`
    spans       what is followed of a request, and what its spans say      `Trace`, `finish`
    otlp        OpenTelemetry's SDK and its exporter                       `Spans`

Without `tracing.endpoint` no request is followed. With one, a sampled request begins its spans as
it goes. They are described and ended with their own times once its record is complete. Only `otlp`
imports OpenTelemetry.
"""
