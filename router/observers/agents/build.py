"""Builds the routes for agents' hooks, and what computes next prompts early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.hook_pages import HookPages
from router.observers.part import Part
from router.request.early import Early
from router.request.next_prompt import NextPrompts

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> Part:
    """Build the part."""
    pages = [HookPages(router.hooks, router.tenants, router.metrics)]
    if not router.config.early.is_on:
        return Part(pages=pages)
    steps = router.story.steps
    early = Early(
        router.config.early,
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
        metrics=router.metrics,
    )
    return Part(observers=[early], pages=pages, loops={"early": early.run})
