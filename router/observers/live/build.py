"""Builds what describes the whole router for the live page and `warmroute tail`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from router.http.part import ObserverPart
from router.observers.live.admin import PAGE, LivePage, LivePages
from router.observers.live.recent import Feed, RecentRequests, TrafficHistory
from router.observers.live.state import (
    LiveState,
    Section,
    queue_fields,
    replica_fields,
    tenant_fields,
    tokenizer_fields,
)

_MAX_NAMED: Final = 10  # host names

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part."""
    feed, history, recent = Feed(), TrafficHistory(router.metrics), RecentRequests()
    return ObserverPart(
        observers=[feed, recent],
        pages=[
            LivePages(feed, LiveState(_sections(router, feed, history, recent))),
            LivePage(needs_token=router.guard.needs_token),
        ],
        open_paths=[PAGE],
        sweep=history.sweep,
    )


def _sections(
    router: Router, feed: Feed, history: TrafficHistory, recent: RecentRequests
) -> Mapping[str, Section]:
    """Return what describes each section of a state line when a line is made."""
    room, config = router.story.steps.queue, router.config
    is_on = config.queue.is_on(config.policy.name)
    begun_s, release = time.monotonic(), version("warmroute")

    def about() -> dict[str, Any]:
        return {
            "version": release,
            "policy": config.policy.name,
            "up_s": round(time.monotonic() - begun_s),
            "listeners": len(feed),
            "unresolved": router.names.failing[:_MAX_NAMED],
            "replaced_policies": router.story.steps.place.deciders.replaced,
        }

    sections: dict[str, Section] = {
        "recent": recent.describe,
        "router": about,
        "replicas": lambda: replica_fields(
            router.status, router.fleet, router.caches, router.waiting, router.metrics
        ),
        "queue": lambda: queue_fields(room, router.fleet.conversations, is_on=is_on),
        "tokens": history.describe,
        "sessions": lambda: {"total": 0, "forgotten": 0, "shown": []},
        "findings": list,
        "tokenizers": lambda: tokenizer_fields(router.fleet, router.prompters),
        "sources": router.status.sources,
        "pools": router.status.pools,
        "tenants": lambda: tenant_fields(router.tenants, router.metrics),
        "sharing": router.status.sharing,
    }
    for part in router.observers.values():
        sections |= part.sections
    return sections
