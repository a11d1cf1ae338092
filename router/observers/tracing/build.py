"""Builds the traces of requests, if there is a collector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.base.errors import ConfigError
from router.base.system import install_hint
from router.http.exchange import Access
from router.http.pages import Pages
from router.http.part import ObserverPart
from router.http.server import Handler
from router.observers.tracing.observer import TracedApp, Tracing

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part.

    Raises:
        ConfigError: OpenTelemetry is not installed, or refuses its settings.
    """
    config = router.config.tracing
    if config.endpoint is None:
        return ObserverPart()
    try:
        from router.observers.tracing.otlp import Spans
    except ImportError as exc:
        raise ConfigError(
            f"tracing.endpoint: OpenTelemetry is not installed. {install_hint('otel')}",
            param="tracing.endpoint",
        ) from exc
    spans = Spans(config, router.metrics)

    def traced(answer: Handler, pages: Pages, access: Access) -> Handler:
        return TracedApp(answer, spans.begin, pages, access).answer

    return ObserverPart(observers=[Tracing(spans)], wrap_answer=traced)
