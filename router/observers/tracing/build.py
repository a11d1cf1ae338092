"""Builds the traces of requests, if there is a collector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.access import Access
from router.http.connection import Handler
from router.http.pages import Pages
from router.http.part import ObserverPart
from router.observers.tracing.export import Exporter, collector_at
from router.observers.tracing.observer import Tracing
from router.observers.tracing.trace import Tracer
from router.observers.tracing.traced_app import TracedApp

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part.

    Raises:
        ConfigError: the extra is not installed.
    """
    config = router.config.tracing
    if config.endpoint is None:
        return ObserverPart()
    exporter = Exporter(
        collector_at(config.endpoint, router.names), config.endpoint, router.metrics
    )
    tracer = Tracer(config, exporter.put)

    def traced(answer: Handler, pages: Pages, access: Access) -> Handler:
        return TracedApp(answer, tracer, pages, access).answer

    return ObserverPart(
        observers=[Tracing(on_close=exporter.close)], wrap_answer=traced, start=exporter.start
    )
