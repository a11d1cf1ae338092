"""Builds what describes the whole router for the live page and `warmroute tail`."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any, Final

from router.assembly.router import Router
from router.live.replica_rows import ReplicaRows
from router.live.state import (
    LiveState,
    SessionRows,
    experiment_fields,
    pool_fields,
    queue_fields,
    source_fields,
    tenant_fields,
    tokenizer_fields,
)

_MAX_NAMED: Final = 10  # host names


def build_live_state(router: Router) -> LiveState:
    """Build the sections of a state line; each is described when a line is made."""
    replicas = ReplicaRows(
        router.fleet, router.caches, router.waiting, router.metrics, router.losses
    )
    sessions = SessionRows(router.ledger, router.findings)
    room, config = router.story.steps.queue, router.config
    is_on = config.queue.is_on(config.policy.name)
    begun_s, release = time.monotonic(), version("warmroute")

    def about() -> dict[str, Any]:
        return {
            "version": release,
            "policy": config.policy.name,
            "up_s": round(time.monotonic() - begun_s),
            "listeners": len(router.feed),
            "unresolved": router.names.failing[:_MAX_NAMED],
        }

    return LiveState(
        {
            "router": about,
            "replicas": replicas.describe,
            "queue": lambda: queue_fields(room, is_on=is_on),
            "tokens": router.history.describe,
            "sessions": sessions.describe,
            "findings": sessions.describe_findings,
            "experiments": lambda: experiment_fields(router.experiments),
            "tokenizers": lambda: tokenizer_fields(router.fleet, router.prompters),
            "sources": lambda: source_fields(router.status),
            "pools": lambda: pool_fields(router.status),
            "tenants": lambda: tenant_fields(router.tenants, router.metrics),
            "sharing": router.status.sharing,
        }
    )
