"""One log line for each request."""

from __future__ import annotations

import logging
from typing import Any

from router.request.observer import Facts, Observer
from router.request.results import Placement, Read

logger = logging.getLogger(__name__)


class RequestLog(Observer):
    """Logs what became of requests."""

    def ended(self, facts: Facts) -> None:
        if facts.placement is not None:
            logger.info("routed", extra={"fields": _routed(facts, facts.placement)})
            return
        logger.info(
            "client left before its request was sent",
            extra={
                **_whose(facts.read),
                "tokens": facts.prompt.num_tokens,
                "waited_ms": round(facts.tries.wait.waited_ms, 1),
            },
        )

    def counted(self, read: Read, num_tokens: int) -> None:
        logger.info("counted", extra={**_whose(read), "tokens": num_tokens})


def _whose(read: Read) -> dict[str, Any]:
    client = read.inbound.client
    return {
        "request": read.request_id,
        "client": client.address if client is not None else None,
        "model": read.model,
        "tenant": read.inbound.caller.name,
    }


def _routed(facts: Facts, placement: Placement) -> dict[str, Any]:
    """Return the fields of a request that was placed."""
    prompt, tries = facts.prompt, facts.tries
    read, client, variant = prompt.read, prompt.read.inbound.client, prompt.variant
    return {
        "request": read.request_id,
        "trace": facts.notes.get("trace"),
        "client": client.address if client is not None else None,
        "model": read.model,
        "tenant": read.inbound.caller.name,
        "replica": placement.lease.candidate,
        "variant": variant.record.label if variant is not None else None,
        "why": facts.plan.decision.reason,
        "prefill": tries.helped.where if tries.helped is not None else None,
        "tokens": prompt.num_tokens,
        "cached": facts.num_predicted_cached_tokens,
        "pool": placement.predicted.num_fetched_tokens,
        "reported": facts.num_reported_cached_tokens,
        "state": facts.state,
        "tries": len(tries.records),
        "status": facts.status,
        "outcome": facts.outcome.value,
        "router_ms": round(facts.router_ms, 2),
        "waited_ms": round(tries.wait.waited_ms, 1),
        "waited_for": tries.wait.held_by,
        "released": tries.wait.released,
        "ttft_ms": None if facts.ttft_ms is None else round(facts.ttft_ms, 1),
        "total_ms": round(facts.total_ms, 1),
    }
