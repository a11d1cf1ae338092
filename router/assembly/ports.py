"""Builds the public port and the admin port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.api.apis import ModelAliases
from router.api.routes import Routes
from router.api.sessions import Clients
from router.assembly.router import Router
from router.base.addresses import host_port
from router.base.listening import room_for_connections
from router.http.admin import (
    AdminApp,
    AdminPages,
    Control,
    EnginePages,
    ExplainPages,
    ReplicaPages,
    RouterPages,
)
from router.http.app import DataApp
from router.http.exchange import Access, Intake
from router.http.pages import OwnRoutes, Pages
from router.http.server import Handler, Listener
from router.request.explain import Explainer

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
    own_routes: OwnRoutes = {}
    for part in router.observers.values():
        own_routes = {**own_routes, **part.own_routes}
    access = _access(router, own_routes)
    app = _data_app(router, access, own_routes)
    answer: Handler = app.answer
    for part in router.observers.values():
        if part.wrap_answer is not None:
            answer = part.wrap_answer(answer, app.pages, access)
    return answer


def _access(router: Router, own_routes: OwnRoutes) -> Access:
    config = router.config
    return Access(
        routes=Routes(config.forward.routes, own_routes),
        clients=Clients(
            details=config.listen.detail_headers,
            trusted=config.listen.trusted,
            proxies=config.forward.trusted_proxies,
        ),
        tenants=router.tenants,
    )


def _data_app(router: Router, access: Access, own_routes: OwnRoutes) -> DataApp:
    config = router.config
    return DataApp(
        story=router.story,
        pages=Pages(
            access=access,
            fleet=router.fleet,
            readiness=router.readiness,
            draining=router.draining,
            metrics=router.metrics,
            aliases=ModelAliases(config.models.aliases),
            admin=host_port(config.admin.host, config.admin.port) if config.listen.shared else None,
        ),
        intake=Intake(config.limits, router.withheld, router.metrics),
        access=access,
        readiness=router.readiness,
        draining=router.draining,
        metrics=router.metrics,
        own_routes=own_routes,
    )


def _admin_app(router: Router) -> AdminApp:
    parts = router.observers.values()
    return AdminApp(
        _admin_pages(router),
        guard=router.guard,
        body_bytes=router.config.limits.body_bytes,
        open_paths=[path for part in parts for path in part.open_paths],
    )


def _admin_pages(router: Router) -> Sequence[AdminPages]:
    control = Control(
        router.engine_api,
        router.registry,
        router.discovery.served_models,
        router.discovery.sleepers,
    )
    return [
        ReplicaPages(router.discovery.watches, router.status),
        EnginePages(control),
        ExplainPages(Explainer(router.story, router.caches, router.fleet), router.tenants),
        RouterPages(router.metrics, lambda: router.config),
        *[pages for part in router.observers.values() for pages in part.pages],
    ]
