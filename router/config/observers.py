"""Settings of observers: the operator's own ones, and OpenTelemetry traces."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from router.base.errors import ConfigError


class ObserversConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    load: Annotated[
        tuple[str, ...],
        Meta(
            description="classes that watch requests, as MODULE:CLASS; modules of the current "
            "directory are found, too"
        ),
    ] = ()


class TracingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    endpoint: Annotated[
        str | None,
        Meta(
            description="OTLP/HTTP endpoint of an OpenTelemetry collector, "
            "http://HOST:4318/v1/traces; default: no traces",
            extra={"flag": "tracing-endpoint", "metavar": "URL"},
        ),
    ] = None
    sample_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="share of the traces that begin here to record"),
    ] = 1.0
    join_clients: Annotated[
        bool,
        Meta(
            description="continue the trace of a client's traceparent header, recorded if that "
            "says so; false: every trace begins here"
        ),
    ] = True


def check_tracing(config: TracingConfig) -> None:
    """Refuse what is no endpoint.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    if config.endpoint is None:
        return
    try:
        parts = urlsplit(config.endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or "@" in parts.netloc:
        raise ConfigError(
            "tracing.endpoint: not http://HOST:PORT/PATH; credentials go into the variable "
            "OTEL_EXPORTER_OTLP_HEADERS",
            param="tracing.endpoint",
        )
