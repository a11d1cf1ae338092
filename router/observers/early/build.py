"""Builds what computes next prompts early, if that is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.part import ObserverPart
from router.observers.early.early import Early
from router.observers.early.early_results import EarlyMetrics
from router.observers.early.next_prompt import NextPrompts

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part."""
    metrics = EarlyMetrics(router.metrics.registry)
    if not router.config.early.is_on:
        return ObserverPart()
    steps = router.story.steps
    early = Early(
        fleet=router.fleet,
        prompts=NextPrompts(
            fleet=router.fleet,
            caches=router.caches,
            reader=steps.reader,
            tokenizer=steps.prompts.tokenizer,
        ),
        num_queued=lambda: steps.queue.num_waiting,
        upstream=router.upstream,
        headers=steps.headers,
        metrics=metrics,
    )
    return ObserverPart(observers=[early], loops={"early": early.run})
