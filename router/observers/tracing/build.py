"""Builds the traces of requests, if there is a collector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.base.errors import ConfigError
from router.base.extras import install_hint
from router.base.host_names import Names
from router.http.access import Access
from router.http.connection import Handler
from router.http.pages import Pages
from router.http.part import ObserverPart
from router.metrics import Metrics
from router.observers.tracing.observer import Tracing
from router.observers.tracing.traced_app import TracedApp

if TYPE_CHECKING:
    from router.assembly.router import Router


def collector_at(endpoint: str, names: Names | None = None, metrics: Metrics | None = None) -> Any:
    """Return the collector of `tracing.endpoint` (`otlp.Collector`); nothing is sent yet.

    Args:
        endpoint: Its URL.
        names: The addresses of hosts; None: no other client shares them.
        metrics: Count its spans; None: nobody asks for them.

    Raises:
        ConfigError: OpenTelemetry is not installed, or refuses its settings.
    """
    try:
        from router.observers.tracing.otlp import Collector
    except ImportError as exc:
        raise ConfigError(
            f"tracing.endpoint: OpenTelemetry is not installed. {install_hint('otel')}",
            param="tracing.endpoint",
        ) from exc
    return Collector(endpoint, names or Names(), metrics or Metrics())


def build(router: Router) -> ObserverPart:
    """Build the part.

    Raises:
        ConfigError: the extra is not installed.
    """
    config = router.config.tracing
    if config.endpoint is None:
        return ObserverPart()
    collector = collector_at(config.endpoint, router.names, router.metrics)
    from router.observers.tracing.otlp import Spans

    spans = Spans(collector, config, router.metrics)

    def traced(answer: Handler, pages: Pages, access: Access) -> Handler:
        return TracedApp(answer, spans.begin, pages, access).answer

    return ObserverPart(observers=[Tracing(spans)], wrap_answer=traced)
