"""Builds the public port and the admin port."""

from __future__ import annotations

from typing import Final

from router.api.clients import Clients
from router.api.routes import Routes
from router.assembly.live import build_live_state
from router.assembly.router import Router
from router.config.secrets import read_secret
from router.http.access import Access, Origins
from router.http.adapters import Adapters
from router.http.admin import AdminApp
from router.http.admin_pages import (
    EnginePages,
    ExperimentPages,
    ExplainPages,
    ReplicaPages,
    RouterPages,
)
from router.http.app import DataApp
from router.http.connection import Handler
from router.http.control import Control
from router.http.guard import Guard
from router.http.hook_pages import HookPages
from router.http.intake import Intake
from router.http.live_page import LivePage
from router.http.live_pages import LivePages
from router.http.pages import Pages
from router.http.server import Listener
from router.http.session_pages import SessionPages
from router.http.sockets import room_for_connections
from router.http.traced import TracedApp
from router.request.explain import Explainer
from router.tracing.trace import Tracer

_ADMIN_CONNECTIONS: Final = 256


def build_listeners(router: Router) -> tuple[Listener, Listener]:
    """Build the public port and the admin port; neither is bound yet.

    Raises:
        ConfigError: the file of the admin token cannot be read.
    """
    limits = router.config.limits
    public = Listener(
        "public",
        _public_handler(router),
        limits=limits,
        max_connections=room_for_connections(limits.connections),
        metrics=router.metrics,
        tls=router.certificates.get("listen"),
    )
    admin = Listener(
        "admin",
        _admin_app(router).build(),
        limits=limits,
        max_connections=_ADMIN_CONNECTIONS,
        metrics=router.metrics,
        tls=router.certificates.get("admin"),
    )
    return public, admin


def _public_handler(router: Router) -> Handler:
    """Build what answers the public port; what traces it only if there is a collector."""
    app = _data_app(router)
    if router.traces is None:
        return app.answer
    return TracedApp(app.answer, Tracer(router.config.tracing, router.traces.put), app.pages).answer


def _data_app(router: Router) -> DataApp:
    config = router.config
    access = Access(
        routes=Routes(config.forward.routes),
        clients=Clients(
            details=config.listen.detail_headers,
            trusted=config.listen.trusted,
            proxies=config.forward.trusted_proxies,
        ),
        origins=Origins(config.listen.allowed_origins),
        tenants=router.tenants,
    )
    return DataApp(
        story=router.story,
        realtime=router.story.steps.relay.realtime,
        pages=Pages(
            access=access,
            fleet=router.fleet,
            readiness=router.readiness,
            draining=router.draining,
            metrics=router.metrics,
        ),
        intake=Intake(config.limits, router.withheld, router.metrics),
        access=access,
        readiness=router.readiness,
        draining=router.draining,
        metrics=router.metrics,
    )


def _admin_app(router: Router) -> AdminApp:
    config = router.config
    control = Control(router.engine_api, router.registry, router.served_models, router.sleepers)
    guard = Guard(read_secret(config.admin.token_file, "admin.token_file"), config.admin.hosts)
    return AdminApp(
        [
            ReplicaPages(router.watches, router.status),
            ExperimentPages(router.experiments),
            EnginePages(control, Adapters(control, router.registry, router.fleet)),
            ExplainPages(Explainer(router.story, router.caches, router.fleet), router.tenants),
            SessionPages(router.ledger, router.findings, router.tenants),
            LivePages(router.feed, build_live_state(router)),
            HookPages(router.hooks, router.tenants, router.metrics),
            LivePage(needs_token=guard.needs_token),
            RouterPages(router.metrics, router.deaths, lambda: router.config),
        ],
        guard=guard,
        body_bytes=config.limits.body_bytes,
    )
